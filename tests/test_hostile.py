"""Input whose own code runs while the core reads it: no crash, and nothing decided wrongly."""

import pytest
from rig import flat_layout, scheme_of

from kvmask import (
    Bitset,
    BlockHashes,
    Coordinator,
    FullAttention,
    Hit,
    LoadPlan,
    LookupPlan,
    PlanTools,
    PresenceMemo,
    SavePlan,
    SlidingWindow,
    _core,
)
from kvmask.errors import ArgumentError, BlockIdError, HashInputError, PlanStateError
from kvmask.mooncake.policy import split_calls
from kvmask.plans import CALL_FAILED, MALFORMED_ANSWER


def digests(n: int) -> list[bytes]:
    return [i.to_bytes(32, "big") for i in range(1, n + 1)]


def save_plan(
    n: int, groups: int = 1, hashes: list[bytes] | None = None, tables: list | None = None
) -> SavePlan:
    coord = Coordinator([FullAttention(16, spec=g) for g in range(groups)], 16)
    scheme = scheme_of(coord, [flat_layout(64)] * groups)
    tables = [list(range(1, n + 1))] * groups if tables is None else tables
    return SavePlan(scheme, hashes or digests(n), tables, 16 * n)


def finished(plan: SavePlan):
    assert plan.next_call() is None
    return plan.result


@pytest.mark.parametrize("blocks", [500, 20_000])
def test_answers_that_feed_the_plan_they_are_for(blocks):
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    plan = LookupPlan(scheme, digests(blocks), 16 * blocks)
    (keys,) = plan.next_call().args

    def answers():
        plan.feed([1] * len(keys))
        plan.next_call()
        yield from [1] * len(keys)

    with pytest.raises(PlanStateError, match="once"):
        plan.feed(answers())
    if blocks > 500:
        with pytest.raises(PlanStateError):
            plan.result  # noqa: B018 (the second batch is still open)
        with pytest.raises(PlanStateError):
            plan.next_call()


def test_a_batch_that_could_not_be_made_leaves_none_open():
    coord = Coordinator([FullAttention(64), SlidingWindow(16, window=32)], 16)
    hashes = digests(15)
    plan = LookupPlan(scheme_of(coord, covers=False), hashes, 257, strategy="exact")
    del hashes[12:]
    with pytest.raises(HashInputError):
        plan.next_call()
    with pytest.raises(PlanStateError):
        plan.feed([])
    with pytest.raises(PlanStateError):
        plan.fail(OSError())


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

    plan.next_call()
    plan.feed([Clears(0)] * 4)
    assert len(plan.next_call().args[0]) == 4

    def shrinks():
        other.keys.clear()
        yield from [0] * 4

    other = save_plan(4)
    other.next_call()
    with pytest.raises((PlanStateError, ArgumentError, IndexError)):
        other.feed(shrinks())
    with pytest.raises(PlanStateError):
        other.result  # noqa: B018


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
    for builder in (_core.KeyBuilder("p" * 23, as_number=True), _core.KeyBuilder("p@")):
        with pytest.raises(HashInputError, match="from 1 to"):
            _core.build_keys([builder], hashes)


def test_cores_that_no_facade_made():
    for row in (("full", 16, 0, False, True, -1), ("full", 8, 0, False, True, 0)):
        with pytest.raises(ArgumentError):
            _core.CoordinatorCore([row], 16, 16, None, partial=False)
    for rows in ([], [("full", 16, 0, False, False, -1)], [("full", 16, 0, False, True, 1)]):
        with pytest.raises(ArgumentError, match="fill the sets"):
            _core.CoordinatorCore(rows, 16, 16, None, partial=False)


def test_answers_given_twice_count_once():
    plan = save_plan(4, groups=2, tables=[[1, 2, 3, 4], [1, 99, 3, 4]])
    plan.next_call()
    with pytest.raises(BlockIdError):
        plan.feed([0] * 8)
    plan.feed(iter([1] * 8))
    assert finished(plan).present == 8
    plan = save_plan(4)

    def again(n):
        plan.feed([0] * n)
        yield from [0] * n

    for _ in range(2):  # the existence call, and the put
        assert len(plan.next_call().args[0]) == 4
        with pytest.raises(PlanStateError, match="once"):
            plan.feed(again(4))
    assert finished(plan).stored == 4


def test_answers_that_go_on_to_the_next_call():
    """The late answer to a call that was answered meanwhile is none to the next one."""
    plan = save_plan(4)

    def ahead():
        plan.feed([0] * 4)
        plan.next_call()
        yield from [0] * 4

    plan.next_call()
    with pytest.raises(PlanStateError, match="once"):
        plan.feed(ahead())
    with pytest.raises(PlanStateError):
        plan.result  # noqa: B018 (the put is still open)
    plan.feed([0] * 4)
    assert finished(plan).stored == 4


def test_answers_that_fail_the_plan_they_are_for():
    for make in (lambda: save_plan(4), lambda: load_plan(4)):
        plan = make()

        def failing(plan=plan):
            plan.fail(OSError("gone"))
            yield from [64] * 4

        plan.next_call()
        with pytest.raises(PlanStateError, match="once"):
            plan.feed(failing())
        result = finished(plan)
        assert [f.code for f in result.failures] == [CALL_FAILED] * 4


