"""One check of integers: NumPy's are integers everywhere, other types a TypeError everywhere."""

import pytest

from kvmask import (
    Bitset,
    BlockHasher,
    BlockHashes,
    ChunkedLocal,
    Coordinator,
    FullAttention,
    HitHints,
    KVLayout,
    Mamba,
    SlidingWindow,
    StrictKeys,
    VllmKeys,
    hash_tokens,
    mooncake,
)
from kvmask._core import Regions, check_integer
from kvmask.errors import ArgumentError, LayoutError
from kvmask.hashing.extra_keys import block_extra_keys
from kvmask.keys import (
    AscendKeys,
    LMCacheKeys,
    LMCacheObjectKeys,
    SglangKeys,
    lmcache_chunk_hashes,
    sglang_page_hashes,
    store_namespace,
)

COORD = Coordinator([FullAttention(4), SlidingWindow(4, window=4)], 4)
HASHES = BlockHashes(bytes(range(64)), 16)
SMALL = 4

# A call with one integer, good with SMALL. What it returns is compared.
CALLS = {
    "FullAttention block_size": FullAttention,
    "SlidingWindow block_size": lambda v: SlidingWindow(v, window=4),
    "SlidingWindow window": lambda v: SlidingWindow(4, window=v),
    "SlidingWindow extra_retained_tokens": lambda v: SlidingWindow(
        4, window=4, extra_retained_tokens=v
    ),
    "ChunkedLocal block_size": lambda v: ChunkedLocal(v, chunk_size=4),
    "ChunkedLocal chunk_size": lambda v: ChunkedLocal(4, chunk_size=v),
    "Mamba block_size": Mamba,
    "Coordinator hash_block_size": lambda v: repr(Coordinator([FullAttention(4)], v)),
    "Coordinator alignment": lambda v: repr(Coordinator([FullAttention(4)], 4, v)),
    "Coordinator retention_interval": lambda v: repr(
        Coordinator([FullAttention(4)], 4, retention_interval=v)
    ),
    "store_mask num_tokens": COORD.store_mask,
    "store_mask start_token": lambda v: COORD.store_mask(8, v),
    "store_mask num_prompt_tokens": lambda v: COORD.store_mask(8, 0, v),
    "load_mask num_tokens": COORD.load_mask,
    "find_hit max_length": lambda v: COORD.find_hit([[True]] * 2, v),
    "BlockHashes digest_size": lambda v: BlockHashes(bytes(64), v),
    "hash_tokens block_size": lambda v: hash_tokens(range(8), v),
    "BlockHasher block_size": lambda v: BlockHasher(v).origin,
    "sglang_page_hashes page_size": lambda v: sglang_page_hashes(range(8), v),
    "lmcache_chunk_hashes chunk_size": lambda v: lmcache_chunk_hashes(range(8), v, seed="0"),
    "block_extra_keys num_blocks": block_extra_keys,
    "block_extra_keys block_size": lambda v: block_extra_keys(2, v),
    "block_extra_keys first_block": lambda v: block_extra_keys(2, 4, first_block=v),
    "keys start": lambda v: VllmKeys("m").keys(HASHES, None, v),
    "keys scale": lambda v: VllmKeys("m").keys(HASHES, None, 0, v),
    "VllmKeys tp_rank": lambda v: VllmKeys("m", tp_rank=v).prefix,
    "VllmKeys group_id": lambda v: VllmKeys("m", group_id=v).prefix,
    "StrictKeys pp_rank": lambda v: StrictKeys("m", pp_rank=v).prefix,
    "AscendKeys pp_rank": lambda v: AscendKeys("m", pp_rank=v).prefix,
    "SglangKeys tp_rank": lambda v: SglangKeys("m", tp_rank=v).suffix,
    "SglangKeys pp_size": lambda v: SglangKeys("m", pp_rank=1, pp_size=v).suffix,
    "LMCacheKeys world_size": lambda v: LMCacheKeys("m", v).prefix,
    "LMCacheKeys worker_id": lambda v: LMCacheKeys("m", 8, v).prefix,
    "LMCacheKeys layer_id": lambda v: LMCacheKeys("m", layer_id=v).suffix,
    "LMCacheObjectKeys rank": lambda v: LMCacheObjectKeys("m", 8, v).prefix,
    "LMCacheObjectKeys object_group": lambda v: LMCacheObjectKeys("m", object_group=v).prefix,
    "store_namespace pp_size": lambda v: store_namespace(v, store_tp=4),
    "store_namespace store_tp": lambda v: store_namespace(1, store_tp=v),
    "store_namespace tp_size": lambda v: store_namespace(1, tp_size=v),
    "Bitset n": Bitset.zeros,
    "Bitset indices": lambda v: Bitset.from_indices(8, [v]),
    "HitHints capacity": lambda v: HitHints(v).capacity,
    "from_regions num_blocks": lambda v: (
        KVLayout.from_regions([(4096, 64, 64)], v, [(4096, 256)]).regions
    ),
    "Regions num_blocks": lambda v: Regions([(4096, 64, 64)], v).addresses([0]),
    "Regions regions": lambda v: Regions([(4096, v, 64)], 2).addresses([0]),
    "StoreConfig local_buffer_size": lambda v: mooncake.StoreConfig(
        master_server_address="a:1", local_buffer_size=v
    ),
}
WRONG = (None, "4", 4.0, b"4", True, False, [4], object())
OPTIONAL = {"alignment", "retention_interval", "num_prompt_tokens", "group_id", "layer_id"}
OPTIONAL |= {"store_tp", "tp_size"}


