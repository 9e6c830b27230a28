"""Regions and addresses: bytes gathered through them are the bytes of the blocks."""

import array
import collections
import ctypes
import doctest
import gc
import itertools
import types
import weakref
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import kvmask.layout
from kvmask.errors import AlignmentError, BlockIdError, LayoutError
from kvmask.layout import KVLayout, head_shards
from kvmask.regions import MAX_SEGMENTS

BASE = 0x7F00_0000_0000


def gather(layout, block):
    """The object bytes of one block, read through its addresses."""
    addresses, sizes = layout.addresses([block])
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses[0], sizes[0], strict=True))


def offsets(layout, base):
    return [(address - base, size) for address, size, _ in layout.regions]


def simple(num_blocks=8, sizes=(512, 256)):
    regions = [(BASE + i * (1 << 20), size, size) for i, size in enumerate(sizes)]
    return KVLayout.from_regions(regions, num_blocks, [(BASE, len(sizes) << 20)])


def fill(shape, dtype=np.uint8):
    """An array whose bytes tell their place."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = (np.arange(count, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)
    return data.view(dtype).reshape(shape)


def to_array(kind, numpy_array):
    if kind == "numpy":
        return numpy_array
    return pytest.importorskip("torch").from_numpy(numpy_array)


def check_layout(layout):
    """What holds for every layout made from tensors."""
    assert layout.block_bytes == sum(size for _, size, _ in layout.regions)
    assert all(size > 0 for _, size, _ in layout.regions)
    ends = [0]
    for address, size in layout.storages:
        assert size > 0
        assert address >= ends[-1]
        ends.append(address + size)
    addresses, sizes = layout.addresses(range(layout.num_blocks))
    pieces = sorted(
        (a, n) for row in zip(addresses, sizes, strict=True) for a, n in zip(*row, strict=True)
    )
    for (a, n), (b, _) in itertools.pairwise(pieces):
        assert a + n <= b
    for a, n in pieces:
        assert any(s <= a and a + n <= s + size for s, size in layout.storages)


@st.composite
def tensors(draw):
    """(array in memory order, its axis of blocks, blocks, entries per block, permutation)."""
    num_blocks = draw(st.integers(1, 4))
    per_block = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    axis = draw(st.integers(0, len(shape)))
    shape.insert(axis, num_blocks * per_block)
    cuts = []
    whole = []
    for n in shape:
        before, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 1), (2, 1)]))
        cuts.append(slice(before, before + n))
        whole.append(before + n + after)
    dtype = draw(st.sampled_from([np.uint8, np.float16, np.int32, np.complex128]))
    memory = fill(whole, dtype)
    permutation = draw(st.permutations(range(len(shape))))
    return memory, tuple(cuts), axis, num_blocks, per_block, permutation


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@settings(max_examples=300, deadline=None)
@given(case=tensors())
def test_gathered_bytes_are_the_block(kind, case):
    memory, cuts, axis, num_blocks, per_block, permutation = case
    view = memory[cuts]
    tensor = to_array(kind, memory)[cuts]
    tensor = tensor.transpose(permutation) if kind == "numpy" else tensor.permute(*permutation)
    layout = KVLayout.from_tensors([tensor], num_blocks, block_dim=permutation.index(axis))
    check_layout(layout)
    assert layout.storages == [(memory.ctypes.data, memory.nbytes)]
    for block in range(num_blocks):
        entries = range(block * per_block, (block + 1) * per_block)
        assert gather(layout, block) == view.take(entries, axis).tobytes()
    for (base, size, _), (following, _, _) in itertools.pairwise(layout.regions):
        assert base + size < following  # anything that touches has been merged


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_views_of_one_row_buffer(data):
    """Columns of a (blocks, bytes) buffer: disjoint ones concatenate, covered ones vanish."""
    memory = fill((5, 24))
    spans = data.draw(
        st.lists(
            st.tuples(st.integers(0, 23), st.integers(1, 24)).map(
                lambda s: (s[0], min(24, s[0] + s[1]))
            ),
            min_size=1,
            max_size=4,
        )
    )
    views = [memory[:, a:b] for a, b in spans]

    def uncovered(pieces):
        return [
            (a, b)
            for i, (a, b) in enumerate(pieces)
            if not any(
                c <= a and b <= d and ((c, d) != (a, b) or j < i)
                for j, (c, d) in enumerate(pieces)
                if j != i
            )
        ]

    pieces = []
    for a, b in uncovered(spans):
        if pieces and pieces[-1][1] == a:
            pieces[-1] = (pieces[-1][0], b)
        else:
            pieces.append((a, b))
    kept = uncovered(pieces)
    apart = all(b <= c or d <= a for i, (a, b) in enumerate(kept) for c, d in kept[:i])
    if not apart:
        with pytest.raises(LayoutError, match="overlap partly"):
            KVLayout.from_tensors(views, 5)
        return
    layout = KVLayout.from_tensors(views, 5)
    check_layout(layout)
    for block in range(5):
        assert gather(layout, block) == b"".join(memory[block, a:b].tobytes() for a, b in kept)


regions_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 12)).map(
        lambda r: (r[0], r[1], r[1] + r[2])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=500, deadline=None)
@given(regions=regions_strategy, num_blocks=st.integers(1, 5))
@example(regions=[(1, 4, 8), (13, 4, 8)], num_blocks=3)
@example(regions=[(1, 4, 8), (17, 4, 12)], num_blocks=2)
@example(regions=[(2, 6, 6), (3, 5, 5), (8, 1, 1)], num_blocks=1)
@example(regions=[(1, 2, 2), (1, 3, 3), (2, 2, 2)], num_blocks=1)
def test_overlaps_as_by_hand(regions, num_blocks):
    """from_regions refuses exactly what overlaps other than by lying within."""
    touched = {}
    for r, (base, size, stride) in enumerate(regions):
        for block in range(num_blocks):
            for byte in range(base + block * stride, base + block * stride + size):
                touched.setdefault(byte, set()).add(r)

    def within(a, b):
        same = num_blocks == 1 or a[2] == b[2]
        return same and b[0] <= a[0] and a[0] + a[1] <= b[0] + b[1]

    covered = {
        i
        for i, a in enumerate(regions)
        for j, b in enumerate(regions)
        if i != j and within(a, b) and (j < i or not within(b, a))
    }
    bad = any(len(shared - covered) > 1 for shared in touched.values())
    try:
        layout = KVLayout.from_regions(regions, num_blocks, [(1, 200)])
    except LayoutError:
        assert bad
        return
    if bad:  # only when neighbours that touch cover, together, the region that straddles them
        assert any(a[0] + a[1] == b[0] for a, b in itertools.permutations(regions, 2))
    want = [
        [list(range(b + i * s, b + i * s + n)) for b, n, s in regions] for i in range(num_blocks)
    ]
    addresses, sizes = layout.addresses(range(num_blocks))
    for i in range(num_blocks):
        got = [x for a, n in zip(addresses[i], sizes[i], strict=True) for x in range(a, a + n)]
        assert got == [x for piece in want[i] for x in piece]
    # What matters in the end: loading one block never writes to another.
    bytes_of = [{x for piece in row for x in piece} for row in want]
    assert sum(map(len, bytes_of)) == len(set().union(*bytes_of))


@given(
    ids=st.lists(st.integers(0, 7), max_size=20),
    kind=st.sampled_from(["list", "tuple", "array", "int64", "uint8", "int32", "deque", "view"]),
)
def test_addresses_from_any_sequence(ids, kind):
    make = {
        "list": list,
        "tuple": tuple,
        "array": lambda x: array.array("q", x),
        "int64": lambda x: np.array(x, np.int64),
        "uint8": lambda x: np.array(x, np.uint8),
        "int32": lambda x: np.array(x, ">i4"),
        "deque": collections.deque,
        "view": lambda x: memoryview(array.array("H", x)),
    }[kind]
    layout = simple()
    addresses, sizes = layout.addresses(make(ids))
    assert addresses == [[b + i * s for b, _, s in layout.regions] for i in ids]
    assert sizes == [[512, 256]] * len(ids)
    assert all(type(a) is int for row in addresses for a in row)
    assert all(row is sizes[0] for row in sizes)


def test_addresses_from_torch_and_ranges():
    torch = pytest.importorskip("torch")
    layout = simple()
    want = layout.addresses([1, 3, 5])
    assert layout.addresses(range(1, 7, 2)) == want
    assert layout.addresses(torch.tensor([1, 3, 5], dtype=torch.int32)) == want
    assert layout.addresses([torch.tensor(1), np.uint64(3), 5]) == want
    assert layout.addresses([]) == ([], [])
    for bad in (torch.tensor([True]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(1)):
        with pytest.raises(BlockIdError):
            layout.addresses(bad)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 8], "at least 0 and below `num_blocks`, got 8 at index 1 and 8"),
        ([-1], "got -1 at index 0 and 8"),
        ([2**63], "got 9223372036854775808 at index 0"),
        ([0, -(2**70)], "got -1180591620717411303424 at index 1"),
        ([True], "must hold integers, got bool at index 0"),
        ([0, 1.0], "must hold integers, got float at index 1"),
        ([None], "got NoneType at index 0"),
        ([Fraction(1)], "got Fraction at index 0"),
        ([[1]], "got list at index 0"),
        (["1"], "got str at index 0"),
        ("12", "one-dimensional array of integers, got str"),
        (b"12", "one-dimensional array of integers, got bytes"),
        ({1}, "got set"),
        ({1: 2}, "got dict"),
        (None, "got NoneType"),
        (3, "got int"),
        (np.array([True]), "got bool at index 0"),
        (np.array([1.0]), "got float at index 0"),
        (np.array([[1]]), "got list at index 0"),
        (np.array(1), "got ndarray"),
        ([np.bool_(True)], "got bool at index 0"),
        ([np.float32(1)], "got float at index 0"),
    ],
)
def test_block_ids_refused(ids, message):
    with pytest.raises(BlockIdError) as error:
        simple().addresses(ids)
    assert message in str(error.value)


def test_block_ids_change_while_read():
    """An entry whose __index__ empties the list ends the walk and nothing else."""

    class Evil:
        def __index__(self):
            ids.clear()
            return 3

    ids = [Evil(), 1, 2]
    layout = simple()
    with pytest.raises(BlockIdError, match="must not change while it is read, got 1 of 3"):
        layout.addresses(ids)


def test_entries_per_block():
    """Kernel blocks of a quarter of the manager's block, and K and V halves of each."""
    memory = fill((2, 12, 32))
    layout = KVLayout.from_tensors([memory], 3, block_dim=1)
    assert offsets(layout, memory.ctypes.data) == [(0, 128), (384, 128)]
    assert {stride for _, _, stride in layout.regions} == {128}
    assert gather(layout, 2) == memory[:, 8:].tobytes()
    padded = memory[:, :, :24]
    layout = KVLayout.from_tensors([padded], 3, block_dim=1)
    assert len(layout.regions) == 8
    assert gather(layout, 1) == padded[:, 4:8].tobytes()
    with pytest.raises(LayoutError, match="entries in dimension 1, got 12 and 5"):
        KVLayout.from_tensors([memory], 5, block_dim=1)


