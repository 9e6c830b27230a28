"""Renewals, shadow mode and the switch, with vLLM's real classes and a real master."""

import logging
import threading
import time

import pytest

pytest.importorskip("vllm")

import vllm_world as world
from test_vllm_path import (  # noqa: F401
    MODES,
    connection_folder,
    digests_of,
    fill,
    own,
    until,
)

from kvmask.errors import ArgumentError
from kvmask.vllm import lookup, renewing, shadow
from kvmask.vllm.acting import ACTING
from kvmask.vllm.binding import state
from kvmask.vllm.lookup import lookups_of

pytestmark = [pytest.mark.vllm, pytest.mark.store]

TOKENS = 768
FULL, WINDOW = TOKENS // 64, TOKENS // 16


def lookups_at(pair, mode):
    return pair.asking.place.lookups if mode == "own client" else lookups_of(pair.worker)


def hit(pair, digests):
    """The hit of a request whose prompt is in the store as a whole."""
    return pair.hit(world.request(TOKENS + 1, digests))


def records(pair, operation):
    """What either side counted of an operation since the last time."""
    found = []
    for side in (pair.worker_side, pair.scheduler_side):
        stats = side.get_kv_connector_stats()
        if stats is not None:
            found += stats.data.get(operation, [])
    return found


@pytest.fixture
def said(caplog, monkeypatch):
    """vLLM's loggers do not pass on what they are told."""
    log = logging.getLogger("test.vllm.renewing")
    monkeypatch.setattr(ACTING, "_log", log)
    monkeypatch.setattr(shadow, "logger", log)
    return lambda text: [r for r in caplog.records if text in r.getMessage()]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_repeated_prompt_needs_is_renewed(own, mode):  # noqa: F811
    extra, options = MODES[mode]
    pair = own.pair(extra, **options)
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    assert hit(pair, digests) == TOKENS
    assert records(pair, "renew_exists") == []
    assert hit(pair, digests) == TOKENS
    renewer = lookups_at(pair, mode).renewer
    until(lambda: renewer._tools.stats.renewed_keys)
    until(lambda: not renewer.renewals.pending)
    (record,) = records(pair, "renew_exists")
    # Stock's lookup asks for two windows of blocks in each 64 tokens. A quarter may be renewed.
    asked = FULL + WINDOW // 2
    assert record["num_keys"] == renewer.renewals.renewed == 2 * asked // 4
    assert record["status"] == "ok"
    pair.close()
    assert not renewer._thread.is_alive()


def test_the_option_and_the_variable_turn_it_off(own, monkeypatch):  # noqa: F811
    assert lookups_of(own.pair({"renew": False}).worker).renewer is None
    monkeypatch.setenv(renewing.VARIABLE, "0")
    assert lookups_of(own.pair().worker).renewer is None
    assert lookups_of(own.pair({"renew": True}).worker).renewer is not None
    with pytest.raises(ArgumentError, match="`renew`"):
        own.pair({"renew": "yes"})


def test_reset_forgets_what_was_renewed(own):  # noqa: F811
    pair = own.pair()
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    hit(pair, digests)
    renewer = lookups_of(pair.worker).renewer
    until(lambda: renewer.renewals._ends.within(digests, 4, 1, 13) == [12])
    assert pair.scheduler_side.reset_cache() is True
    assert renewer.renewals._ends.within(digests, 4, 1, 13) == []


def test_what_follows_a_lookup_teaches_nothing_after_a_reset(own):  # noqa: F811
    """The lookup's answer is out, and what follows it is yet to be done."""
    pair = own.pair()
    digests = digests_of(TOKENS)
    for _ in range(5):
        fill(pair.worker, TOKENS, digests)
        hit(pair, digests)
        assert pair.scheduler_side.reset_cache() is True
        time.sleep(0.005)
        renewals = lookups_of(pair.worker).renewer.renewals
        until(lambda known=renewals: not known.pending)
        assert renewals._ends.within(digests, 4, 1, 13) == []


def test_shadow_mode_answers_with_stock_and_compares(own, said, monkeypatch):  # noqa: F811
    pair = own.pair({"shadow": 2})
    worker, digests = pair.worker, digests_of(TOKENS)
    fill(worker, TOKENS, digests)
    watcher = state(worker)["shadow"]
    for _ in range(5):
        assert hit(pair, digests) == TOKENS
        until(lambda: not watcher.busy)
    assert (watcher.compared, watcher.differing, watcher.left_out) == (2, 0, 0)
    assert "lookups" not in state(worker)
    assert [r["status"] for r in records(pair, "shadow_lookup")] == ["ok", "ok"]
    monkeypatch.setattr(shadow, "result_of", lambda *args: "another hit")
    assert hit(pair, digests) == TOKENS
    until(lambda: watcher.compared == 3)
    assert watcher.differing == 1
    assert len(said("a lookup of 769 tokens differs (1 of 3 so far)")) == 1
    monkeypatch.setattr(shadow, "drive", None)
    for _ in range(2):
        hit(pair, digests)
    until(lambda: watcher.compared == 4)
    assert len(said("kvmask fails with TypeError")) == 1
    assert [r["status"] for r in records(pair, "shadow_lookup")] == ["error", "error"]
    pair.close()
    assert not watcher._thread.is_alive()


