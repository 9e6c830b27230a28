"""A store that stops answering: one call, then none; one tries again; one line says so."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from fake_store import EXIST, GET, PUT, RPC_FAIL, UNREGISTER
from rig import Engine, answer_with, contract_of, digests, key, mooncake_tools, pair, scheme_of

from kvmask import (
    AbsenceMemo,
    Breaker,
    Coordinator,
    CostModel,
    FullAttention,
    LookupPlan,
    PresenceMemo,
    SavePlan,
    SlidingWindow,
    StorePolicy,
    drive,
    mooncake,
)
from kvmask.errors import ArgumentError, PlanStateError, StoreError
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import CALL_FAILED, NOT_TRIED, PlanTools

GONE = RuntimeError("no route")
HASHES = digests(4)
# Small first batches, so that a lookup takes several calls.
COSTS = CostModel(call=1.0, missing=1.0)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def full_pair(**options):
    options.setdefault("max_pieces", 1)
    return pair([FullAttention(16)], 16, 64, layers=1, **options)


def made(store):
    """Calls of each kind that the store saw."""
    return [store.counts[name] for name in (EXIST, PUT, GET)]


def told(how):
    """The code of a key whose call was not answered."""
    return CALL_FAILED if how is GONE else how


def codes(result):
    return [f.code for f in result.failures]


# One plan


@pytest.mark.parametrize("how", [GONE, -900, -901], ids=["raised", "code", "silent"])
def test_a_save_makes_one_call_that_is_not_answered(how):
    source, _ = full_pair(breaker=None)
    source.store.fail(PUT, how, index=1)
    result = source.save(HASHES, 64)
    assert made(source.store) == [1, 2, 0]
    assert (result.stored, codes(result)) == (1, [told(how), NOT_TRIED, NOT_TRIED])
    assert result.mark == 16
    causes = [f.cause for f in result.failures]
    if how is GONE:
        assert causes == [GONE] * 3
    else:
        assert causes[0] is None
        assert causes[1] is causes[2]
        assert (type(causes[1]), causes[1].code) == (StoreError, how)
    assert source.kv.stats.spared_calls == 2


@pytest.mark.parametrize("how", [GONE, -900, -901], ids=["raised", "code", "silent"])
def test_a_save_whose_question_is_not_answered_puts_nothing(how):
    source, _ = full_pair(breaker=None)
    source.store.fail(EXIST, how)
    result = source.save(HASHES, 64)
    assert made(source.store) == [1, 0, 0]
    assert codes(result) == [told(how)] * 4
    assert all(f.cause is not None for f in result.failures)


@pytest.mark.parametrize("how", [GONE, -900, -901], ids=["raised", "code", "silent"])
def test_a_load_makes_one_call_that_is_not_answered(how):
    source, target = full_pair(breaker=None)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, how, index=1)
    result = target.load(HASHES, hit)
    assert made(target.store) == [1, 0, 2]
    assert (result.loaded, codes(result)) == (1, [told(how), NOT_TRIED, NOT_TRIED])
    assert (result.usable_tokens, target.kv.stats.spared_calls) == (16, 2)


@pytest.mark.parametrize("how", [GONE, -900, -901], ids=["raised", "code", "silent"])
def test_a_renewal_that_is_not_answered_ends_the_load(how):
    source, target = full_pair(breaker=None)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, -707)
    target.store.fail(EXIST, how, index=1)
    result = target.load(HASHES, hit)
    assert made(target.store) == [2, 0, 1]
    assert codes(result) == [CALL_FAILED] + [NOT_TRIED] * 3


@pytest.mark.parametrize("memo", [None, PresenceMemo()], ids=["", "memo"])
@pytest.mark.parametrize("how", [GONE, -900, -901], ids=["raised", "code", "silent"])
def test_a_lookup_of_windows_ends_with_the_first_call(how, memo):
    """F16: it went on to the left, one call after another."""
    groups = [SlidingWindow(16, window=32)]
    source, _ = pair(groups, 16, 1024, breaker=None, memo=memo, costs=COSTS, hints=None)
    assert source.lookup(digests(64), 1025).probes > 1
    before = source.store.counts[EXIST]
    source.store.fail(EXIST, how)
    hit = source.lookup(digests(64), 1025)
    assert source.store.counts[EXIST] == before + 1
    assert (hit.length, hit.answered, hit.probes) == (0, False, 1)
    assert hit.unknown == hit.asked > 0
    assert hit.cause is GONE if how is GONE else hit.cause.code == how
    assert source.kv.stats.failed_lookups == 1


def test_an_answer_in_part_or_of_other_codes_hides_nothing():
    """B46 stays."""
    for code, keys in ((-800, None), (-900, 1), (-704, None)):
        source, target = full_pair(max_pieces=2)
        source.save(HASHES, 64)
        hit = target.lookup(HASHES, 65)
        lost = None if keys is None else [key(source, 0, HASHES[0])]
        target.store.fail(GET, code, index=0, keys=lost)
        result = target.load(HASHES, hit)
        assert made(target.store) == [1, 0, 2]
        assert codes(result) == [code] * (2 if keys is None else 1)
        assert not target.kv.tools.breaker.open


def test_what_is_no_answer_is_for_the_policy_to_say():
    class Strange(StorePolicy):
        outage_codes = frozenset({-5, -6})

    assert not StorePolicy().outage([-900])
    assert not MooncakePolicy().outage([])
    assert MooncakePolicy().outage([-900] * 3)
    assert MooncakePolicy().outage([-901, -900])
    assert not MooncakePolicy().outage([-900, 0])
    source, _ = pair([FullAttention(16)], 16, 64, policy=Strange())
    source.store.fail(EXIST, -5)
    assert codes(source.save(HASHES, 64)) == [-5] * 4
    assert source.kv.tools.breaker.open


def test_an_answer_that_can_be_read_once_is_read_once():
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    plan = LookupPlan(scheme, HASHES, 65, tools=mooncake_tools(log=None))
    n = len(plan.next_call().args[0])
    plan.feed(iter([-900] * n))
    assert plan.result.cause.code == -900


# The breaker


def test_the_next_calls_are_spared_until_one_tries_again(caplog):
    clock = Clock()
    source, target = full_pair(breaker=Breaker(5.0, clock=clock))
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.master_dead = True
    before = made(target.store)
    assert codes(target.load(HASHES, hit)) == [RPC_FAIL] + [NOT_TRIED] * 3
    assert made(target.store) == [before[0], before[1], before[2] + 1]
    # None of these makes a call.
    before = made(target.store)
    for _ in range(3):
        spared = target.lookup(HASHES, 65)
        assert (spared.length, spared.asked, spared.probes, spared.unknown) == (0, 0, 0, 0)
        assert not spared.answered
        assert spared.cause.code == RPC_FAIL
        assert codes(target.load(HASHES, hit)) == [NOT_TRIED] * 4
        saved = target.save(HASHES, 64)
        assert (codes(saved), saved.mark) == ([NOT_TRIED] * 4, 0)
        assert all("before it is called again" in str(f.cause) for f in saved.failures)
    assert made(target.store) == before
    # One tries again; it fails, and the others are spared again.
    clock.now += 5.0
    assert target.lookup(HASHES, 65).probes == 1
    assert target.lookup(HASHES, 65).probes == 0
    assert made(target.store) == [before[0] + 1, *before[1:]]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the store does not answer" in caplog.records[0].getMessage()
    # It comes back.
    target.store.master_dead = False
    assert target.lookup(HASHES, 65).probes == 0
    clock.now += 5.0
    assert target.lookup(HASHES, 65) == hit
    assert target.load(HASHES, hit).ok
    assert [r.getMessage() for r in caplog.records][1:] == ["the store answers again"]
    stats = target.kv.stats
    assert stats.outages == target.kv.tools.breaker.outages == 1
    # The load's three gets; per round a lookup, four gets and a question; two lookups more.
    assert stats.spared_calls == 3 + 3 * 6 + 2


def test_a_plan_by_hand_has_the_breaker_too():
    clock = Clock()
    tools = mooncake_tools(breaker=Breaker(clock=clock), log=None)
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    plan = LookupPlan(scheme, HASHES, 65, tools=tools)
    plan.next_call()
    plan.fail(GONE)
    assert tools.breaker.open
    plan = LookupPlan(scheme, HASHES, 65, tools=tools)
    assert plan.next_call() is None
    assert not plan.result.answered
    clock.now += tools.breaker.seconds
    plan = LookupPlan(scheme, HASHES, 65, tools=tools)
    answer_with(plan, lambda call: [1] * len(call.args[0]))
    assert (plan.result.length, tools.breaker.open) == (64, False)


def test_a_plan_under_way_stops_when_another_finds_out():
    source, target = full_pair(breaker=Breaker())
    tools = target.kv.tools
    plan = SavePlan(target.bound, HASHES, target.tables, 64, tools=tools)
    plan.next_call()
    plan.feed([0] * 4)
    plan.next_call()
    source.store.fail(EXIST, GONE)
    source.lookup(HASHES, 65)  # the two share a breaker
    plan.feed([0])
    assert plan.next_call() is None
    assert (plan.result.stored, codes(plan.result)) == (1, [NOT_TRIED] * 3)


class Waits:
    def __init__(self):
        self.times = 0

    def synchronize(self):
        self.times += 1


def test_the_call_that_tries_again_may_wait_for_an_event_first():
    clock = Clock()
    source, target = full_pair(breaker=Breaker(clock=clock))
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, GONE, times=1)
    target.load(HASHES, hit)
    event = Waits()
    assert codes(target.load(HASHES, hit, event=event)) == [NOT_TRIED] * 4
    assert event.times == 0  # its memory is not touched
    clock.now += 10.0
    assert target.load(HASHES, hit, event=event).ok
    assert event.times == 1


def test_threads_share_one_try():
    clock = Clock()
    breaker = Breaker(clock=clock)
    assert breaker.failed(GONE, 0)
    clock.now += 10.0
    start, got = threading.Barrier(8), []

    def run():
        start.wait(10)
        got.append(breaker.refusal())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got.count(None) == 1
    # The one that tries may be dropped: after as long again another does.
    clock.now += 10.0
    assert breaker.refusal() is None


def test_old_news_change_nothing():
    breaker = Breaker(clock=Clock())
    assert breaker.failed(GONE, 0)
    assert not breaker.failed(GONE, 0)  # another thread's call, of the same outage
    assert not breaker.answered(0)  # one that was under way since before
    assert breaker.open
    assert breaker.answered(1)
    assert not breaker.failed(GONE, 0)
    assert (breaker.open, breaker.outages) == (False, 1)


@pytest.mark.parametrize("wrong", [TypeError("bad call"), KeyboardInterrupt()], ids=repr)
def test_a_wrong_call_is_no_outage(wrong):
    source, _ = full_pair(breaker=Breaker())
    source.store.fail(EXIST, wrong, times=2)
    for call in (lambda: source.save(HASHES, 64), lambda: source.lookup(HASHES, 65)):
        with pytest.raises(type(wrong)):
            call()
    assert not source.kv.tools.breaker.open
    assert source.save(HASHES, 64).ok


def test_a_malformed_answer_is_no_outage():
    source, _ = full_pair(breaker=Breaker())
    source.store.short_answer(PUT, index=0)
    result = source.save(HASHES, 64)
    assert (result.stored, len(result.failures)) == (3, 1)
    assert not source.kv.tools.breaker.open


def test_keys_that_fail_through_an_outage_are_not_remembered_as_bad():
    memo = AbsenceMemo()
    source, target = full_pair(failed_loads=memo, breaker=None)
    source.save(HASHES, 64)
    hit = target.lookup(HASHES, 65)
    target.store.fail(GET, -800, index=0)
    target.store.fail(GET, GONE, index=1)
    target.load(HASHES, hit)
    assert memo.known(target.store.calls(GET)[0].keys) == [True]
    assert len(memo) == 1


def test_what_failed_before_an_outage_is_logged_too(caplog):
    source, _ = full_pair(breaker=Breaker())
    source.store.fail(PUT, -200, index=0)
    source.store.fail(PUT, GONE, index=1)
    source.save(HASHES, 64)
    outage, rest = [r.getMessage() for r in caplog.records]
    assert "no route" in outage
    assert "1 with codes [-200]" in rest


def test_the_breaker_keeps_no_frames():
    """An exception keeps its frames, and they the engine's memory."""

    class Big:
        pass

    breaker, seen = Breaker(), []

    def fail():
        big = Big()
        seen.append(weakref.ref(big))
        raise RuntimeError("gone")

    try:
        fail()
    except RuntimeError as error:
        breaker.failed(error, 0)
    gc.collect()
    assert seen[0]() is None


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_seconds_that_are_none(seconds):
    with pytest.raises(ArgumentError, match="`seconds` must be more than 0 and finite"):
        Breaker(seconds)
    with pytest.raises(TypeError, match="`seconds` must be a number, got str"):
        Breaker("5")
    with pytest.raises(TypeError, match="`breaker` must be a Breaker, a bool or None, got float"):
        PlanTools(breaker=5.0)
    assert PlanTools().breaker is None
    assert PlanTools(breaker=False).breaker is None
    assert PlanTools(breaker=True).breaker.seconds == 10.0