def test_one_block():
    """Strides of dimensions of size 1 mean nothing, not even negative ones."""
    memory = fill((1, 2, 8))
    odd = np.lib.stride_tricks.as_strided(memory, strides=(-7, 8, 1))
    for array_ in (memory, odd):
        layout = KVLayout.from_tensors([array_], 1)
        assert offsets(layout, memory.ctypes.data) == [(0, 16)]
        assert gather(layout, 0) == memory.tobytes()
    assert layout.regions[0][2] == 16
    halves = [memory[:, 1], memory[:, 0], memory[:, 0, 2:4]]
    layout = KVLayout.from_tensors(halves, 1)
    assert offsets(layout, memory.ctypes.data) == [(8, 8), (0, 8)]


@pytest.mark.parametrize(
    "make",
    [
        lambda a: np.broadcast_to(a[:, :1], a.shape),
        lambda a: a[:, ::-1],
        lambda a: a[::-1],
        lambda a: np.lib.stride_tricks.as_strided(a, (4, 3, 4), (16, 2, 2)),
        lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (0, 1)),
        lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (8, 1)),
        lambda a: np.lib.stride_tricks.as_strided(a, (4, 17), (16, 1)),
        lambda a: np.lib.stride_tricks.as_strided(a, (5, 16), (16, 1))[1:],
        lambda a: a.astype(object),
        lambda a: a.astype("U3"),
        lambda a: a[0, 0],
        lambda a: a[:3],
        lambda a: np.ma.masked_array(a[:, 0, None, None], mask=True)[0, 0, 0],
        lambda a: a.tolist(),
        lambda a: None,
    ],
)
def test_arrays_refused(make):
    with pytest.raises(LayoutError):
        KVLayout.from_tensors([make(fill((4, 16)))], 4)


