"""The memories of keys, and the counters of a KVTransfer."""

import sys
import threading

import pytest
from fake_store import EXIST, GET, PUT
from rig import assert_loaded, digests, key, pair

from kvmask import AbsenceMemo, FullAttention, Hit, PresenceMemo
from kvmask.errors import MissingDependencyError
from kvmask.plans import MALFORMED_ANSWER
from kvmask.plans.metrics import COUNTERS, TransferStats


def full_pair(**options):
    return pair([FullAttention(16)], 16, 64, **options)


# The presence memo


def test_a_memo_saves_questions_until_its_time_is_over():
    now = [-1000.0]
    memo = PresenceMemo(seconds=2.0, clock=lambda: now[0])
    source, target = full_pair(memo=memo)
    source.save(digests(4), 64)
    assert len(memo) == 4
    before = source.store.counts[EXIST]
    assert source.lookup(digests(4), 65).length == 64
    assert source.store.counts[EXIST] == before  # what was saved is known
    assert source.kv.stats.memo_keys == 4
    now[0] += 2.0
    assert source.lookup(digests(4), 65).length == 64
    assert source.store.counts[EXIST] == before + 1
    source.store.evict(list(source.store.pool))
    hit = target.lookup(digests(4), 65)
    assert hit.length == 64  # the entry outlives the object
    result = target.load(digests(4), hit)
    assert len(result.failures) == 4
    assert len(memo) == 0  # and the load said so
    assert target.lookup(digests(4), 65).length == 0


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
    source.save(digests(4), 64)
    assert memo.known([lost]) == [False]
    assert source.lookup(digests(4), 65).length == 16
    assert memo.known([lost]) == [False]


def test_what_was_asked_is_what_the_store_was_asked():
    """R7: keys that a memo answered are in no counter of questions."""
    memo = PresenceMemo(clock=lambda: 0.0)
    source, _ = full_pair(memo=memo)
    source.save(digests(2), 32)
    before = source.store.counts[EXIST]
    hit = source.lookup(digests(4), 65)
    assert (hit.length, hit.asked, hit.probes) == (32, 2, 1)
    assert source.store.counts[EXIST] == before + 1
    assert len(source.store.log[-1].keys) == 2
    stats = source.kv.stats
    assert (stats.asked_keys, stats.probes, stats.memo_keys) == (2, 1, 2)
    hit = source.lookup(digests(2), 33)
    assert (hit.length, hit.asked, hit.probes, hit.exact_keys) == (32, 0, 0, 2)
    assert source.store.counts[EXIST] == before + 1
    assert (stats.asked_keys, stats.probes, stats.memo_keys) == (2, 1, 4)
    assert stats.present_keys <= stats.asked_keys


# The memory of keys that fail to load


def test_a_key_that_exists_and_fails_to_load_is_absent_for_a_while():
    """Seen: exists 1, get -800, in every lookup for ever."""
    now = [0.0]
    memo = AbsenceMemo(seconds=30.0, clock=lambda: now[0])
    source, target = full_pair(failed_loads=memo)
    source.save(digests(4), 64)
    lost = key(source, 0, digests(4)[2])
    target.store.fail(GET, -800, keys=[lost])
    hit = target.lookup(digests(4), 65)
    assert hit.length == 64
    result = target.load(digests(4), hit)
    assert ([f.code for f in result.failures], result.usable_tokens) == ([-800], 32)
    for strategy in ("staged", "exact"):
        hit = target.lookup(digests(4), 65, strategy=strategy)
        assert (hit.length, hit.asked, hit.answered) == (32, 3, True)
        assert lost not in target.store.log[-1].keys
    assert target.kv.stats.avoided_keys == 2
    assert target.load(digests(4), hit).ok
    now[0] = 30.0
    assert target.lookup(digests(4), 65).length == 64


def test_a_key_that_is_stored_again_is_no_longer_avoided():
    memo = AbsenceMemo(clock=lambda: 0.0)
    source, target = full_pair(failed_loads=memo)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    source.store.evict([key(source, 0, digests(4)[2])])
    assert len(target.load(digests(4), hit).failures) == 1
    assert target.lookup(digests(4), 65).length == 32
    assert source.save(digests(4), 64).stored == 1  # by this engine: it holds the memory too
    assert source.lookup(digests(4), 65).length == 64
    assert target.lookup(digests(4), 65).length == 64
    assert target.load(digests(4), target.lookup(digests(4), 65)).ok
    assert_loaded(source, target, hit)


def test_both_memories_at_once():
    """What failed to load is not known to be present, whatever was seen before."""
    present, absent = PresenceMemo(clock=lambda: 0.0), AbsenceMemo(clock=lambda: 0.0)
    source, target = full_pair(memo=present, failed_loads=absent)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    lost = key(source, 0, digests(4)[0])
    target.store.fail(GET, -800, keys=[lost])
    target.load(digests(4), hit)
    assert present.known([lost]) == [False]
    assert absent.known([lost]) == [True]
    hit = target.lookup(digests(4), 65)
    assert (hit.length, hit.asked) == (0, 0)


# Counters


def test_counters_add_up():
    source, target = full_pair(layers=1)
    source.store.fail(PUT, -800, keys=[key(source, 0, digests(4)[3])], times=1)
    source.save(digests(4), 64)
    source.save(digests(4), 64)
    hit = target.lookup(digests(4), 65)
    target.store.fail(GET, -704, keys=[key(source, 0, digests(4)[0])])
    target.load(digests(4), hit)
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
    assert (loaded["unknown_keys"], loaded["failed_lookups"], loaded["avoided_keys"]) == (0, 0, 0)
    assert hit.store_seconds >= 0
    assert hit.other_seconds >= 0
    assert "loaded_keys=3" in repr(target.kv.stats)
    with pytest.raises(AttributeError):
        target.kv.stats.nothing  # noqa: B018
    with pytest.raises(KeyError):
        target.kv.stats.add(nothing=1)


def test_counters_of_one_moment():
    """Lookups of other threads are in a snapshot whole, or not at all."""
    stats, over = TransferStats(), threading.Event()
    hit = Hit(16, (), (), asked=1, probes=1, present=1, exact_keys=1)

    def count():
        while not over.is_set():
            stats.add_lookup(hit, False)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(50_000):
            now = stats.snapshot()
            assert now["lookups"] == now["asked_keys"] == now["present_keys"] == now["probes"]
            assert now["exact_keys"] == now["lookups"]
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    now = stats.snapshot()
    assert list(now) == list(COUNTERS)
    assert now == {name: getattr(stats, name) for name in COUNTERS}


def test_prometheus_text():
    pytest.importorskip("prometheus_client")
    from kvmask.plans.metrics import exposition

    source, _ = full_pair()
    source.save(digests(4), 64)
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
    """The memo knows two of four keys: four answers to the other two say nothing."""
    memo = PresenceMemo(seconds=60)
    source, _ = full_pair(memo=memo)
    source.save(digests(2), 32)
    monkeypatch.setattr(source.store, "batch_is_exist", lambda keys: [1] * 4)
    hit = source.lookup(digests(4), 65)
    assert (hit.length, hit.asked, hit.unknown, hit.answered) == (32, 2, 2, False)
    assert hit.cause.code == MALFORMED_ANSWER
    assert "to 2 of 2 keys" in str(hit.cause)