# A fork


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork with threads
def test_a_forked_child_may_not_use_a_transfer():
    source, _ = full_pair()
    before = made(source.store)
    with source.kv._lock:  # as if another thread held it while the fork happens
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for call in (lambda: source.save(HASHES, 64), lambda: source.lookup(HASHES, 65)):
                    with pytest.raises(PlanStateError, match="in the process that made it, got"):
                        call()
                source.kv.close()
                same = made(source.store) == before and not source.store.calls(UNREGISTER)
                status = 0 if same and source.store.registered else 2
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert source.save(HASHES, 64).ok
    source.kv.close()
    assert not source.store.registered


CHILD = """
import os, sys
from kvmask import mooncake
store = mooncake.connect({
    "metadata_server": "P2PHANDSHAKE", "master_server_address": sys.argv[1], "protocol": "tcp",
    "global_segment_size": 16 << 20, "local_buffer_size": 16 << 20}, hostname="127.0.0.1")
assert store.put("forked", b"x") == 0
pid = os.fork()
if pid == 0:
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(status, store.is_exist("forked"))
store.close()
"""


@pytest.mark.store
def test_a_forked_child_of_a_connected_process_ends(master):
    root = Path(mooncake.__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, master.address],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["7", "1"], done.stderr[-2000:]


