"""Failures of other systems, from public trackers, as far as addresses go.

The number in a test's name is that of the case; the comment names the thread it came from.
"""

import ctypes

import numpy as np
import pytest

from kvmask.errors import AlignmentError, BlockIdError, LayoutError
from kvmask.layout import KVLayout, head_shards

BASE = 0x7F00_0000_0000


def offsets(layout, base):
    return [(address - base, size) for address, size, _ in layout.regions]


def gather(layout, block):
    addresses, sizes = layout.addresses([block])
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses[0], sizes[0], strict=True))


def fill(shape, dtype=np.uint8):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = (np.arange(count, dtype=np.uint64) * 2654435761 >> 9).astype(np.uint8)
    return data.view(dtype).reshape(shape)


def to_array(kind, array):
    if kind == "numpy":
        return array
    return pytest.importorskip("torch").from_numpy(array)


# B19 · vllm#51362, #51358: null entries in a sparse block table.
@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ([0, 0, 0, 7], [7]),
        ([3, 0, 0, 7], [3, 7]),
        ([0, 0, 0, 0], []),
        ([5], [5]),
    ],
)
def test_b19_null_block_never_has_an_address(table, wanted):
    memory = fill((8, 64))
    layout = KVLayout.from_tensors([memory], 8)
    if 0 in table:
        with pytest.raises(BlockIdError) as error:
            layout.addresses(table, null_block=0)
        assert str(error.value) == (
            f"`block_ids` must not name the null block, got 0 at index {table.index(0)}"
        )
    addresses, sizes = layout.addresses([i for i in table if i != 0], null_block=0)
    assert addresses == [[memory.ctypes.data + i * 64] for i in wanted]
    assert sizes == [[64]] * len(wanted)


# B28 · vllm#53129: engines of several TP sizes share one layout. 8 KV heads, store TP 4, blocks of
# 16 tokens, 256 bytes per head and token.
HEADS, TOKENS, CONTENT, BLOCKS = 8, 16, 256, 3


def rank_memory(order, local_tp, rank):
    """(array in memory, view as (blocks, heads, tokens, content)) of one rank's heads."""
    model = fill((BLOCKS, HEADS, TOKENS, CONTENT))
    heads = HEADS // local_tp
    own = model[:, rank * heads : (rank + 1) * heads]
    if order == "head-major":
        memory = np.ascontiguousarray(own)
        return memory, memory
    memory = np.ascontiguousarray(own.transpose(0, 2, 1, 3))
    return memory, memory.transpose(0, 2, 1, 3)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("order", "local_tp", "rank", "first_offsets", "segments"),
    [
        ("token-major", 1, 0, {0: 65536, 1: 66048, 2: 66560, 3: 67072}, [512] * 16),
        ("token-major", 2, 1, {2: 32768, 3: 33280}, [512] * 16),
        # All heads of the rank are one shard: its 16 segments of 512 bytes touch.
        ("token-major", 4, 3, {3: 16384}, [8192]),
        ("head-major", 1, 0, {0: 65536, 1: 73728, 2: 81920, 3: 90112}, [8192]),
        ("head-major", 2, 1, {2: 32768, 3: 40960}, [8192]),
        ("head-major", 4, 3, {3: 16384}, [8192]),
    ],
)
def test_b28_shard_offsets(kind, order, local_tp, rank, first_offsets, segments):
    memory, view = rank_memory(order, local_tp, rank)
    shards = head_shards(
        [to_array(kind, view)],
        BLOCKS,
        num_kv_heads=HEADS,
        local_tp=local_tp,
        store_tp=4,
        tp_rank=rank,
    )
    got = {}
    for shard, layout in shards.items():
        addresses, sizes = layout.addresses([2])
        got[shard] = addresses[0][0] - memory.ctypes.data
        assert sizes == [segments]
        assert layout.storages == [(memory.ctypes.data, memory.nbytes)]
    assert got == first_offsets


@pytest.mark.parametrize("order", ["token-major", "head-major"])
def test_b28_shards_are_equal_over_engines(order):
    bytes_of, tags = {}, {}
    for local_tp in (1, 2, 4):
        for rank in range(local_tp):
            memory, view = rank_memory(order, local_tp, rank)
            shards = head_shards(
                [view], BLOCKS, num_kv_heads=HEADS, local_tp=local_tp, store_tp=4, tp_rank=rank
            )
            for shard, layout in shards.items():
                bytes_of.setdefault(shard, set()).add(gather(layout, 2))
                tags.setdefault(shard, set()).add(layout.tag)
            del memory
    assert sorted(bytes_of) == [0, 1, 2, 3]
    assert all(len(objects) == 1 for objects in bytes_of.values())
    assert len(set().union(*bytes_of.values())) == 4
    assert len(set().union(*tags.values())) == 1