def load_plan(n: int) -> LoadPlan:
    coord = Coordinator([FullAttention(16)], 16)
    hit = coord.find_hit([[True] * n], 16 * n)
    scheme = scheme_of(coord, [flat_layout(64)])
    return LoadPlan(scheme, digests(n), hit, [list(range(1, n + 1))])


class Wild:
    """A list whose own code raises what it likes."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __iter__(self):
        raise self.error


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), MemoryError("x")])
def test_answers_that_raise_are_malformed(error):
    plan = load_plan(4)
    plan.next_call()
    assert {f.code for f in plan.feed(Wild(error))} == {MALFORMED_ANSWER}
    assert len(finished(plan).failures) == 4
    look = LookupPlan(scheme_of(Coordinator([FullAttention(16)], 16)), digests(4), 65)
    look.next_call()
    look.feed(Wild(error))
    assert look.next_call() is None
    assert look.result.unknown == 4


def test_an_interrupt_while_an_answer_is_read_is_the_callers():
    """The call is still open: the caller can feed again, or drop the plan."""
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    look = LookupPlan(scheme, digests(4), 65)
    known = LookupPlan(scheme, digests(4), 65, tools=PlanTools(memo=PresenceMemo()))
    save = save_plan(4)
    for plan, good in (
        (load_plan(4), [64] * 4),
        (look, [1] * 4),
        (known, [1] * 4),
        (save, [1] * 4),
    ):
        plan.next_call()
        with pytest.raises(KeyboardInterrupt):
            plan.feed(Wild(KeyboardInterrupt()))
        plan.feed(good)
        assert plan.next_call() is None
    assert look.result.length == known.result.length == 64
    assert save.result.present == 4


def test_answers_that_feed_a_plan_with_a_memory():
    scheme = scheme_of(Coordinator([FullAttention(16)], 16))
    plan = LookupPlan(scheme, digests(4), 65, tools=PlanTools(memo=PresenceMemo()))
    plan.next_call()

    def again():
        plan.feed([1] * 4)
        yield from [1] * 4

    with pytest.raises(PlanStateError, match="once"):
        plan.feed(again())
    assert plan.next_call() is None
    assert plan.result.length == 64


def test_a_failure_is_that_of_every_block_of_the_key():
    plan = save_plan(4, hashes=[b"x" * 32, b"a" * 32, b"a" * 32, b"b" * 32])
    plan.next_call()
    plan.feed([0] * 4)
    assert len(plan.next_call().args[0]) == 3
    plan.feed([0, -200, 0])
    result = finished(plan)
    assert (result.stored, result.present) == (2, 0)
    assert [f.block for f in result.failures] == [1, 2]
    assert result.mark == 16
    # And when the call raises, or is not made.
    for how in ("fail", "stop"):
        plan = save_plan(4, hashes=[b"x" * 32, b"a" * 32, b"a" * 32, b"b" * 32])
        plan.next_call()
        plan.feed([1, 0, 0, 1])
        if how == "fail":
            assert len(plan.next_call().args[0]) == 1
            plan.fail(OSError("gone"))
        else:
            plan.stop()
        result = finished(plan)
        assert [f.block for f in result.failures] == [1, 2]
        assert (result.stored, result.present, result.mark) == (0, 2, 16)


def test_a_block_table_whose_entries_change_it():
    scheme = scheme_of(Coordinator([FullAttention(16)] * 2, 16), [flat_layout(64)] * 2)
    tables: list = []

    class Leaves:
        """Its only reference is the block table's."""

        def __getattr__(self, name):
            tables[0][1] = 7
            raise AttributeError(name)

    class Replaces:
        def __index__(self):
            tables[1] = None
            return 7

    tables[:] = [[1, Leaves(), 3], [1, 2, 3]]
    with pytest.raises(BlockIdError, match="must hold integers, got Leaves at index 1"):
        SavePlan(scheme, digests(3), tables, 48)
    tables[:] = [[1, Replaces(), 3], [1, 2, 3]]
    plan = SavePlan(scheme, digests(3), tables, 48)
    assert [part.block_ids for part in plan._parts] == [[1, 7, 3], [1, 2, 3]]


def test_the_id_of_a_last_block_is_read_once():
    scheme = scheme_of(Coordinator([FullAttention(32)], 16, partial_hits=True), [flat_layout(64)])

    class Second(list):
        def tolist(self):
            self.append(0)
            return 5 if len(self) == 1 else 0

    plan = SavePlan(scheme, digests(3), [[1, Second()]], 48)
    assert plan._parts[0].block_ids == [1, 5]


def test_forged_hits():
    coord = Coordinator([FullAttention(32)], 16, partial_hits=True)
    scheme = scheme_of(coord, [flat_layout(64)])
    tables = [[1, 2, 3, 4]]
    for tail in (256, 48, 8):
        with pytest.raises(ArgumentError, match="tail_tokens"):
            hit = Hit(16, (Bitset([True]),), (tail,))
            LoadPlan(scheme, digests(16), hit, tables)
    hit = coord.find_hit([[True] * 8], 128)
    with pytest.raises(BlockIdError, match="twice"):
        LoadPlan(scheme, digests(8), hit, [[1, 2, 1, 3]])