# A live master that is killed


class Counted:
    """A store that counts its calls."""

    def __init__(self, store):
        self.store = store
        self.calls = []

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def run(*args):
            self.calls.append(name)
            return call(*args)

        return run


@pytest.mark.store
def test_a_master_that_is_killed():
    """F16: 24 puts took as many calls of four seconds each. Now one, and then none."""
    if mooncake.find_master() is None:
        pytest.skip("no mooncake_master program on this machine")
    try:
        mooncake.import_store()
    except ImportError as error:
        pytest.skip(str(error))
    with mooncake.local_master() as own:
        store = mooncake.connect(own, segment_bytes=16 << 20, buffer_bytes=16 << 20)
        counted = Counted(store)
        contract = contract_of([FullAttention(16)], 16, model="outage")
        engine = Engine(
            counted, contract, 24 * 16, seed=3, max_pieces=1, layers=1, breaker=Breaker(3600.0)
        )
        try:
            hashes = digests(24)
            assert engine.save(hashes, 24 * 16).ok
            hit = engine.lookup(hashes, 24 * 16 + 1)
            assert hit.length == 24 * 16
            plan = SavePlan(
                engine.bound, digests(24, salt=1), engine.tables, 24 * 16, tools=engine.kv.tools
            )
            plan.next_call()
            plan.feed([0] * 24)
            os.kill(own.pid, signal.SIGKILL)
            own.process.wait(10)
            counted.calls.clear()
            result = drive(plan, counted)
            assert counted.calls == [PUT]
            assert codes(result) == [RPC_FAIL] + [NOT_TRIED] * 23
            counted.calls.clear()
            assert len(engine.load(hashes, hit).failures) == 24
            assert len(engine.save(digests(24, salt=2), 24 * 16).failures) == 24
            assert not engine.lookup(hashes, 24 * 16 + 1).answered
            assert counted.calls == []
            assert (engine.kv.stats.outages, engine.kv.stats.stored_keys) == (1, 24)
        finally:
            engine.kv.close()
            store.close()