def test_torch_views_refused():
    torch = pytest.importorskip("torch")
    dense = torch.zeros(4, 16)
    for tensor in (
        dense[:, :1].expand(4, 16),
        torch.zeros(4, 16, device="meta"),
        dense.to_sparse(),
        torch.tensor(1.0),
        dense.unfold(1, 4, 2),
    ):
        with pytest.raises(LayoutError):
            KVLayout.from_tensors([tensor], 4)
    with pytest.raises(LayoutError, match="must be a list of tensors, got one Tensor"):
        KVLayout.from_tensors(dense, 4)


def test_argument_errors():
    memory = fill((4, 16))
    for tensors_, num_blocks, dim, message in [
        (memory, 4, 0, "`tensors` must be a list of tensors, got one ndarray"),
        (7, 4, 0, "`tensors` must be a list of tensors, got one int"),
        ([], 4, 0, "must hold a tensor that is not empty, got none"),
        ([memory[:0]], 4, 0, "must hold a tensor that is not empty, got none"),
        ([memory], 0, 0, "`num_blocks` must be from 1 to"),
        ([memory], -4, 0, "`num_blocks` must be from 1 to"),
        ([memory], 2**80, 0, "`num_blocks` must be from 1 to 9223372036854775807"),
        ([memory], True, 0, "`num_blocks` must be an integer, got bool"),
        ([memory], 4.0, 0, "`num_blocks` must be an integer, got float"),
        ([memory], 4, 2, "`block_dim` of tensor 0 must be from 0 to 1, got 2"),
        ([memory], 4, -1, "`block_dim` of tensor 0 must be from 0 to 1, got -1"),
        ([memory, memory[:2]], 4, 0, "`tensors[1]` must have a multiple of `num_blocks` entries"),
        ([np.broadcast_to(memory, (4, 16))], 4, 0, "must be writable, got a read-only array"),
    ]:
        with pytest.raises(TypeError if "an integer" in message else LayoutError) as error:
            KVLayout.from_tensors(tensors_, num_blocks, block_dim=dim)
        assert message in str(error.value)


