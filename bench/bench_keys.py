"""Keys of the blocks that a mask selects, from digests in one buffer."""

import pytest
import vllm_side
from shapes import DIGEST_BYTES, LENGTHS, SHAPES, block_hashes, digests


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", SHAPES)
def bench_keys(pair, name, tokens):
    shape = SHAPES[name]
    buffer = digests(shape, tokens)
    masks = shape.coordinator().store_mask(tokens)
    schemas = shape.schemas()
    scales = [g.block_size // shape.hash_block for g in shape.groups]
    hashes = block_hashes(buffer)

    def ours():
        return [s.keys(hashes, m, scale=k) for s, m, k in zip(schemas, masks, scales, strict=True)]

    expected = shape.keys(buffer, tokens)
    assert [key for row in ours() for key in row] == expected
    theirs = None
    if vllm_side.available():
        data = vllm_side.engine().data
        view = data.BlobBlockHashes(memoryview(buffer), DIGEST_BYTES)
        prefixes = [data.PoolKey.build_prefix(db.metadata) for db in vllm_side.databases(shape)]
        build = data.PoolKey.build_key_string
        flags = shape.masks(tokens)

        def theirs():
            """Make the keys as the worker's lookup does, group by group."""
            keys = []
            for group, prefix, mask in zip(shape.groups, prefixes, flags, strict=True):
                chunks = data.chunk_hashes_for_block_size(view, shape.hash_block, group.block_size)
                for i in range(len(chunks)):
                    if mask is None or mask[i]:
                        keys.append(build(prefix, chunks[i].hex()))
            return keys

        assert theirs() == expected
    pair(f"keys, {name}, {tokens:,} tokens", ours, theirs, keys=len(expected))
