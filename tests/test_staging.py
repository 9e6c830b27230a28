"""The budget of an owner with a disk tier (B57), and how a get is cut into calls."""

from hypothesis import given
from hypothesis import strategies as st
from test_load import plan_of

from kvmask import Coordinator, FullAttention, KVLayout, SavePlan, VllmKeys
from kvmask.plans.blocks import split_calls, staging_bytes


def test_staging_bytes():
    assert [staging_bytes(n) for n in (1, 4096, 4097)] == [12288, 12288, 16384]


def test_the_budget_of_a_disk_tier():
    budget = 1_342_177_280
    assert split_calls([1] * 100_000, budget) == ([(0, 98_304), (98_304, 100_000)], [])
    usable = budget * 9 // 10
    assert usable == 1_207_959_552
    assert split_calls([1, usable, 1], budget) == ([(0, 1), (1, 2), (2, 3)], [])
    assert split_calls([budget], budget) == ([], [0])
    assert split_calls([1, budget, 1], budget) == ([(0, 1), (2, 3)], [1])
    assert split_calls([], budget) == ([], [])
    assert split_calls([5, 5]) == ([(0, 2)], [])


def test_a_key_above_the_budget_is_named_and_the_others_load():
    plan = plan_of(3, block_bytes=8192, staging=16383)
    assert plan.next_batch() is None
    assert [(f.block, f.code) for f in plan.result.failed] == [(0, -600), (1, -600), (2, -600)]
    plan = plan_of(3, block_bytes=8192, staging=16385 * 10 // 9 + 4096)
    while (batch := plan.next_batch()) is not None:
        assert len(batch.keys) == 1
        plan.feed([8192])
    assert plan.result.loaded == 3


@given(st.lists(st.integers(1, 60_000), max_size=40), st.integers(1, 200_000), st.integers(1, 9))
def test_calls_fit_and_cover(sizes, staging, most):
    pieces = [-(-s // 9000) for s in sizes]
    calls, oversize = split_calls(sizes, staging, pieces, most)
    covered = [i for start, stop in calls for i in range(start, stop)]
    assert sorted(covered + oversize) == list(range(len(sizes)))
    assert covered == sorted(covered)
    for start, stop in calls:
        assert stop > start
        needs = [staging_bytes(s) for s in sizes[start:stop]]
        assert stop == start + 1 or sum(needs) <= staging * 0.9
        assert stop == start + 1 or sum(pieces[start:stop]) <= most
        assert max(needs) <= staging
    assert all(staging_bytes(sizes[i]) > staging for i in oversize)


def test_a_segment_above_a_slice_is_several_pieces():
    """Mooncake's TCP transport moves slices of 64 KiB: two and a bit make three pieces."""
    size, blocks = (2 << 16) + 1, 6
    region = (1 << 20, size, size)
    layout = KVLayout.from_regions([region], blocks + 1, storages=[(1 << 20, size * (blocks + 1))])
    coord = Coordinator([FullAttention(16)], 16)
    hashes = [bytes([i]) * 32 for i in range(1, blocks + 1)]
    plan = SavePlan(
        coord, [VllmKeys("m")], [layout], hashes, [range(1, blocks + 1)], 16 * blocks, max_pieces=7
    )
    plan.feed_exists([0] * blocks)
    calls = []
    while (batch := plan.next_batch()) is not None:
        calls.append(len(batch.keys))
        plan.feed([0] * len(batch.keys))
    assert calls == [2, 2, 2]