@pytest.mark.parametrize(
    ("local_tp", "store_tp", "message"),
    [
        (8, 4, "`store_tp` must be a multiple of `local_tp`, got 4 and 8"),
        (3, 4, "`store_tp` must be a multiple of `local_tp`, got 4 and 3"),
        (4, 16, "`num_kv_heads` must be a multiple of `store_tp`, got 8 and 16"),
    ],
)
def test_b28_divisions_that_leave_nothing(local_tp, store_tp, message):
    _, view = rank_memory("head-major", 1, 0)
    with pytest.raises(AlignmentError) as error:
        head_shards([view], BLOCKS, num_kv_heads=8, local_tp=local_tp, store_tp=store_tp, tp_rank=0)
    assert str(error.value) == message


# B31 · vllm-ascend#16854, #16632: empty views, shared storage, overlap in registration.
def b31_dense(memory):
    return [memory[:2048].reshape(4, 512)]


def b31_half_rows(memory):
    rows = memory[:4096].reshape(4, 1024)
    return [rows[:, :512], rows[:, 512:]]


def b31_layer_major(memory):
    layers = memory[:4096].reshape(2, 4, 512)
    return [layers[0], layers[1]]


def b31_tail_padding(memory):
    return [memory[:2048].reshape(4, 512)]


def b31_heads_outermost(memory):
    heads = memory[:2048].reshape(2, 4, 256)
    return [heads.swapaxes(0, 1)]


def b31_view_at_offset(memory):
    return [memory[512:2560].reshape(4, 512)]


B31 = [
    (b31_dense, 2048, [(0, 512)]),
    (b31_half_rows, 4096, [(0, 1024)]),
    (b31_layer_major, 4096, [(0, 512), (2048, 512)]),
    (b31_tail_padding, 2148, [(0, 512)]),
    (b31_heads_outermost, 2048, [(0, 256), (1024, 256)]),
    (b31_view_at_offset, 2560, [(512, 512)]),
]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("make", "nbytes", "expected"), B31, ids=lambda v: getattr(v, "__name__", "")
)
def test_b31_six_layouts(kind, make, nbytes, expected):
    memory = fill((nbytes,))
    tensors = make(to_array(kind, memory))
    layout = KVLayout.from_tensors(tensors, 4)
    assert offsets(layout, memory.ctypes.data) == expected
    assert layout.storages == [(memory.ctypes.data, nbytes)]
    assert layout.block_bytes == sum(size for _, size in expected)
    assert gather(layout, 3) == b"".join(memory[a:b].tobytes() for a, b in block_three(expected))


def block_three(expected):
    """Bytes of block 3: in these six layouts a region's stride equals its size."""
    return [(start + 3 * size, start + 4 * size) for start, size in expected]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_b31_duplicates_and_empty_views_are_solved_before_registration(kind):
    memory = fill((4096,))
    array = to_array(kind, memory)
    whole = array[:2048].reshape(4, 512)
    empty = array[:0].reshape(4, 0)
    tensors = [empty, whole, whole, whole[:, 128:256], array[2048:].reshape(4, 512), empty]
    layout = KVLayout.from_tensors(tensors, 4)
    assert offsets(layout, memory.ctypes.data) == [(0, 512), (2048, 512)]
    assert layout.storages == [(memory.ctypes.data, 4096)]
    rows = array.reshape(4, 1024)
    with pytest.raises(LayoutError, match="must not overlap partly"):
        KVLayout.from_tensors([rows[:, :512], rows[:, 256:768]], 4)


def test_b31_empty_torch_tensor_has_address_zero():
    torch = pytest.importorskip("torch")
    empty, full = torch.empty(4, 0), torch.zeros(4, 8)
    assert empty.data_ptr() == 0
    layout = KVLayout.from_tensors([empty, full], 4)
    assert layout.regions == [(full.data_ptr(), 32, 32)]
    assert layout.storages == [(full.data_ptr(), 128)]


