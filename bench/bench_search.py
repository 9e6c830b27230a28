"""The hit search alone. The answers are given."""

import pytest
import vllm_side
from reference import ReferenceCoordinator
from shapes import DIGEST_BYTES, LENGTHS, SHAPES, digests, holes

from kvmask import Bitset

PRESENCE = {
    "all present": lambda shape, n: [[True] * blocks for blocks in shape.blocks(n)],
    "holes": holes,
    "empty": lambda shape, n: [[False] * blocks for blocks in shape.blocks(n)],
}


@pytest.mark.parametrize("presence", PRESENCE)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", SHAPES)
def bench_search(pair, name, tokens, presence):
    shape = SHAPES[name]
    present = PRESENCE[presence](shape, tokens)
    coord = shape.coordinator()
    slow = ReferenceCoordinator(shape.groups, shape.hash_block, shape.alignment)
    length, masks, _ = slow.find_hit(present, tokens)
    bits = [Bitset.from_bools(row) for row in present]
    found = coord.find_hit(bits, tokens)
    assert (found.length, found.masks) == (length, masks)
    theirs = None
    if vllm_side.available():
        e = vllm_side.engine()
        buffer = digests(shape, tokens)
        view = e.data.BlobBlockHashes(memoryview(buffer), DIGEST_BYTES)
        per_block = [g.block_size // shape.hash_block for g in shape.groups]
        exists = {
            (g, bytes(view[(i + 1) * per_block[g] - 1]))
            for g, row in enumerate(present)
            for i, there in enumerate(row)
            if there
        }
        pool = e.coordinator.ExternalCachedBlockPool(shape.hash_block, exists)
        engine = vllm_side.coordinator(shape)

        def theirs():
            return engine.find_longest_cache_hit(view, tokens, pool)

        flags, hit = theirs()
        assert (hit, list(flags)) == (length, list(masks))
    pair(
        f"find_hit, {name}, {tokens:,} tokens, {presence}",
        lambda: coord.find_hit(bits, tokens),
        theirs,
    )
