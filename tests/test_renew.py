"""Renewals: what hits make worth keeping, how often, and how much of it."""

import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_store import FakeStore

from kvmask import (
    BlockHashes,
    ChunkedLocal,
    Contract,
    Coordinator,
    FullAttention,
    KVTransfer,
    LookupPlan,
    Mamba,
    PlanTools,
    SlidingWindow,
    VllmKeys,
)
from kvmask import renewer as renewer_module
from kvmask._core import HitEnds
from kvmask.errors import ArgumentError, StoreError
from kvmask.plans import Breaker, Held, Renewals, drive
from kvmask.renewer import Renewer

GROUPS = [FullAttention(32), SlidingWindow(32, window=64)]
PROMPT = 1920


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def digests(name, n, hash_block=32):
    rows = [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(n // hash_block)]
    return BlockHashes(b"".join(rows), 32)


def branch(first, tokens, rest, hash_block=32):
    """Digests that leave a prompt after so many tokens."""
    rows = [bytes(first[i]) for i in range(tokens // hash_block)]
    return BlockHashes(b"".join(rows) + b"".join(bytes(d) for d in rest), 32)


def contract_of(groups=GROUPS, hash_block=32, **more):
    return Contract(groups, hash_block, VllmKeys("m"), hashing=None, **more)


def save(store, contract, hashes, tokens):
    masks = contract.coordinator.store_mask(tokens, states=True)
    for g, (group, mask) in enumerate(zip(contract.groups, masks, strict=True)):
        scale = group.block_size // contract.hash_block_size
        bits = None if mask is None else mask[: len(hashes) // scale]
        for key in VllmKeys("m", group_id=g).keys(hashes, bits, scale=scale):
            store.pool[key] = b"x"


def look_up(store, contract, hashes, tokens, held=0, strategy="staged"):
    plan = LookupPlan(contract, hashes, tokens, held=held, strategy=strategy)
    drive(plan, store)
    return plan


def full_only(tokens):
    return Held((tokens, 0), tokens)


def drain(renewals):
    keys = []
    while renewals.pending:
        batch = renewals.next_keys()
        assert len(batch) <= 128
        keys += batch
    return keys


def stock_keys(contract, hashes, tokens):
    return set(LookupPlan(contract, hashes, tokens, strategy="exact").next_call().args[0])


def below(contract, hashes, tokens):
    """What a hit of so many tokens needs, by group."""
    masks = contract.coordinator.load_mask(tokens)
    found = []
    for g, (group, mask) in enumerate(zip(contract.groups, masks, strict=True)):
        scale = group.block_size // contract.hash_block_size
        found.append(VllmKeys("m", group_id=g).keys(hashes, mask, scale=scale))
    return found


# The table of ends


def test_ends_count_visits_and_are_found_in_order():
    ends = HitEnds(64)
    assert ends.capacity == 64
    hashes = digests("a", 3200)
    assert ends.within(hashes, 1, 1, 101) == []
    assert [ends.visit(hashes, 9) for _ in range(5)] == [0, 1, 2, 2, 2]
    assert ends.visit(hashes, 29, False) == 0
    assert ends.visit(hashes, 29) == 0
    assert ends.within(hashes, 1, 1, 101) == [10, 30]
    assert ends.within(hashes, 10, 1, 11) == [1, 3]
    assert ends.within(hashes, 1, 11, 30) == []
    assert ends.within(hashes, 1, 1, 1 << 20) == [10, 30]  # stops at the last digest
    assert ends.within(digests("b", 3200), 1, 1, 101) == []
    ends.clear()
    assert ends.within(hashes, 1, 1, 101) == []


def test_ends_refuse_what_is_out_of_range():
    ends = HitEnds(8)
    with pytest.raises(ArgumentError, match="`index`"):
        ends.visit(digests("a", 64), 2)
    with pytest.raises(ArgumentError, match="`capacity`"):
        HitEnds(0)


def test_ends_in_a_small_table_overwrite_each_other():
    ends = HitEnds(2)
    hashes = digests("a", 32 * 200)
    for i in range(200):
        ends.visit(hashes, i)
    assert len(ends.within(hashes, 1, 1, 201)) <= 2


@pytest.mark.parametrize("seed", range(60))
def test_tail_blocks_are_what_a_hit_rests_on(seed):
    """Present: those blocks and full attention. Then the hit is there; without one of them, not."""
    import random

    pick = random.Random(seed)
    b = pick.choice([8, 16, 32])
    groups = [FullAttention(b * pick.choice([1, 2]))]
    for _ in range(pick.randint(1, 3)):
        size = b * pick.choice([1, 2])
        groups.append(
            pick.choice(
                [
                    SlidingWindow(size, window=pick.randint(2, 5 * b), eagle=pick.random() < 0.3),
                    Mamba(size),
                ]
            )
        )
    coord = Coordinator(groups, hash_block_size=b)
    unit = coord.alignment
    # Further left than a run that touches the first block, which counts when it is short.
    length = unit * pick.randint(6, 12)
    reach = length + 4 * unit
    runs = coord._core.tail_blocks(length)
    assert runs[0] is None
    present = []
    for group, run in zip(groups, runs, strict=True):
        bits = [run is None] * (reach // group.block_size)
        if run is not None:
            first, mask = run
            for i in mask.indices():
                bits[first + i] = True
        present.append(bits)
    assert coord.find_hit(present, reach).length == length
    for g, run in enumerate(runs):
        if run is None:
            continue
        for i in run[1].indices():
            less = [list(bits) for bits in present]
            less[g][run[0] + i] = False
            assert coord.find_hit(less, reach).length < length


def test_tail_blocks_of_partial_hits_count_hash_blocks():
    coord = Coordinator([FullAttention(64), Mamba(64)], hash_block_size=16, partial_hits=True)
    first, bits = coord._core.tail_blocks(208)[1]
    assert [first + i for i in bits.indices()] == [12]


# What is renewed


def test_nothing_is_renewed_without_an_earlier_end():
    contract, store, renewals = contract_of(), FakeStore(), Renewals(clock=Clock())
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    plan = look_up(store, contract, hashes, PROMPT)
    assert plan.result.length == PROMPT - 32
    renewals.note(plan)
    assert drain(renewals) == []
    assert not renewals.pending


def test_a_branch_keeps_the_blocks_that_a_hit_there_needs():
    contract, store, renewals = contract_of(), FakeStore(), Renewals(clock=Clock())
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    other = branch(hashes, 512, digests("b", 512))
    plan = look_up(store, contract, other, 1024)
    assert plan.result.length == 512
    renewals.note(plan)
    assert drain(renewals) == []
    plan = look_up(store, contract, hashes, PROMPT)
    renewals.note(plan)
    assert drain(renewals) == below(contract, hashes, 512)[1]
    # The first prompt ended at 512 + 512 tokens. A request that goes on from there keeps its end.
    longer = branch(other, 1024, digests("c", 512))
    save(store, contract, longer, 1536)
    plan = look_up(store, contract, longer, 1536)
    renewals.note(plan)
    wanted = below(contract, longer, 1024)[1] + below(contract, longer, 512)[1]
    assert [k for k in wanted if k not in below(contract, hashes, 512)[1]] == drain(renewals)


def test_a_prompt_that_is_hit_whole_again_is_kept_whole():
    contract, store, renewals = contract_of(), FakeStore(), Renewals(clock=Clock())
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    for turn in range(2):
        plan = look_up(store, contract, hashes, PROMPT)
        renewals.note(plan)
        keys = drain(renewals)
        wanted = VllmKeys("m", group_id=1).keys(hashes)[:59] if turn else []
        credit = int(120 * 0.25 * 2) if turn else 0
        assert keys == wanted[:credit]


def test_what_the_engine_holds_is_renewed_although_the_lookup_gains_nothing():
    contract, store, renewals = contract_of(), FakeStore(), Renewals(clock=Clock(), share=1.0)
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    plan = look_up(store, contract, hashes, PROMPT, full_only(1888))
    hit = plan.result
    assert (hit.length, hit.asked, hit.exact_keys) == (0, 0, 0)
    renewals.note(plan)
    full, window = below(contract, hashes, 1888)
    assert drain(renewals) == full + window
    plan = look_up(store, contract, hashes, PROMPT, full_only(512))
    assert plan.result.length == 1888


def test_keys_of_intervals_that_are_over_are_freed():
    contract, store, clock = contract_of(), FakeStore(), Clock()
    renewals = Renewals(clock=clock, share=1.0, interval=4.0)
    kept = []
    for turn in range(30):
        hashes = digests(str(turn), PROMPT)
        save(store, contract, hashes, PROMPT)
        clock.now += 4.0
        renewals.note(look_up(store, contract, hashes, PROMPT, full_only(1888)))
        assert drain(renewals)
        sets = [*renewals._new, *renewals._old, *renewals._gone]
        kept.append(sum(map(len, sets)))
    renewed = renewals.renewed // 30
    assert 0 < max(kept) <= 3 * renewed


@pytest.mark.parametrize("held", [0, 512, 1824, 1888])
def test_the_prompt_of_a_hot_request_outlives_pressure(held):
    """Looked up twice a second, then pressure: a fresh engine hits what it hits after stock's."""
    sys.path.append(str(Path(__file__).parent.parent / "bench"))
    pressure = pytest.importorskip("pressure", reason="needs bench/ of the repository")

    def after(strategy, renew):
        store, contract = pressure.LeaseStore(400), contract_of()
        hashes = digests("hot", PROMPT)
        put(store, hashes)
        renewals = Renewals(clock=lambda: store.now)
        share = 0
        for _ in range(60):
            store.now += 0.5
            own = full_only(held) if held and strategy == "staged" else 0
            plan = look_up(store, contract, hashes, PROMPT, own, strategy)
            if renew:
                renewals.note(plan)
                share += pressure.renew(store, renewals)
        for i in range(3):
            put(store, digests(i, PROMPT))
        assert share <= 0.25 * 60 * 120
        lengths = []
        for tokens in (513, 1025, PROMPT):
            lengths.append(look_up(store, contract, hashes, tokens, strategy="exact").result.length)
        return lengths

    def put(store, hashes):
        for g in range(2):
            store.save(VllmKeys("m", group_id=g).keys(hashes))

    assert after("exact", False) == [512, 1024, 1888]
    assert after("staged", False)[0] == 0
    assert after("staged", True) == [512, 1024, 1888]


def test_a_key_is_renewed_at_most_once_per_interval():
    clock = Clock()
    contract, store = contract_of(), FakeStore()
    renewals = Renewals(clock=clock, share=1.0, interval=4.0)
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    last: dict[str, float] = {}
    gaps = []
    for _ in range(200):
        clock.now += 0.3
        plan = look_up(store, contract, hashes, PROMPT, full_only(1024))
        renewals.note(plan)
        for key in drain(renewals):
            if key in last:
                gaps.append(clock.now - last[key])
            last[key] = clock.now
    assert min(gaps) >= 4.0 - 1e-6
    assert max(gaps) <= 8.0 + 2 * 0.3 + 1e-6
    assert renewals.renewed == len(gaps) + len(last)


def test_no_more_is_renewed_than_the_share():
    clock = Clock()
    contract, store = contract_of(), FakeStore()
    renewals = Renewals(clock=clock, share=0.1)
    total = 0
    for i in range(40):
        clock.now += 10.0
        hashes = digests(i % 3, PROMPT)
        save(store, contract, hashes, PROMPT)
        plan = look_up(store, contract, hashes, PROMPT, full_only(1024))
        renewals.note(plan)
        total += len(drain(renewals))
        assert total <= 0.1 * 120 * (i + 1)
    assert total == 0.1 * 120 * 40
    assert renewals.dropped


def test_renewed_keys_are_ones_that_stock_asks():
    shapes = [
        (GROUPS, {}),
        ([FullAttention(64), SlidingWindow(32, window=200), Mamba(64)], {}),
        ([FullAttention(64, eagle=True), SlidingWindow(32, window=64, eagle=True)], {}),
        ([FullAttention(64), Mamba(64)], {"partial_hits": True}),
        ([ChunkedLocal(32, chunk_size=128)], {}),
    ]
    for groups, options in shapes:
        contract = contract_of(groups, 32, **options)
        store, renewals, clock = FakeStore(), None, Clock()
        renewals = Renewals(clock=clock, share=1.0)
        hashes = digests("a", PROMPT)
        save(store, contract, hashes, PROMPT)
        allowed = stock_keys(contract, hashes, PROMPT)
        found = set()
        for tokens in (512, 1024, PROMPT, PROMPT):
            clock.now += 20
            own = Held((tokens // 2,) * len(groups), tokens // 2)
            for held in (0, own):
                plan = look_up(store, contract, hashes, tokens, held)
                renewals.note(plan)
                found.update(drain(renewals))
        assert found <= allowed
        assert found or len(groups) == 1


def test_two_namespaces_are_renewed_both():
    from kvmask import RankGrid

    contract = contract_of(ranks=RankGrid(tp_size=2, kv_heads=2))
    store = FakeStore()
    renewals = Renewals(clock=Clock(), share=1.0)
    hashes = digests("a", PROMPT)
    plan = look_up(store, contract, hashes, PROMPT, full_only(1888))
    renewals.note(plan)
    keys = drain(renewals)
    assert len(keys) == 2 * (59 + 2)
    assert sum("tp_rank:1" in key for key in keys) == len(keys) / 2


def test_a_lookup_that_asked_for_everything_renews_nothing():
    contract, store, renewals = contract_of(), FakeStore(), Renewals(clock=Clock())
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    for _ in range(3):
        plan = look_up(store, contract, hashes, PROMPT, strategy="exact")
        renewals.note(plan)
    assert not renewals.pending


def test_an_outage_is_no_hit_and_too_many_hits_are_dropped():
    contract, store = contract_of(), FakeStore()
    renewals = Renewals(clock=Clock(), pending=2)
    hashes = digests("a", PROMPT)
    store.fail("batch_is_exist", RuntimeError("gone"), times=1)
    renewals.note(look_up(store, contract, hashes, PROMPT))
    assert not renewals.pending
    plan = look_up(store, contract, hashes, PROMPT)
    for _ in range(5):
        renewals.note(plan)
    assert renewals.dropped == 3
    renewals.drop()
    assert renewals.dropped == 5
    assert not renewals.pending


def test_clear_forgets_ends_and_keys():
    contract, store = contract_of(), FakeStore()
    renewals = Renewals(clock=Clock(), share=1.0)
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)

    def keys():
        plan = look_up(store, contract, hashes, PROMPT)
        renewals.note(plan)
        return drain(renewals)

    assert not keys()
    assert keys()
    assert not keys()  # within the interval
    renewals.clear()
    assert not keys()  # the end is new again
    assert keys()


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"interval": 0}, ArgumentError, "interval"),
        ({"interval": float("inf")}, ArgumentError, "interval"),
        ({"interval": True}, TypeError, "interval"),
        ({"share": 1.5}, ArgumentError, "share"),
        ({"share": "all"}, TypeError, "share"),
        ({"pending": 0}, ArgumentError, "pending"),
    ],
)
def test_bad_options(options, error, name):
    with pytest.raises(error, match=f"`{name}`"):
        Renewals(**options)
    with pytest.raises(TypeError, match="`renew`"):
        KVTransfer(FakeStore(), contract_of(), renew=3)


# The thread


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def hot(store, **more):
    """A transfer, and a request that it looks up again and again."""
    contract = contract_of()
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    kv = KVTransfer(store, contract, renew=Renewals(share=1.0), **more)
    return kv, contract.request(hashes=hashes, num_tokens=PROMPT)


def test_a_transfer_renews_after_its_lookups():
    store = FakeStore()
    kv, request = hot(store)
    with kv:
        first = kv.lookup(request)
        assert kv.lookup(request).length == first.length
        wait_until(lambda: kv.stats.renewed_keys == 59)
        calls = store.calls("batch_is_exist")
        assert calls[-1].keys[0].endswith(bytes(request.hashes[0]).hex())
        assert kv.stats.exact_keys == 2 * 120
    names = [t.name for t in threading.enumerate()]
    assert "kvmask-renewals" not in names
    assert kv._renewer is not None
    kv._renewer.note(look_up(store, kv.contract, request.hashes, PROMPT))  # closed: nothing happens
    assert not kv._renewer.renewals.pending


def test_nothing_is_asked_while_a_lookup_is_under_way():
    contract, store = contract_of(), FakeStore()
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    tools, asked = PlanTools(), []
    renewer = Renewer(
        Renewals(share=1.0), lambda keys: asked.append(keys) or [1] * len(keys), tools
    )
    plan = look_up(store, contract, hashes, PROMPT)
    renewer.running.append(None)
    for _ in range(2):
        renewer.note(plan)
    time.sleep(0.05)
    assert asked == []
    renewer.running.pop()
    wait_until(lambda: asked)
    renewer.close()


def test_a_store_that_fails_is_left_alone():
    store = FakeStore()
    kv, request = hot(store, breaker=Breaker(seconds=60.0))
    with kv:
        kv.lookup(request)
        store.fail("batch_is_exist", -900, index=2)
        kv.lookup(request)
        wait_until(lambda: kv.stats.outages)
        wait_until(lambda: not kv._renewer.renewals.pending)
        assert kv.stats.renewed_keys == 0
        assert kv.stats.dropped_renewals == 0
        assert len(store.calls("batch_is_exist")) == 3


def test_a_failure_without_a_breaker_is_logged_once(caplog):
    store = FakeStore()
    kv, request = hot(store, breaker=None)
    with kv:
        kv.lookup(request)
        kv.lookup(request)
        wait_until(lambda: not kv._renewer.renewals.pending)
        kv._renewer.clear()
        plan = look_up(FakeStore(store.pool), kv.contract, request.hashes, PROMPT)
        store.fail("batch_is_exist", RuntimeError("gone"))
        for _ in range(5):
            kv._renewer.note(plan)
        wait_until(lambda: caplog.records)
        wait_until(lambda: not kv._renewer.renewals.pending)
    (record,) = caplog.records
    assert "failed to answer a renewal of" in record.getMessage()
    assert kv.stats.renewed_keys == 59


def test_an_open_breaker_is_not_tried_out():
    breaker = Breaker(seconds=60.0)
    contract, store, asked = contract_of(), FakeStore(), []
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    renewer = Renewer(Renewals(share=1.0), asked.append, PlanTools(breaker=breaker))
    plan = look_up(store, contract, hashes, PROMPT)
    breaker.failed(StoreError("gone"), 0)
    for _ in range(2):
        renewer.note(plan)
    wait_until(lambda: not renewer.renewals.pending)
    renewer.close()
    assert asked == []


def test_an_error_in_the_work_is_logged_and_the_thread_goes_on(caplog):
    contract, store, asked = contract_of(), FakeStore(), []
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    renewer = Renewer(
        Renewals(share=1.0), lambda keys: asked.append(keys) or [1] * len(keys), PlanTools()
    )
    plan = look_up(store, contract, hashes, PROMPT)

    class Strange:
        """Its digests cannot be read."""

        result, scheme, hashes, num_tokens = plan.result, plan.scheme, None, PROMPT

    renewer.note(Strange())
    wait_until(lambda: caplog.records)
    assert "what was to be renewed is dropped" in caplog.text
    for _ in range(2):
        renewer.note(plan)
    wait_until(lambda: asked)
    renewer.close()


def test_a_thread_that_cannot_start_costs_no_hit(monkeypatch, caplog):
    store = FakeStore()
    kv, request = hot(store)
    start = threading.Thread.start

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with kv:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        length = kv.lookup(request).length
        assert length
        assert not kv._renewer.renewals.pending
        kv._renewer._quiet_until = 0.0
        monkeypatch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            assert kv.lookup(request).length == length
        wait_until(lambda: kv.stats.renewed_keys)
    assert "can't start new thread" in caplog.text


def test_the_thread_ends_when_its_store_is_gone(monkeypatch):
    monkeypatch.setattr(renewer_module, "_LOOK", 0.01)
    contract, store, there = contract_of(), FakeStore(), [True]
    hashes = digests("a", PROMPT)
    save(store, contract, hashes, PROMPT)
    renewer = Renewer(
        Renewals(share=1.0), lambda keys: [1] * len(keys), PlanTools(), lambda: bool(there)
    )
    renewer.note(look_up(store, contract, hashes, PROMPT))
    thread = renewer._thread
    wait_until(lambda: not renewer.renewals.pending)
    assert thread.is_alive()
    there.clear()
    thread.join(20)
    assert not thread.is_alive()


def test_a_forked_child_renews_nothing():
    store = FakeStore()
    kv, request = hot(store)
    with kv:
        kv.lookup(request)
        plan = look_up(store, kv.contract, request.hashes, PROMPT)
        wait_until(lambda: not kv._renewer.renewals.pending)
        pid = os.fork()
        if pid == 0:
            kv._renewer.note(plan)
            os._exit(int(kv._renewer.renewals.pending))
        assert os.waitpid(pid, 0)[1] == 0