def test_too_many_segments():
    wide = np.lib.stride_tricks.as_strided(
        fill((1 << 19,)), (2, MAX_SEGMENTS + 1, 1), (1 << 18, 2, 1)
    )
    with pytest.raises(LayoutError, match="at most 65536 segments per block, got 65537"):
        KVLayout.from_tensors([wide], 2)
    layout = KVLayout.from_tensors([wide[:, 1:]], 2)
    assert len(layout.regions) == MAX_SEGMENTS
    with pytest.raises(LayoutError, match="up to index 1"):
        KVLayout.from_tensors([wide[:, :MAX_SEGMENTS], fill((2, 4))], 2)


def array_like(**changes):
    memory = fill((4, 16))
    interface = {**memory.__array_interface__, "strides": (16, 1), **changes}
    interface = {k: v for k, v in interface.items() if v is not ...}
    return types.SimpleNamespace(__array_interface__=interface, keep=memory)


INTERFACE_JUNK = [
    {"shape": ...},
    {"shape": [4, 16]},
    {"shape": (4, -16)},
    {"shape": (4, 2**70)},
    {"shape": (4, 2**62)},
    {"shape": (4.0, 16)},
    {"shape": (True, 16)},
    {"shape": 4},
    {"shape": ()},
    {"shape": (1,) * 65},
    {"strides": (16,)},
    {"strides": [16, 1]},
    {"strides": (2**63, 1)},
    {"strides": (2**63 - 1, 1)},
    {"strides": ("16", 1)},
    {"strides": (16, 0)},
    {"typestr": ...},
    {"typestr": 7},
    {"typestr": "<f"},
    {"typestr": "|V0"},
    {"typestr": "|O8"},
    {"typestr": "<U4"},
    {"typestr": "|t1"},
    {"typestr": "<f99999999999"},
    {"data": ...},
    {"data": None},
    {"data": b"xxxx"},
    {"data": (0, False)},
    {"data": (-1, False)},
    {"data": (2**64, False)},
    {"data": (2**64 - 1, False)},
    {"data": (4096, True)},
    {"data": (1.5, False)},
    {"data": (4096,)},
    {"mask": 1},
]


