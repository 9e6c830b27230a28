"""Bitset against a list of bool: properties, a state machine, and the buffer it exports."""

import copy
import ctypes
import gc
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import WORD_EDGES, bool_lists, bools, check_bitset

from kvmask import Bitset
from kvmask.errors import ArgumentError, KVMaskError

slices = st.builds(
    slice,
    st.none() | st.integers(-210, 210),
    st.none() | st.integers(-210, 210),
    st.none() | st.sampled_from((1, 1, 2, 3, 63, 64, 65, -1, -2, -64)),
)


def words_of(items):
    """The words that a list of bool must have."""
    return [
        sum(1 << i for i, bit in enumerate(items[at : at + 64]) if bit)
        for at in range(0, len(items), 64)
    ]


@given(bool_lists)
def test_packing_and_every_view(items):
    bits = Bitset.from_bools(items)
    check_bitset(bits)
    assert list(memoryview(bits)) == words_of(items)
    assert bits.tolist() == items == list(bits)
    assert list(reversed(bits)) == items[::-1]
    assert len(bits) == len(items)
    assert bits.count() == sum(items)
    assert bits.count(False) == len(items) - sum(items)
    assert bits.indices() == [i for i, bit in enumerate(items) if bit]
    assert bits == Bitset.from_indices(len(items), bits.indices())
    assert bits == items
    assert bits == tuple(items)
    assert (True in bits) == (True in items)
    assert (False in bits) == (False in items)


@given(bool_lists)
def test_runs_and_repr_name_the_ones(items):
    bits = Bitset.from_bools(items)
    covered = [i for start, stop in bits.runs() for i in range(start, stop)]
    assert covered == bits.indices()
    stops = [stop for _, stop in bits.runs()]
    assert all(stop < start for stop, (start, _) in zip(stops, bits.runs()[1:], strict=False))
    if len(bits.runs()) <= 16:
        text = repr(bits).removeprefix(f"Bitset({len(items)}, '").removesuffix("')")
        parts = [part.split("-") for part in text.split(",") if part]
        assert [(int(p[0]), int(p[-1]) + 1) for p in parts] == bits.runs()


def test_repr():
    assert repr(Bitset.from_indices(16, [2, 3, 6, 7])) == "Bitset(16, '2-3,6-7')"
    assert repr(Bitset.from_indices(70, [0, 64, 69])) == "Bitset(70, '0,64,69')"
    assert repr(Bitset([])) == "Bitset(0, '')"
    many = Bitset([i % 2 == 0 for i in range(40)])
    assert repr(many).endswith("30,... 4 more')")


@given(bool_lists, slices)
def test_slices(items, key):
    part = Bitset.from_bools(items)[key]
    check_bitset(part)
    assert part == items[key]
    assert type(part) is Bitset


@given(bool_lists, st.integers(-260, 260))
def test_indexing(items, i):
    bits = Bitset.from_bools(items)
    if -len(items) <= i < len(items):
        assert bits[i] is items[i]
    else:
        with pytest.raises(IndexError):
            bits[i]


@given(st.data())
def test_algebra(data):
    a = data.draw(bool_lists)
    b = data.draw(bools(len(a)))
    x, y = Bitset.from_bools(a), Bitset.from_bools(b)
    for got, expected in (
        (x & y, [p and q for p, q in zip(a, b, strict=True)]),
        (x | y, [p or q for p, q in zip(a, b, strict=True)]),
        (~x, [not p for p in a]),
        (~~x, a),
        (~(x & y), list(~x | ~y)),
    ):
        check_bitset(got)
        assert got == expected
    assert x == a  # operands are not touched


@given(bool_lists, st.booleans(), st.integers(-210, 210), st.none() | st.integers(-210, 210))
def test_index_is_that_of_a_list(items, value, start, stop):
    bits = Bitset.from_bools(items)
    args = (value, start) if stop is None else (value, start, stop)
    try:
        expected = items.index(*args)
    except ValueError:
        with pytest.raises(ValueError, match="is not in the bitset"):
            bits.index(*args)
    else:
        assert bits.index(*args) == expected


@given(bool_lists)
def test_copies_and_pickles(items):
    bits = Bitset.from_bools(items)
    for twin in (copy.copy(bits), copy.deepcopy(bits), pickle.loads(pickle.dumps(bits))):
        check_bitset(twin)
        assert twin == bits
    again = Bitset.from_words(len(items), bits)
    assert again == bits


@pytest.mark.parametrize("n", WORD_EDGES)
def test_ones_and_zeros(n):
    assert Bitset.ones(n) == [True] * n
    assert Bitset.zeros(n) == [False] * n
    assert ~Bitset.ones(n) == Bitset.zeros(n)
    for bits in (Bitset.ones(n), Bitset.zeros(n), ~Bitset.zeros(n)):
        check_bitset(bits)


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_equality_sees_length_and_type(n):
    bits = Bitset.ones(n)
    assert bits != Bitset.ones(n + 1)
    assert bits != [True] * (n + 1)
    assert bits != [True] * (n - 1) + [False]
    assert bits != "1" * n
    assert bits != None  # noqa: E711
    with pytest.raises(TypeError):
        hash(bits)
    with pytest.raises(TypeError):
        bits < Bitset.ones(n)  # noqa: B015