class Index:
    def __index__(self):
        return SMALL


class Odd(int):
    """Equal to nothing, less than nothing, and shown as something else."""

    def __eq__(self, other):
        return False

    def __lt__(self, other):
        return False

    __hash__ = __le__ = __gt__ = __ge__ = __repr__ = __str__ = __int__ = None


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_every_kind(name):
    np = pytest.importorskip("numpy")
    expected = CALLS[name](SMALL)
    kinds = (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)
    for value in (*(kind(SMALL) for kind in kinds), np.array(SMALL), Index(), Odd(SMALL)):
        got = CALLS[name](value)
        assert got == expected, (name, type(value))
        # Nothing of the other type is kept: it would reach a text or a file.
        assert repr(got) == repr(expected), (name, type(value))


@pytest.mark.parametrize("name", CALLS)
def test_other_types_are_a_type_error(name):
    argument = name.split()[1]
    for value in WRONG:
        if value is None and argument in OPTIONAL:
            continue
        with pytest.raises(TypeError) as told:
            CALLS[name](value)
        text = str(told.value)
        assert f"`{argument}" in text, (name, value, text)
        assert text.endswith(f"must be an integer, got {type(value).__name__}"), (name, value, text)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "value",
    [-1, 1 << 63, 10**400, -(10**400), 10**6000],
    ids=["-1", "2**63", "1e400", "-1e400", "1e6000"],
)
def test_values_out_of_range(name, value):
    argument = name.split()[1]
    with pytest.raises(ArgumentError) as told:
        CALLS[name](value)
    text = str(told.value)
    assert f"`{argument}" in text, text
    assert len(text) < 200, text


def test_the_check():
    assert check_integer(3, "a") == 3
    with pytest.raises(ArgumentError, match=r"^`a` must be at least 1, got 0$"):
        check_integer(0, "a")
    with pytest.raises(ArgumentError, match=r"^`a` must be from 0 to 7, got 8$"):
        check_integer(8, "a", 0, 7)
    with pytest.raises(LayoutError, match=r"^`a` of `b` must be from 0 to 7, got -1$"):
        check_integer(-1, "`a` of `b`", 0, 7, error=LayoutError)
    for error in (ArgumentError, LayoutError):
        with pytest.raises(TypeError, match=r"^`a` must be an integer, got float$"):
            check_integer(1.0, "a", error=error)
    with pytest.raises(ArgumentError, match=r"got a negative integer of 1329 bits$"):
        check_integer(-(10**400), "a")
    with pytest.raises(ArgumentError, match=r"got an integer of 1329 bits$"):
        check_integer(10**400, "a", 0, 7)
    assert check_integer(10**70, "a") == 10**70
    assert type(check_integer(Odd(3), "a")) is int


def test_arrays_are_no_integers():
    np = pytest.importorskip("numpy")
    for value in (np.array([1, 2]), np.array(1.0), np.float64(4), np.bool_(True)):
        with pytest.raises(TypeError, match="`block_size` must be an integer, got"):
            FullAttention(value)