@pytest.mark.parametrize("junk", INTERFACE_JUNK, ids=repr)
def test_malformed_interface(junk):
    assert KVLayout.from_tensors([array_like()], 4).block_bytes == 16
    with pytest.raises(LayoutError, match="`"):
        KVLayout.from_tensors([array_like(**junk)], 4)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(-3, 20)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["<f4", "|u1", "<i8", "|V16"])
)
junk_values = scalars | st.lists(scalars, max_size=3) | st.lists(scalars, max_size=3).map(tuple)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    interface=st.fixed_dictionaries(
        {},
        optional={
            "shape": junk_values,
            "typestr": scalars,
            "data": junk_values,
            "strides": junk_values,
            "mask": st.none() | scalars,
        },
    ),
    cuda=st.booleans(),
    num_blocks=st.integers(1, 4),
)
def test_interface_fuzz(interface, cuda, num_blocks):
    """Any dictionary gives a layout within its own extent, or LayoutError; never another end."""
    name = "__cuda_array_interface__" if cuda else "__array_interface__"
    try:
        layout = KVLayout.from_tensors([types.SimpleNamespace(**{name: interface})], num_blocks)
    except LayoutError:
        return
    (start, size), *others = layout.storages
    assert not others
    addresses, sizes = layout.addresses([0, num_blocks - 1])
    assert min(map(min, addresses)) >= start
    assert max(addresses[1]) + sizes[1][-1] <= start + size


def test_interface_that_raises():
    class Broken:
        @property
        def __array_interface__(self):
            raise RuntimeError("device lost")

    with pytest.raises(LayoutError, match=r"`tensors\[0\]`.*device lost"):
        KVLayout.from_tensors([Broken()], 1)


def cuda_like(device=None, **changes):
    interface = {
        "shape": (4, 16),
        "typestr": "<f2",
        "data": (BASE, False),
        "version": 3,
        "strides": None,
        "stream": 1,
        **changes,
    }
    extra = {} if device is None else {"device": types.SimpleNamespace(id=device)}
    return types.SimpleNamespace(__cuda_array_interface__=interface, **extra)


