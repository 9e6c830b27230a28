"""The presence memo and the counters of a KVTransfer."""

import sys

import pytest
from fake_store import EXIST, GET, PUT
from rig import digests, key, pair

from kvmask import FullAttention, PresenceMemo
from kvmask.errors import MissingDependencyError, StoreError


def full_pair(**options):
    return pair([FullAttention(16)], 16, 64, **options)


# The memo


def test_a_memo_saves_questions_until_its_time_is_over():
    now = [-1000.0]
    memo = PresenceMemo(seconds=2.0, clock=lambda: now[0])
    source, target = full_pair(memo=memo)
    source.kv.save(digests(4), source.tables, 64)
    assert len(memo) == 4
    before = source.store.counts[EXIST]
    assert source.kv.lookup(digests(4), 65).length == 64
    assert source.store.counts[EXIST] == before  # what was saved is known
    assert source.kv.stats.memo_keys == 4
    now[0] += 2.0
    assert source.kv.lookup(digests(4), 65).length == 64
    assert source.store.counts[EXIST] == before + 1
    source.store.evict(list(source.store.pool))
    hit = target.kv.lookup(digests(4), 65)
    assert hit.length == 64  # the entry outlives the object
    result = target.kv.load(digests(4), target.tables, hit)
    assert len(result.failed) == 4
    assert len(memo) == 0  # and the load said so
    assert target.kv.lookup(digests(4), 65).length == 0


def test_a_memo_is_bounded_and_keeps_what_came_last():
    memo = PresenceMemo(seconds=1, capacity=3, clock=lambda: 0.0)
    memo.add("abc")
    memo.add("ad")
    assert memo.known("abcd") == [True, False, True, True]
    memo.forget(["a", "x"])
    assert memo.known("acd") == [False, True, True]
    memo.clear()
    assert len(memo) == 0


def test_a_memo_does_not_learn_what_failed_or_was_absent():
    memo = PresenceMemo(clock=lambda: 0.0)
    source, _ = full_pair(memo=memo)
    lost = key(source, 0, digests(4)[1])
    source.store.fail(PUT, -200, keys=[lost])
    source.kv.save(digests(4), source.tables, 64)
    assert memo.known([lost]) == [False]
    assert source.kv.lookup(digests(4), 65).length == 16
    assert memo.known([lost]) == [False]


# Counters


def test_counters_add_up():
    source, target = full_pair(layers=1)
    source.store.fail(PUT, -800, keys=[key(source, 0, digests(4)[3])], times=1)
    source.kv.save(digests(4), source.tables, 64)
    source.kv.save(digests(4), source.tables, 64)
    hit = target.kv.lookup(digests(4), 65)
    target.store.fail(GET, -704, keys=[key(source, 0, digests(4)[0])])
    target.kv.load(digests(4), target.tables, hit)
    saved, loaded = source.kv.stats.snapshot(), target.kv.stats.snapshot()
    assert saved["saves"] == 2
    assert (saved["stored_keys"], saved["save_present_keys"], saved["save_failed_keys"]) == (
        4,
        3,
        1,
    )
    assert saved["stored_bytes"] == 4 * 48
    assert (loaded["lookups"], loaded["probes"], loaded["hit_tokens"]) == (1, 1, 64)
    assert (loaded["asked_keys"], loaded["present_keys"], loaded["exact_keys"]) == (4, 4, 4)
    assert (loaded["loads"], loaded["loaded_keys"], loaded["load_failed_keys"]) == (1, 3, 1)
    assert loaded["loaded_bytes"] == 3 * 48
    assert hit.store_seconds >= 0
    assert hit.other_seconds >= 0
    assert "loaded_keys=3" in repr(target.kv.stats)
    with pytest.raises(AttributeError):
        target.kv.stats.nothing  # noqa: B018
    with pytest.raises(KeyError):
        target.kv.stats.add(nothing=1)


def test_prometheus_text():
    pytest.importorskip("prometheus_client")
    from kvmask.plans.metrics import exposition

    source, _ = full_pair()
    source.kv.save(digests(4), source.tables, 64)
    text = exposition(source.kv.stats, {"rank": "3"})
    assert 'kvmask_stored_keys_total{rank="3"} 4.0' in text
    assert "# HELP kvmask_stored_keys_total Keys written" in text


def test_metrics_without_prometheus_say_what_to_install(monkeypatch):
    from kvmask.plans.metrics import exposition

    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    source, _ = full_pair()
    with pytest.raises(MissingDependencyError, match="pip install prometheus-client"):
        exposition(source.kv.stats)


def test_answers_to_more_than_was_asked(monkeypatch):
    """The memo knows two of four keys: four answers to the other two are an error."""
    memo = PresenceMemo(seconds=60)
    source, _ = full_pair(memo=memo)
    source.kv.save(digests(2), source.tables, 32)
    monkeypatch.setattr(source.store, "batch_is_exist", lambda keys: [1] * 4)
    with pytest.raises(StoreError, match="got 4 answers to 2 keys"):
        source.kv.lookup(digests(4), 65)
