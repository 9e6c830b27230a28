"""What the vLLM adapter hands to the library's plans: schemes, policies and tools."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from vllm_cases import Case, random_case
from vllm_oracle import digest, engine

from kvmask.groups import FullAttention
from kvmask.plans import DEFAULT_COSTS
from kvmask.vllm import binding, layouts, loading, lookup, rules, saving, schemes, seams
from kvmask.vllm.policy import ReceivingPolicy, SendingPolicy

pytestmark = pytest.mark.vllm


def plain_case(blocks: int = 8) -> Case:
    """One full-attention group of blocks of 4."""
    fields = dict(random_case(7, 0).__dict__) | {
        "groups": (FullAttention(4),),
        "hash_block_size": 4,
        "alignment": None,
        "retention": None,
        "partial": False,
        "hash_blocks": blocks,
        "present": ((True,) * blocks,),
        "load_tokens": 4 * blocks,
        "ranks": (1,),
    }
    return Case(**fields)


def sender(case: Case, **options: Any) -> Any:
    given = {"tp_rank": 0, "group_put_steps": [1] * len(case.groups)} | options
    store = pair.Script(0, set())
    dbs = pair.databases(case, 2)
    return pair.sending(case, "kvmask", dbs, store, pair.coordinator(case, "kvmask"), **given)


def receiver(case: Case, **options: Any) -> Any:
    store = pair.Script(0, set())
    dbs = pair.databases(case, 1)
    coord = pair.coordinator(case, "kvmask")
    return pair.receiving(case, "kvmask", dbs, store, coord, **({"tp_rank": 0} | options))


def plans_of(thread: Any, steps: list[int]) -> Any:
    return schemes.thread_plans(thread, SendingPolicy, thread.coord.lcm_block_size, steps, 0)


def test_a_scheme_is_kept_while_nothing_changes() -> None:
    thread = sender(plain_case())
    first = plans_of(thread, [1])
    assert plans_of(thread, [1]) is first
    assert plans_of(thread, [2]) is not first  # other ranks share the writing
    again = plans_of(thread, [1])
    db = thread.token_databases[0]
    db.set_kv_caches_base_addr([1 << 50, 1 << 51])
    moved = plans_of(thread, [1])
    assert moved is not again
    rows, sizes = moved.scheme.groups[0].layouts[0].addresses([3])
    assert rows == [[(1 << 50) + 3 * sizes[0][0], (1 << 51) + 3 * sizes[0][1]]]
    assert moved.scheme.groups[0].layouts[0].block_bytes == sum(sizes[0])


def test_steps_that_are_changed_in_place_are_seen() -> None:
    thread = sender(plain_case())
    steps = [1]
    first = plans_of(thread, steps)
    steps[0] = 4
    assert plans_of(thread, steps) is not first
    assert plans_of(thread, steps).scheme.groups[0].writers == 4


def test_what_had_no_value_is_seen_when_it_gets_one() -> None:
    thread = sender(plain_case())
    coord = thread.coord
    assert coord.retention_interval is None
    first = rules.rules_of(coord)
    assert rules.rules_of(coord) is first
    coord.retention_interval = 64
    assert rules.rules_of(coord) is not first


def test_a_coordinator_that_becomes_another_is_left_to_stock() -> None:
    case = plain_case()
    worker = pair.lookup_worker(case, "kvmask", pair.Script(0, set()))
    first = lookup.scheme_of_worker(worker)
    assert first is not None
    assert lookup.scheme_of_worker(worker) is first
    stock = type(worker.coord)

    class Other(stock):  # type: ignore[misc,valid-type]
        kvmask_own = False

    worker.coord.__class__ = Other
    assert lookup.scheme_of_worker(worker) is None


def test_turns_rotate_with_the_group_and_the_rank() -> None:
    case = random_case(11, 3)
    for rank in range(4):
        thread = sender(case, tp_rank=rank)
        found = plans_of(thread, [4] * len(case.groups))
        assert found is not None
        turns = [g.turn for g in found.scheme.groups]
        assert turns == [(rank + g) % 4 for g in range(len(case.groups))]


@pytest.mark.parametrize("what", ["prepare_values", "key_for", "process_tokens"])
def test_blocks_that_are_placed_or_named_in_another_way_are_left_to_stock(what: str) -> None:
    thread = sender(plain_case())
    db = thread.token_databases[0]
    owner = db if what == "process_tokens" else db.store_layout
    setattr(owner, what, getattr(owner, what))
    assert plans_of(thread, [1]) is None


def test_databases_of_several_hash_blocks_are_left_to_stock() -> None:
    thread = sender(plain_case())
    other = engine().data.ChunkedTokenDatabase(
        engine().data.KeyMetadata("model", 0, 0, 0, 0, 1), 8, hash_block_size=8
    )
    layouts.adopt_addresses(other)
    other.set_kv_caches_base_addr([1 << 40])
    other.set_block_len([64])
    thread.token_databases = [*thread.token_databases, other]
    thread.group_participates = [True, True]
    assert plans_of(thread, [1, 1]) is None
    thread.group_participates = [True, False]
    found = plans_of(thread, [1, 1])
    assert [g.cacheable for g in found.scheme.groups] == [True, False]
    assert found.scheme.groups[1].own == found.scheme.groups[1].layouts == ()


def test_gets_are_cut_as_vllm_cuts_them() -> None:
    split = seams.stock("worker.split_batches")
    rng = random.Random(3)
    oversized = several = 0
    for _ in range(3000):
        n = rng.randint(1, 12)
        rows = [[rng.choice((1, 4095, 4096, 4097, 20_000))] * rng.randint(1, 2) for _ in range(n)]
        raw = rng.randint(10_000, 120_000)
        usable = max(1, int(raw * rng.choice((0.5, 0.9, 1.0))))
        thread = SimpleNamespace(
            usable_disk_offload_buffer_budget_bytes=usable, disk_offload_buffer_budget_bytes=raw
        )
        keys = [str(i) for i in range(n)]
        batches, too_large = split(keys, rows, rows, usable, raw)
        calls, refused = ReceivingPolicy(thread).cut_get([sum(row) for row in rows], rows)
        if too_large is not None:
            oversized += 1
            assert (calls, refused) == ([], list(range(n)))
        else:
            several += len(batches) > 1
            assert [keys[a:b] for a, b in calls] == [batch for batch, _, _ in batches]
            assert refused == []
    assert min(oversized, several) > 100


def test_gets_without_a_staging_buffer_are_one() -> None:
    thread = SimpleNamespace(usable_disk_offload_buffer_budget_bytes=None)
    assert ReceivingPolicy(thread).cut_get([1 << 40] * 3, [[1 << 40]] * 3) == ([(0, 3)], [])


def test_puts_carry_the_settings_of_the_moment() -> None:
    config = pair.Config()
    thread = SimpleNamespace(
        enable_group_semantics=True, supports_group_ids=False, replicate_config=config
    )
    policy = SendingPolicy(thread)
    assert not policy.names_groups
    thread.supports_group_ids = True
    assert policy.names_groups
    assert policy.put_arguments(["a"]) == (config,)
    assert config.group_ids == ["a"]
    assert policy.put_arguments(None) == (config,)
    assert config.group_ids == ["a"]
    assert [policy.stored(code) for code in (0, 256, -1, -705)] == [True, True, False, False]


def test_a_tail_outside_the_last_block_is_left_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(loading, "stock", lambda name: lambda thread, meta: seen.append(name))
    data = engine().data
    for tail, left in ((32, False), (36, True), (28, True)):
        thread = receiver(plain_case(12))
        spec = data.LoadSpec(0, 32, True, 32, (data.TailKeyBoundary(0, tail),))
        hashes = [digest(i) for i in range(12)]
        meta = data.ReqMeta("r", 32, (list(range(1, 9)),), hashes, load_spec=spec)
        seen.clear()
        thread.request_queue.put(meta)
        thread._handle_request(thread.request_queue.get())
        assert seen == ["receiving.handle_request"] * left
        assert len(thread.store.calls) == (not left)


def test_jobs_that_are_left_to_stock_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(saving, "stock", lambda name: lambda thread, meta: seen.append(name))
    thread = sender(plain_case())
    data = engine().data
    meta = data.ReqMeta("r", 32, ([1] * 8,), [digest(i) for i in range(8)], store_job_id=1)
    layout = thread.token_databases[0].store_layout
    layout.key_for = layout.key_for
    thread._handle_request(meta)
    assert seen == ["sending.handle_request"]


def test_lookups_have_the_library_s_costs_and_remember_hits_when_staged() -> None:
    case = plain_case()
    worker = pair.lookup_worker(case, "kvmask", pair.Script(0, pair.present_keys(case)))
    staged = lookup.lookups_of(worker)
    assert lookup.lookups_of(worker) is staged
    binding.state(worker)["strategy"] = "staged"
    exact, staged = staged.tools, lookup.lookups_of(worker).tools
    assert staged.costs is exact.costs is DEFAULT_COSTS
    assert staged.hints is not None
    assert exact.hints is None
    assert staged.breaker is exact.breaker  # the store is the same
    assert staged.memo is staged.stats is None