def test_cuda_array_interface():
    layout = KVLayout.from_tensors([cuda_like(1)], 4)
    assert layout.device == "cuda:1"
    assert layout.regions == [(BASE, 32, 32)]
    assert layout.storages == [(BASE, 128)]
    assert KVLayout.from_tensors([cuda_like()], 4).device == "cuda"
    view = cuda_like(0, shape=(4, 8), strides=(32, 2), data=(BASE + 16, False))
    view.base = cuda_like(0)
    layout = KVLayout.from_tensors([view], 4)
    assert layout.regions == [(BASE + 16, 16, 32)]
    assert layout.storages == [(BASE, 128)]


def test_one_device():
    with pytest.raises(LayoutError, match="on one device, got cuda:0 at index 0 and cuda:1"):
        KVLayout.from_tensors([cuda_like(0), cuda_like(1)], 4)
    with pytest.raises(LayoutError, match="got cpu at index 1 and cuda:0 at index 2"):
        KVLayout.from_tensors([fill((0,)), fill((4, 2)), cuda_like(0)], 4)


def test_storages():
    memory = fill((4, 64))
    other = fill((4, 8))
    layout = KVLayout.from_tensors([memory[:, :8], memory[:, 32:], other, other[:0]], 4)
    assert sorted(layout.storages) == sorted([(memory.ctypes.data, 256), (other.ctypes.data, 32)])
    ranges = [(4096, 100), (4196, 4), (5000, 0), (4096, 50), (4150, 20), (4200, 10)]
    layout = KVLayout.from_regions([(4096, 10, 10)], 1, ranges)
    assert layout.storages == [(4096, 100), (4196, 4), (4200, 10)]
    inner = KVLayout.from_regions([(4096, 10, 10)], 1, [(4096, 100), (4190, 20)])
    assert inner.storages == [(4096, 114)]
    for owner in (bytearray(64), (ctypes.c_char * 64)()):
        view = np.frombuffer(owner, np.uint8).reshape(4, 16)
        assert KVLayout.from_tensors([view[:, 4:]], 4).storages == [(view.ctypes.data, 64)]
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 32)
    for view in (tensor[:, :8], tensor[:, 8:].numpy()):
        assert KVLayout.from_tensors([view], 4).storages == [(tensor.data_ptr(), 512)]


def test_touching_storages_are_not_merged():
    regions = [(4096, 64, 64), (4096 + 256, 64, 64)]
    layout = KVLayout.from_regions(regions, 4, [(4096, 256), (4352, 256)])
    assert layout.regions == regions
    pieces = [(4096, 64, 128), (4160, 64, 128)]
    assert KVLayout.from_regions(pieces, 2, [(4096, 256)]).regions == [(4096, 128, 128)]
    single = [(4096, 64, 64), (4160, 64, 64)]
    assert KVLayout.from_regions(single, 1, [(4096, 64), (4160, 64)]).regions == single
    assert KVLayout.from_regions(single, 1, [(4096, 128)]).regions == [(4096, 128, 128)]


def test_merge_across_a_dropped_view():
    """A covered view between two halves does not keep them apart."""
    memory = fill((3, 16))
    views = [memory[:, :8], memory[:, 2:4], memory[:, 8:]]
    layout = KVLayout.from_tensors(views, 3)
    assert offsets(layout, memory.ctypes.data) == [(0, 16)]