def test_shadow_mode_tells_a_changed_store_from_a_difference(own, said, monkeypatch):  # noqa: F811
    pair = own.pair({"shadow": 1})
    worker, digests = pair.worker, digests_of(TOKENS)
    fill(worker, TOKENS, digests)
    watcher = state(worker)["shadow"]
    right = shadow.result_of

    def while_it_changes(scheme, plan):
        result = right(scheme, plan)
        for key in world.keys_of(worker, 0, digests[3]):
            worker.store.remove(key, True)
        return type(result)(0, ())

    monkeypatch.setattr(shadow, "result_of", while_it_changes)
    assert hit(pair, digests) == TOKENS
    until(lambda: watcher.left_out == 1)
    assert (watcher.compared, watcher.differing) == (0, 0)


def test_masks_are_compared_too(own, said, monkeypatch):  # noqa: F811
    pair = own.pair({"shadow": 1})
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    watcher = state(pair.worker)["shadow"]
    monkeypatch.setattr(shadow.coordinator, "load_mask", lambda *args: ([True], [False]))
    assert hit(pair, digests) == TOKENS
    until(lambda: watcher.compared)
    assert watcher.differing == 1
    assert len(said("load_mask of 768 tokens")) == 1


def refuse(*args):
    raise RuntimeError("can't start new thread")


def test_shadow_mode_never_changes_what_stock_answers(own, said, monkeypatch):  # noqa: F811
    pair = own.pair({"shadow": 1})
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    with monkeypatch.context() as patch:
        patch.setattr(shadow.threading.Thread, "start", refuse)
        assert shadow.lookup(pair.worker, TOKENS + 1, digests).hit_length == TOKENS
    assert state(pair.worker)["shadow"].left_out == 1
    assert hit(pair, digests) == TOKENS
    until(lambda: state(pair.worker)["shadow"].compared == 1)


def test_a_comparison_that_is_stuck_holds_up_no_shutdown(monkeypatch):
    monkeypatch.setattr(shadow, "CLOSE_SECONDS", 0.05)
    begun, gate = threading.Event(), threading.Event()
    watcher = shadow.Shadow(None, 1, "staged")
    monkeypatch.setattr(watcher, "_compare", lambda *job: begun.set() or gate.wait(20))
    watcher.take(16, [b"a"], None)
    assert begun.wait(20)
    watcher.close()
    assert watcher._thread.is_alive()
    gate.set()
    watcher._thread.join(20)
    assert not watcher._thread.is_alive()


def test_what_follows_a_lookup_does_not_end_the_thread_that_serves_lookups(own):  # noqa: F811
    pair = own.pair({"lookup_in": "worker"})
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    lookups_of(pair.worker).ended.append(refuse)
    assert lookup.lookup(pair.worker, TOKENS + 1, digests).hit_length == TOKENS


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_shadow_is_a_number(value):
    with pytest.raises(ArgumentError, match="`shadow`"):
        shadow.check_option(value)


@pytest.mark.parametrize("mode", MODES)
def test_the_switch_file_puts_stocks_lookups_back(own, mode, said, tmp_path):  # noqa: F811
    file = tmp_path / "switch"
    extra, options = MODES[mode]
    pair = own.pair({"switch_file": str(file), **extra}, **options)
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    assert hit(pair, digests) == TOKENS
    (record,) = records(pair, "lookup_exists")[-1:]
    assert record["num_keys"] < FULL + WINDOW // 2
    file.write_text("stock")
    ACTING.look()
    assert hit(pair, digests) == TOKENS
    (record,) = records(pair, "lookup_exists")
    assert record["num_keys"] == FULL + WINDOW // 2
    file.write_text("kvmask")
    ACTING.look()
    assert hit(pair, digests) == TOKENS
    assert records(pair, "lookup_exists")[-1]["num_keys"] < FULL + WINDOW // 2
    assert [len(said("kvmask is off")), len(said("kvmask is on again"))] == [1, 1]


@pytest.mark.gives_up
@pytest.mark.parametrize("mode", MODES)
def test_an_internal_error_puts_stocks_lookups_back(own, mode, said, monkeypatch):  # noqa: F811
    extra, options = MODES[mode]
    pair = own.pair(extra, **options)
    digests = digests_of(TOKENS)
    fill(pair.worker, TOKENS, digests)
    assert hit(pair, digests) == TOKENS
    monkeypatch.setattr(lookup, "LookupPlan", None)
    for _ in range(2):
        assert hit(pair, digests) == TOKENS
    assert ACTING.failed
    assert len(said("kvmask failed in")) == 1


@pytest.mark.gives_up
def test_an_internal_error_of_the_hasher_puts_stocks_back(said, monkeypatch):
    from kvmask.vllm import hashing

    request = type("Request", (), {"block_hashes": [], "num_tokens": 64})()
    monkeypatch.setattr(hashing, "_own_hasher", lambda *args, **kwargs: lambda request: ["own"])
    made = hashing.request_block_hasher(16, hashing.hashing.sha256)
    assert made(request) == ["own"]  # it has no features: kvmask's own code cannot read it
    assert ACTING.failed
    assert made(request) == ["own"]
    assert len(said("kvmask failed in engine.block_hasher")) == 1


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("", True), ("on", True), ("0", False), ("false", False), (" Off ", False)],
)
def test_the_variable_is_read_as_the_other_switches_are(monkeypatch, value, on):
    monkeypatch.setenv("KVMASK_RENEW", value)
    assert renewing.check_option(None) is on
    monkeypatch.setenv("KVMASK_RENEW", "maybe")
    said = []
    monkeypatch.setattr(renewing.logger, "error", lambda text, *more: said.append(text % more))
    assert renewing.check_option(None) is True
    assert said == ["`KVMASK_RENEW` must be 1 or 0, got 'maybe': lookups are renewed"]