def test_the_buffer_is_read_only_and_outlives_the_name():
    bits = Bitset.from_indices(130, [0, 64, 129])
    view = memoryview(bits)
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(TypeError):
        (ctypes.c_uint64 * 3).from_buffer(bits)
    del bits
    gc.collect()
    assert list(view) == [1, 1, 2]


def test_a_bitset_cannot_be_changed():
    bits = Bitset.ones(3)
    with pytest.raises(TypeError):
        bits[0] = False
    with pytest.raises(TypeError):
        del bits[0]
    with pytest.raises(TypeError):
        bits.__init__([False])
    with pytest.raises(AttributeError):
        bits.words = 1
    assert bits == [True] * 3


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Bitset.from_bools([2]), ArgumentError),
        (lambda: Bitset.from_bools(["x"]), ArgumentError),
        (lambda: Bitset.from_bools([None]), ArgumentError),
        (lambda: Bitset.from_bools(3), TypeError),
        (lambda: Bitset.from_indices(8, [8]), ArgumentError),
        (lambda: Bitset.from_indices(8, [-1]), ArgumentError),
        (lambda: Bitset.from_indices(0, [0]), ArgumentError),
        (lambda: Bitset.from_indices(8, [1.5]), TypeError),
        (lambda: Bitset.from_indices(8, [2**70]), ArgumentError),
        (lambda: Bitset.ones(-1), ArgumentError),
        (lambda: Bitset.ones(2**63), ArgumentError),
        (lambda: Bitset.zeros(2**40), ArgumentError),
        (lambda: Bitset.ones("3"), TypeError),
        (lambda: Bitset.from_words(65, bytes(8)), ArgumentError),
        (lambda: Bitset.from_words(3, b"\x08" + bytes(7)), ArgumentError),
        (lambda: Bitset.ones(3) & Bitset.ones(4), ArgumentError),
        (lambda: Bitset.ones(64) | Bitset.ones(65), ArgumentError),
        (lambda: Bitset.ones(3) & [True] * 3, TypeError),
        (lambda: Bitset.ones(3)["x"], TypeError),
        (lambda: Bitset.ones(3)[2**70], IndexError),
        (lambda: Bitset.ones(3)[::0], ValueError),
    ],
)
def test_wrong_arguments(make, error):
    with pytest.raises(error) as caught:
        make()
    if issubclass(error, KVMaskError):
        assert not str(caught.value).endswith(".")


def test_numpy_bools_pack_like_bools():
    np = pytest.importorskip("numpy")
    items = np.arange(130) % 3 == 0
    assert Bitset.from_bools(items) == items.tolist()
    assert Bitset.from_bools(items) == items
    assert np.asarray(memoryview(Bitset.from_bools(items))).dtype == np.uint64


def test_views_keep_the_words_of_dropped_bitsets():
    live = [Bitset.ones(1000) for _ in range(10)]
    views = [memoryview(b) for b in live]
    del live
    gc.collect()
    assert all(sum(int(w).bit_count() for w in v) == 1000 for v in views)


class AgainstAList(RuleBasedStateMachine):
    """A bitset that is put through every operation beside a list of bool."""

    @initialize(items=bool_lists)
    def start(self, items):
        self.items = items
        self.bits = Bitset.from_bools(items)

    @rule(key=slices)
    def cut(self, key):
        self.items, self.bits = self.items[key], self.bits[key]

    @rule()
    def invert(self):
        self.items, self.bits = [not b for b in self.items], ~self.bits

    @rule(data=st.data())
    def meet(self, data):
        other = data.draw(bools(len(self.items)))
        self.items = [a and b for a, b in zip(self.items, other, strict=True)]
        self.bits = self.bits & Bitset.from_bools(other)

    @rule(data=st.data())
    def join(self, data):
        other = data.draw(bools(len(self.items)))
        self.items = [a or b for a, b in zip(self.items, other, strict=True)]
        self.bits = self.bits | Bitset.from_bools(other)

    @rule(more=bool_lists)
    @precondition(lambda self: len(self.items) < 500)
    def extend(self, more):
        self.items = self.items + more
        self.bits = Bitset.from_bools([*self.bits, *more])

    @rule()
    def through_indices(self):
        self.bits = Bitset.from_indices(len(self.bits), self.bits.indices())

    @rule()
    def through_words(self):
        self.bits = Bitset.from_words(len(self.bits), bytes(memoryview(self.bits)))

    @invariant()
    def equal(self):
        check_bitset(self.bits)
        assert self.bits == self.items
        assert list(memoryview(self.bits)) == words_of(self.items)
        assert self.bits.count() == sum(self.items)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