@pytest.mark.parametrize(
    ("regions", "num_blocks", "storages", "message"),
    [
        ([], 1, [], "at least one region, got none"),
        ([(BASE, 0, 8)], 1, [(BASE, 8)], "sizes of at least 1, got 0 at index 0"),
        ([(BASE, 8, 4)], 2, [(BASE, 99)], "strides of at least their size, got 4 and 8"),
        ([(BASE, 8, 0)], 2, [(BASE, 99)], "strides of at least their size, got 0 and 8"),
        ([(BASE, 8, 8)], 2, [(BASE, 15)], "must lie within a storage"),
        ([(BASE, 8, 8)], 2, [(BASE + 1, 99)], "must lie within a storage"),
        ([(BASE, 8, 8)], 2, [(BASE, 8), (BASE + 8, 8)], "must lie within a storage"),
        ([(BASE, 8, 8)], 2, [], "and no storage"),
        ([(0, 8, 8)], 2, [(0, 99)], "must lie above 0"),
        ([(BASE, 8, 8)], 2, [(BASE, 2**64 - 1)], "must lie above 0 and within 64 bit"),
        ([(2**64 - 8, 9, 9)], 1, [(BASE, 99)], "must end within 64 bit addresses"),
        ([(2**64 - 8, 8, 8)], 2, [(BASE, 99)], "must end within 64 bit addresses"),
        ([(BASE, 8, 2**40)], 2**40, [(BASE, 99)], "must end within 64 bit addresses"),
        ([(-1, 8, 8)], 1, [(BASE, 99)], "`regions[0]` must be from 0 to"),
        (
            [(BASE, 8, 2**64)],
            1,
            [(BASE, 99)],
            "`regions[0]` must be from 0 to 18446744073709551615",
        ),
        ([(BASE, 8)], 1, [(BASE, 99)], "`regions[0]` must be 3 integers"),
        ([(BASE, 8, 8.0)], 1, [(BASE, 99)], "must be an integer, got float"),
        ([(BASE, 8, 8)], 1, [(BASE, 8, 8)], "`storages[0]` must be 2 integers"),
        ([(BASE, 8, 8), (BASE + 4, 8, 8)], 1, [(BASE, 99)], "must not overlap partly"),
        ([(BASE, 8, 8), (BASE + 8, 8, 8)], 2, [(BASE, 99)], "must not overlap partly"),
        ([(BASE, 8, 16), (BASE + 8, 8, 24)], 3, [(BASE, 99)], "must not overlap partly"),
    ],
)
def test_regions_refused(regions, num_blocks, storages, message):
    with pytest.raises(TypeError if "an integer" in message else LayoutError) as error:
        KVLayout.from_regions(regions, num_blocks, storages)
    assert message in str(error.value)


def test_end_of_the_address_space():
    layout = KVLayout.from_regions([(2**64 - 32, 16, 16)], 2, [(2**64 - 32, 32)])
    assert layout.addresses([1])[0] == [[2**64 - 16]]


def test_from_regions_keeps_what_it_is_given():
    regions = [(BASE, 64, 64), (BASE + 16, 8, 64), (BASE, 64, 64)]
    layout = KVLayout.from_regions(
        regions, 4, [(BASE, 256)], device="cuda:0", owners=[layout_owner]
    )
    assert layout.regions == regions
    assert layout.block_bytes == 136
    assert layout.device == "cuda:0"
    assert layout.owners == (layout_owner,)
    assert simple().device is None
    assert repr(simple()) == "KVLayout(num_blocks=8, regions=2, block_bytes=768, device=None)"


def layout_owner():
    """Any object can be an owner."""


def test_core_table_checks_its_own_input():
    from kvmask._core import Regions

    for regions, num_blocks in [
        ([(1, 2**64, 1)], 1),
        ([(1, -1, 1)], 1),
        ([(1, 1, 1)], 0),
        ([(1, 1, 1)], 2**63),
    ]:
        with pytest.raises(LayoutError):
            Regions(regions, num_blocks)
    with pytest.raises(TypeError, match="must be an integer, got str"):
        Regions([(1, "a", 1)], 1)
    with pytest.raises(ValueError, match="sorted by base, region 1 is not"):
        Regions([(9, 1, 1), (4, 1, 1)], 1).find_overlap()
    assert Regions([], 1).addresses([0]) == ([[]], [[]])


def test_overlap_search_is_fast_for_interleaved_storages():
    """Disjoint regions of two strides and 2**40 blocks: answered without walking the blocks."""
    regions = [(BASE, 1, 6), (BASE + 3, 1, 10)]
    layout = KVLayout.from_regions(regions, 2**40, [(BASE, 2**45)])
    assert layout.regions == regions
    with pytest.raises(LayoutError, match="overlap partly"):
        KVLayout.from_regions([(BASE, 1, 7), regions[1]], 2**40, [(BASE, 2**45)])


