"""Input whose own code runs while the core reads it: no crash, and nothing decided wrongly."""

import pytest

from kvmask import (
    Bitset,
    BlockHashes,
    Coordinator,
    FullAttention,
    Hit,
    LoadPlan,
    LookupPlan,
    SavePlan,
    SlidingWindow,
    VllmKeys,
    _core,
)
from kvmask.errors import ArgumentError, BlockIdError, HashInputError, PlanStateError, StoreError
from kvmask.layout import KVLayout
from kvmask.plans.blocks import split_calls


def digests(n: int) -> list[bytes]:
    return [i.to_bytes(32, "big") for i in range(1, n + 1)]


def layout(num_blocks: int = 64) -> KVLayout:
    region = (1 << 20, 64, 64)
    return KVLayout.from_regions([region], num_blocks, storages=[(1 << 20, 64 * num_blocks)])


def save_plan(n: int, groups: int = 1, hashes: list[bytes] | None = None, **options) -> SavePlan:
    coord = Coordinator([FullAttention(16, spec=g) for g in range(groups)], 16)
    names = [VllmKeys("m", group_id=g) for g in range(groups)]
    tables = options.pop("tables", [list(range(1, n + 1))] * groups)
    return SavePlan(coord, names, [layout()] * groups, hashes or digests(n), tables, 16 * n)


@pytest.mark.parametrize("blocks", [500, 20_000])
def test_answers_that_feed_the_plan_they_are_for(blocks):
    coord = Coordinator([FullAttention(16)], 16)
    plan = LookupPlan(coord, [VllmKeys("m")], digests(blocks), 16 * blocks)
    keys = plan.next_keys()

    def answers():
        plan.feed([1] * len(keys))
        plan.next_keys()
        yield from [1] * len(keys)

    with pytest.raises(PlanStateError, match="once"):
        plan.feed(answers())
    with pytest.raises(PlanStateError):
        plan.hit  # noqa: B018 (the second batch is still open)


def test_a_batch_that_could_not_be_made_leaves_none_open():
    coord = Coordinator([FullAttention(64), SlidingWindow(16, 32)], 16)
    hashes = digests(15)
    names = [VllmKeys("m", group_id=g) for g in range(2)]
    plan = LookupPlan(coord, names, hashes, 257, strategy="exact")
    del hashes[12:]
    with pytest.raises(HashInputError):
        plan.next_keys()
    with pytest.raises(PlanStateError):
        plan.feed([])


class Unmade(Bitset):
    def __init__(self):
        pass


def test_bitsets_that_were_never_initialised():
    for empty in (Bitset.__new__(Bitset), Unmade()):
        assert Bitset(empty) == []
        assert empty == Bitset()
        assert len(~empty & empty) == 0
        assert empty[:].indices() == []


class Agreeable(int):
    """An int that is within every range."""

    def __index__(self):
        return self

    def __le__(self, other):
        return True

    def __ge__(self, other):
        return True

    __lt__ = __gt__ = __le__


def test_numbers_that_compare_as_they_like():
    with pytest.raises(ArgumentError, match="`indices` must be from 0 to 7"):
        Bitset.from_indices(8, [Agreeable(10**9)])
    coord = Coordinator([FullAttention(16)], 16)
    for call in (coord.store_mask, coord.load_mask):
        with pytest.raises(ArgumentError):
            call(Agreeable(-16))
        with pytest.raises(ArgumentError):
            call(Agreeable(1 << 70))


def test_answers_that_change_the_keys():
    plan = save_plan(4)

    class Clears(int):
        def __ne__(self, other):
            plan.keys.clear()
            return True

    plan.feed_exists([Clears(0)] * 4)
    assert len(plan.next_batch().keys) == 4

    def shrinks():
        other.keys.clear()
        yield from [0] * 4

    other = save_plan(4)
    with pytest.raises(StoreError):
        other.feed_exists(shrinks())


def test_calls_are_cut_by_lists_of_one_length():
    with pytest.raises(ArgumentError, match="`pieces` must hold one number per key"):
        split_calls([1] * 1000, pieces=[1], max_pieces=5)

    class Clears:
        def __float__(self):
            needs.clear()
            return 1.0

    needs = [Clears()] * 3
    with pytest.raises(IndexError):
        _core.cut_calls(needs, 9.0, 9.0, [1] * 3, 5)


def test_digests_that_are_emptied_while_they_are_used():
    listed = [b"ab" * 8] * 4
    hashes = BlockHashes.from_list(listed)
    listed[2] = b""
    for builder in (_core.KeyBuilder("p" * 23, "", True), _core.KeyBuilder("p@")):
        with pytest.raises(HashInputError, match="from 1 to"):
            _core.build_keys([builder], hashes)


def test_cores_that_no_facade_made():
    for row in (("full", 16, 0, False, True, -1), ("full", 8, 0, False, True, 0)):
        with pytest.raises(ArgumentError):
            _core.CoordinatorCore([row], 16, 16, None, False)
    for rows in ([], [("full", 16, 0, False, False, -1)], [("full", 16, 0, False, True, 1)]):
        with pytest.raises(ArgumentError, match="fill the sets"):
            _core.CoordinatorCore(rows, 16, 16, None, False)


def test_answers_given_twice_count_once():
    plan = save_plan(4, groups=2, tables=[[1, 2, 3, 4], [1, 99, 3, 4]])
    with pytest.raises(BlockIdError):
        plan.feed_exists([0] * 8)
    plan.feed_exists(iter([1] * 8))
    assert plan.result.present == 8
    plan = save_plan(4)
    plan.feed_exists([0] * 4)
    batch = plan.next_batch()

    def codes():
        plan.feed([0] * len(batch.keys))
        yield from [0] * len(batch.keys)

    with pytest.raises(PlanStateError, match="once"):
        plan.feed(codes())
    assert plan.result.stored == 4


def test_a_failure_is_that_of_every_block_of_the_key():
    plan = save_plan(4, hashes=[b"x" * 32, b"a" * 32, b"a" * 32, b"b" * 32])
    plan.feed_exists([0] * 4)
    assert len(plan.next_batch().keys) == 3
    plan.feed([0, -200, 0])
    result = plan.result
    assert (result.stored, result.present) == (2, 0)
    assert [f.block for f in result.failed] == [1, 2]
    assert result.saved_tokens == 16


def test_forged_hits():
    coord = Coordinator([FullAttention(32)], 16, partial_hits=True)
    tables, names = [[1, 2, 3, 4]], [VllmKeys("m")]
    for tail in (256, 48, 8, 0):
        with pytest.raises(ArgumentError, match="tail_tokens"):
            hit = Hit(16, (Bitset([True]),), (tail,))
            LoadPlan(coord, names, [layout()], digests(16), tables, hit)
    hit = coord.find_hit([[True] * 8], 128)
    with pytest.raises(BlockIdError, match="twice"):
        LoadPlan(coord, names, [layout()], digests(8), [[1, 2, 1, 3]], hit)
