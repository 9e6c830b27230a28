"""The budget of an owner with a disk tier (B57), and how a get is cut into calls."""

from hypothesis import given
from hypothesis import strategies as st
from rig import answer_with, flat_layout, keys_of, mooncake_tools, scheme_of
from test_load import plan_of

from kvmask import Coordinator, FullAttention, SavePlan
from kvmask.mooncake.policy import split_calls, staging_bytes
from kvmask.plans import GET, OVERSIZE, PUT


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
    assert plan.next_call() is None
    assert [(f.block, f.code) for f in plan.result.failures] == [
        (block, OVERSIZE) for block in range(3)
    ]
    assert OVERSIZE == -600
    assert plan.result.usable_tokens == 0
    plan = plan_of(3, block_bytes=8192, staging=16385 * 10 // 9 + 4096)
    calls = answer_with(plan, lambda call: [8192])
    assert [len(call.args[0]) for call in calls] == [1, 1, 1]
    assert keys_of(calls, GET) == plan.keys
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
    scheme = scheme_of(Coordinator([FullAttention(16)], 16), [flat_layout(blocks + 1, size)])
    hashes = [bytes([i]) * 32 for i in range(1, blocks + 1)]
    tools = mooncake_tools(max_pieces=7)
    plan = SavePlan(scheme, hashes, [range(1, blocks + 1)], 16 * blocks, tools=tools)
    calls = answer_with(plan, lambda call: [0] * len(call.args[0]))
    puts = [call for call in calls if call.name == PUT]
    assert [len(call.args[0]) for call in puts] == [2, 2, 2]
    assert [call.num_bytes for call in puts] == [2 * size] * 3