def test_layout_keeps_its_tensors():
    memory = fill((4, 16))
    alive = weakref.ref(memory)
    want = memory[2].tobytes()
    layout = KVLayout.from_tensors([memory], 4)
    del memory
    gc.collect()
    assert alive() is not None
    assert gather(layout, 2) == want
    del layout
    gc.collect()
    assert alive() is None


def test_lists_are_copies():
    layout = simple()
    layout.regions.clear()
    layout.storages.clear()
    assert len(layout.regions) == 2
    assert len(layout.storages) == 1


def test_tag():
    def tag(array_, num_blocks=4, **more):
        return KVLayout.from_tensors([array_], num_blocks, **more).tag

    memory = fill((4, 2, 16, 8), np.float16)
    same = tag(memory)
    assert same.startswith("kv1-")
    assert tag(fill((4, 2, 16, 8), np.float16)) == same
    assert tag(fill((6, 2, 16, 8), np.float16), 6) == same  # not a matter of how many blocks
    assert tag(fill((1, 2, 16, 8), np.float16), 1) == same
    others = [
        tag(memory.view(np.int16)),
        tag(fill((4, 2, 16, 4), np.float16)),
        tag(fill((4, 16, 2, 8), np.float16).transpose(0, 2, 1, 3)),
        tag(fill((2, 4, 16, 8), np.float16).transpose(1, 0, 2, 3)),
        tag(memory, 2),
        KVLayout.from_tensors([memory, memory], 4).tag,
        KVLayout.from_tensors([memory, fill((4, 2, 16, 8), np.float16)], 4).tag,
    ]
    assert len({same, *others}) == len(others) + 1
    assert simple().tag == simple(num_blocks=5).tag
    assert simple().tag != simple(sizes=(256, 512)).tag


def test_head_shards_with_padding_and_blocks_elsewhere():
    memory = fill((4, 6, 5, 10), np.int16)  # heads, blocks, tokens, content with padding
    tensor = memory[..., :7].transpose(1, 2, 0, 3)
    shards = head_shards([tensor], 6, num_kv_heads=8, local_tp=2, store_tp=8, tp_rank=1, head_dim=2)
    assert list(shards) == [4, 5, 6, 7]
    for i, layout in enumerate(shards.values()):
        check_layout(layout)
        for block in (0, 5):
            assert gather(layout, block) == memory[i, block, :, :7].tobytes()


def test_head_shards_errors():
    memory = fill((4, 8, 16, 2))
    sizes = {"num_kv_heads": 8, "local_tp": 1, "store_tp": 4, "tp_rank": 0}
    for changes, kind, message in [
        ({"local_tp": 0}, LayoutError, "`local_tp` must be from 1 to"),
        ({"store_tp": -4}, LayoutError, "`store_tp` must be from 1 to"),
        ({"num_kv_heads": 8.0}, TypeError, "`num_kv_heads` must be an integer"),
        ({"tp_rank": 1}, LayoutError, "`tp_rank` must be from 0 to 0, got 1"),
        ({"store_tp": 3}, AlignmentError, "multiple of `store_tp`, got 8 and 3"),
        ({"local_tp": 3}, AlignmentError, "multiple of `local_tp`, got 4 and 3"),
        ({"local_tp": 2}, LayoutError, "must have 4 heads in dimension 1"),
        ({"head_dim": 2}, LayoutError, "must have 8 heads in dimension 2"),
        ({"head_dim": 4}, LayoutError, "`head_dim` of tensor 0 must be from 0 to 3, got 4"),
        ({"head_dim": 1, "block_dim": 1}, LayoutError, "not the one of the blocks"),
    ]:
        with pytest.raises(kind) as error:
            head_shards([memory], 4, **{**sizes, **changes})
        assert message in str(error.value)


def test_doctests():
    assert doctest.testmod(kvmask.layout).failed == 0