# B32 · LMCache#2826, vllm#46888, vllm#55904: logical shape read as physical layout.
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_b32_stride_order(kind):
    dense = fill((4, 2, 16, 8))
    halves_first = fill((2, 4, 16, 8))
    tokens_first = fill((4, 16, 2, 8))
    a, b, c = (to_array(kind, m) for m in (dense, halves_first, tokens_first))
    tensors = [a, b.swapaxes(0, 1), c.swapaxes(1, 2)]
    assert {tuple(t.shape) for t in tensors} == {(4, 2, 16, 8)}
    layouts = [KVLayout.from_tensors([t], 4) for t in tensors]
    assert offsets(layouts[0], dense.ctypes.data) == [(0, 256)]
    assert offsets(layouts[1], halves_first.ctypes.data) == [(0, 128), (512, 128)]
    # One piece as well: what differs is the meaning of its bytes, and so the tag.
    assert offsets(layouts[2], tokens_first.ctypes.data) == [(0, 256)]
    assert len({layout.tag for layout in layouts}) == 3
    again = KVLayout.from_tensors([to_array(kind, fill((2, 4, 16, 8))).swapaxes(0, 1)], 4)
    assert again.tag == layouts[1].tag
    # Cut to one half, the order shows in the regions too.
    cut = [KVLayout.from_tensors([t[:, :1]], 4) for t in tensors]
    assert [len(layout.regions) for layout in cut] == [1, 1, 16]


# B55 · xpu-kernels#445, vllm#52109, aiter#4427, vllm#50427: offsets that do not fit 32 bits.
@pytest.mark.parametrize(
    ("stride", "block", "offset"),
    [
        (1_039_680, 2065, 2_146_939_200),
        (1_039_680, 2066, 2_147_978_880),
        (1_002_240, 2142, 2_146_798_080),
        (1_002_240, 2143, 2_147_800_320),
        (1_435_968, 4564, 6_553_757_952),
        (16 * 2 * 8 * 128, 65_535, 2_147_450_880),
        (16 * 2 * 8 * 128, 65_536, 2_147_483_648),
    ],
)
def test_b55_offsets_are_64_bit(stride, block, offset):
    num_blocks = 65_537
    layout = KVLayout.from_regions(
        [(BASE, stride, stride)], num_blocks, [(BASE, stride * num_blocks)]
    )
    assert layout.addresses([0, block]) == ([[BASE], [BASE + offset]], [[stride], [stride]])


def test_b55_absolute_values():
    layout = KVLayout.from_regions([(BASE, 1_039_680, 1_039_680)], 2067, [(BASE, 2067 * 1_039_680)])
    assert layout.addresses([2066])[0] == [[139_640_124_706_432]]
    for bad in (-1, 2067, -(2**63), 2**64):
        with pytest.raises(BlockIdError, match=f"got {bad} at index 0 and 2067"):
            layout.addresses([bad])


def test_b55_addresses_are_unsigned():
    base = 2**63 - 4096
    layout = KVLayout.from_regions([(base, 4096, 4096)], 2, [(base, 8192)])
    assert layout.addresses([0, 1])[0] == [[9_223_372_036_854_771_712], [9_223_372_036_854_775_808]]
    top = 2**64 - 8192
    with pytest.raises(LayoutError, match="must end within 64 bit addresses"):
        KVLayout.from_regions([(top, 4096, 4096)], 3, [(top, 8192)])


# B58: zero lengths and shapes that do not match are refused by the store with -600.
def test_b58_no_zero_sizes_no_empty_rows():
    with pytest.raises(LayoutError, match="sizes of at least 1, got 0 at index 1"):
        KVLayout.from_regions([(BASE, 8, 8), (BASE + 64, 0, 8)], 4, [(BASE, 256)])
    with pytest.raises(LayoutError, match="at least one region, got none"):
        KVLayout.from_regions([], 4, [(BASE, 256)])
    with pytest.raises(LayoutError, match="tensor that is not empty"):
        KVLayout.from_tensors([np.zeros((4, 0))], 4)


def test_b58_rows_match():
    layout = KVLayout.from_tensors([fill((2, 8, 64)), fill((2, 8, 4))], 8, block_dim=1)
    addresses, sizes = layout.addresses([1, 1, 7])
    assert [len(row) for row in addresses] == [len(row) for row in sizes] == [4, 4, 4]
    assert sizes[0] == [64, 64, 4, 4]
    assert layout.addresses([]) == ([], [])
