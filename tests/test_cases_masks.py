"""Real failures from public trackers: masks and hits. The name of each test is its case.

In every case the wrong behaviour was reported against some system that does this job; the values
here are the right ones. Block `i` of a group ends at token `(i + 1) * block_size`.
"""

import pytest
from rig import ask, scheme_of

from kvmask import (
    Bitset,
    BlockHashes,
    ChunkedLocal,
    Coordinator,
    FullAttention,
    LookupPlan,
    Mamba,
    SlidingWindow,
    VllmKeys,
)
from kvmask.errors import AlignmentError


def ends(n, size, tokens):
    """Presence of n entries of `size` tokens, given the token ends that are stored."""
    return Bitset.from_indices(n, [t // size - 1 for t in tokens])


def bits(text):
    """The positions that '2-3,6' names."""
    out = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        out += range(int(low), int(high or low) + 1)
    return out


def lookup(coord, present, num_tokens, strategy="exact"):
    """The hit of a whole lookup, against a store that holds `present`."""
    unit = coord.hash_block_size
    digests = [i.to_bytes(4, "big") for i in range(num_tokens // unit)]
    schemas = [VllmKeys(model="m", group_id=g) for g in range(len(coord.groups))]
    stored = set()
    for schema, group, units in zip(schemas, coord.groups, present, strict=True):
        scale = 1 if coord.partial_hits else group.block_size // unit
        named = digests[scale - 1 :: scale]
        stored.update(schema.key(d) for d, there in zip(named, units, strict=False) if there)
    plan = LookupPlan(
        scheme_of(coord, schemas=schemas),
        BlockHashes.from_list(digests),
        num_tokens,
        strategy=strategy,
    )
    ask(plan, stored)
    return plan.result


def test_b01_a_drafter_block_is_dropped_once():
    # vllm#43516: the mask at the hit was cut again, and one block was claimed and never loaded.
    coord = Coordinator([FullAttention(16, eagle=True)], 16)
    hit = coord.find_hit([Bitset.ones(4)], 64)
    assert hit.length == 48
    assert coord.load_mask(48) == ([True, True, True],)
    assert hit.masks == ([True, True, True],)


@pytest.mark.parametrize("num_tokens", [64, 65])
def test_b04_a_joint_boundary_that_no_object_carries(num_tokens):
    # vllm#50359: the full-attention key at 48 does not exist; the object that ends at 64 does.
    coord = Coordinator([FullAttention(32), Mamba(32)], 16, partial_hits=True)
    hit = coord.find_hit([ends(4, 16, [32, 64]), ends(4, 16, [32, 48])], num_tokens)
    assert (hit.length, hit.tail_tokens) == (48, (64, 48))
    assert [m.tolist() for m in hit.masks] == [[True, True], [False, True]]
    hit = coord.find_hit([ends(4, 16, [32]), ends(4, 16, [32, 48])], num_tokens)
    assert (hit.length, hit.tail_tokens) == (32, (32, 32))


@pytest.mark.parametrize("strategy", ["exact", "staged"])
@pytest.mark.parametrize(
    ("eagle", "num_tokens", "length"),
    [
        (False, 16, 0),
        (False, 17, 16),
        (False, 48, 32),
        (False, 64, 48),
        (False, 65, 64),
        (True, 16, 0),
        (True, 17, 0),
        (True, 48, 32),
        (True, 64, 48),
        (True, 65, 48),
    ],
)
def test_b06_a_full_hit_leaves_the_last_token(strategy, eagle, num_tokens, length):
    # vllm#43494: N - 1 tokens were reported, below a block, and their tail was never loaded.
    coord = Coordinator([FullAttention(16, eagle=eagle)], 16)
    assert lookup(coord, [Bitset.ones(num_tokens // 16)], num_tokens, strategy).length == length


def test_b07_the_store_mask_holds_the_drafters_block():
    # vllm#44082: stored without the block past the boundary, looked up with it.
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    drafted = [FullAttention(64), SlidingWindow(16, window=32, eagle=True)]
    plain, eagle = Coordinator(groups, 16), Coordinator(drafted, 16)
    plain_mask, eagle_mask = plain.store_mask(256)[1], eagle.store_mask(256)[1]
    assert plain_mask.indices() == bits("2-3,6-7,10-11,14-15")
    assert eagle_mask.indices() == bits("2-4,6-8,10-12,14-15")
    full = Bitset.ones(4)
    assert plain.find_hit([full, plain_mask], 256).length == 256
    assert eagle.find_hit([full, eagle_mask], 256).length == 192
    assert eagle.find_hit([full, plain_mask], 256).length == 0


def test_b09_a_state_gets_no_drafter_margin():
    # vllm#43559: the state of 64 tokens was resumed beside attention of 48.
    coord = Coordinator([FullAttention(16, eagle=True), Mamba(16)], 16)
    hit = coord.find_hit([Bitset.ones(4), Bitset.ones(4)], 64)
    assert hit.length == 48
    assert [m.indices() for m in hit.masks] == [[0, 1, 2], [2]]
    assert coord.find_hit([Bitset.ones(4), ends(4, 16, [64])], 64).length == 0
    assert coord.find_hit([Bitset.ones(4), ends(4, 16, [48])], 64).length == 48


@pytest.mark.parametrize(
    ("retention", "of_500", "of_512"),
    [
        (
            None,
            "2-3,6-7,10-11,14-15,18-19,22-23,26-27",
            "2-3,6-7,10-11,14-15,18-19,22-23,26-27,30-31",
        ),
        (0, "26-27", "26-27"),
        (128, "6-7,14-15,22-23,26-27", "6-7,14-15,22-23,26-27,30-31"),
        (256, "14-15,26-27", "14-15,26-27,30-31"),
    ],
)
def test_b12_retention_shapes_the_store_mask(retention, of_500, of_512):
    # vllm#44774, #46906
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    coord = Coordinator(groups, 16, retention_interval=retention)
    for num_tokens, prompt, expected in ((448, 500, of_500), (512, 512, of_512)):
        full, window = coord.store_mask(num_tokens, num_prompt_tokens=prompt)
        assert full is None
        assert window.indices() == bits(expected)
        for start in (0, 1, 16, 17, 63, 64, 200, num_tokens):
            suffix = coord.store_mask(num_tokens, start, prompt)[1]
            assert suffix == window[-(-start // 16) :]
        # What is asked for does not depend on what is kept.
        dense = Coordinator(groups, 16).lookup_mask(num_tokens)
        assert coord.lookup_mask(num_tokens) == dense


def test_b12_a_growing_prompt_keeps_only_its_replay_boundary():
    groups = [FullAttention(64), SlidingWindow(16, window=32)]
    coord = Coordinator(groups, 16, retention_interval=0)
    masks = [coord.store_mask(n, num_prompt_tokens=500)[1].indices() for n in (128, 256, 448)]
    assert masks == [[], [], [26, 27]]


def test_b14_the_drafters_block_is_part_of_the_window_search():
    # vllm#17398: dropping a block after the search left a window of one block where two are needed.
    def find(present, eagle):
        group = SlidingWindow(2, window=4, eagle=eagle)
        return Coordinator([group], 2).find_hit([Bitset.from_indices(4, present)], 8)

    plain = find([2, 3], eagle=False)
    assert (plain.length, plain.masks[0].indices()) == (8, [2, 3])
    assert find([2, 3], eagle=True).length == 0
    drafted = find([1, 2, 3], eagle=True)
    assert (drafted.length, drafted.masks[0].indices()) == (6, [1, 2])
    assert find([1, 2, 3], eagle=False).length == 8


def test_b15_several_drafter_groups_drop_one_block_together():
    # vllm#33524: every pass of the search dropped one more, until nothing was left.
    groups = [
        FullAttention(16, eagle=True),
        SlidingWindow(16, window=32, eagle=True),
        SlidingWindow(16, window=64, eagle=True),
    ]
    hit = Coordinator(groups, 16).find_hit([Bitset.ones(10)] * 3, 160)
    assert hit.length == 144
    assert [m.indices() for m in hit.masks] == [bits("0-8"), bits("7-8"), bits("5-8")]
    assert Coordinator(groups[:2], 16).find_hit([Bitset.ones(10)] * 2, 160).length == 144


@pytest.mark.parametrize("window", [None, 17])
def test_b19_only_the_last_chunk_of_a_sparse_group_is_named(window):
    # vllm#51362: a block table [null, null, null, 7] had all four of its entries written.
    group = Mamba(16) if window is None else SlidingWindow(16, window=window)
    coord = Coordinator([FullAttention(64), group], 16)
    assert coord.load_mask(64)[1].indices() == [3]
    assert coord.find_hit([Bitset.ones(1), Bitset.ones(4)], 64).masks[1].indices() == [3]


def test_b22_chunked_local_attention_at_a_chunk_edge():
    # vllm#19351: a mask that is long and empty means nothing to load, not a failure.
    coord = Coordinator([FullAttention(16), ChunkedLocal(16, chunk_size=32)], 16)
    expected = {16: [0], 32: [], 48: [2], 64: [], 80: [4]}
    for num_tokens, loaded in expected.items():
        mask = coord.load_mask(num_tokens)[1]
        assert (len(mask), mask.indices()) == (num_tokens // 16, loaded)
        nothing = coord.find_hit([Bitset.ones(8), Bitset.zeros(8)], num_tokens)
        assert nothing.length == num_tokens // 32 * 32
    assert coord.store_mask(128) == (None, None)


@pytest.mark.parametrize(
    ("window", "blocks"),
    [
        (1, "7"),
        (2, "7"),
        (16, "7"),
        (17, "7"),
        (18, "6-7"),
        (32, "6-7"),
        (33, "6-7"),
        (34, "5-7"),
        (48, "5-7"),
    ],
)
def test_b23_window_edges(window, blocks):
    coord = Coordinator([SlidingWindow(16, window=window)], 16)
    assert coord.load_mask(128)[0].indices() == bits(blocks)


def test_b24_a_hole_moves_the_window_it_does_not_cut_it():
    # A shorter hit by one group has to be checked again by the others.
    coord = Coordinator([FullAttention(16), SlidingWindow(16, window=32)], 16)
    window = Bitset.from_indices(8, [0, 1, 2, 6, 7])
    hit = coord.find_hit([Bitset.ones(8), window], 128)
    assert (hit.length, hit.masks[1].indices()) == (128, [6, 7])
    hit = coord.find_hit([Bitset.from_indices(8, [0, 1, 2, 4, 5, 6, 7]), window], 128)
    assert (hit.length, hit.masks[1].indices()) == (48, [1, 2])


@pytest.mark.parametrize(
    ("sizes", "ring", "hash_block"), [([8704], 4, 8704), ([2304], 4, 2304), ([8960], 4, 8960)]
)
def test_b45_a_scratch_ring_keeps_its_index_and_takes_no_part(sizes, ring, hash_block):
    # dynamo#1233, vllm#53906: start-up failed over the ring, or its block was used for hits.
    groups = [
        FullAttention(ring, prefix_cacheable=False),
        *(FullAttention(size) for size in sizes),
        SlidingWindow(ring, window=ring, prefix_cacheable=False),
    ]
    coord = Coordinator(groups, hash_block)
    size = sizes[0]
    assert coord.alignment == size
    hit = coord.find_hit([Bitset.ones(9), Bitset.ones(2), Bitset.zeros(0)], 2 * size)
    assert (hit.length, hit.tail_tokens) == (2 * size, (0, 2 * size, 0))
    assert [len(m) for m in hit.masks] == [0, 2, 0]
    store = coord.store_mask(size)
    assert store[1] is None
    assert store[0].count() == store[2].count() == 0
    assert len(store[0]) == size // ring


@pytest.mark.parametrize(("size", "hash_block"), [(24, 16), (4, 8704)])
def test_b45_sizes_that_do_not_fit_are_refused(size, hash_block):
    with pytest.raises(AlignmentError) as caught:
        Coordinator([FullAttention(hash_block), SlidingWindow(size, window=4)], hash_block)
    assert str(caught.value) == (
        f"`block_size` must be a multiple of `hash_block_size`, got {size} and {hash_block}"
    )
