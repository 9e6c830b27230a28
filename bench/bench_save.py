"""Saves without the store.

One bench measures the plan alone: masks, chunks and keys. The other measures a whole save, which
also makes addresses and handles the answers. The digests are a list, as in a request of vLLM.
"""

import pytest
import vllm_side
from shapes import LENGTHS, SHAPES, Always, digests

from kvmask import KVLayout, KVTransfer, SavePlan


def layouts(shape, tokens):
    out = []
    for g, blocks in enumerate(shape.blocks(tokens)):
        base = (g + 1) << 40
        size = 64 * (blocks + 1)
        out.append(KVLayout.from_regions([(base, 64, 64)], blocks + 1, storages=[(base, size)]))
    return out


def tables(shape, tokens):
    return [list(range(1, blocks + 1)) for blocks in shape.blocks(tokens)]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", SHAPES)
def bench_save_plan(pair, name, tokens):
    shape = SHAPES[name]
    bound = shape.contract().bind(layouts(shape, tokens))
    hashes = vllm_side.hash_list(digests(shape, tokens))
    ids = tables(shape, tokens)

    def ours():
        return SavePlan(bound, hashes, ids, tokens, num_prompt_tokens=tokens)

    expected = shape.keys(digests(shape, tokens), tokens)
    assert ours().keys == expected
    theirs = None
    if vllm_side.available():
        call = vllm_side.plan_save(shape)

        def theirs():
            return call(tokens, hashes)

        assert theirs() == expected
    target = 25 if (name, tokens) == ("dsv4", 131_072) else None
    pair(f"save plan, {name}, {tokens:,} tokens", ours, theirs, target=target, keys=len(expected))


@pytest.mark.parametrize("present", [0, 1], ids=["all missing", "all present"])
@pytest.mark.parametrize("name", SHAPES)
def bench_save(pair, name, present, tokens=131_072):
    shape = SHAPES[name]
    hashes = vllm_side.hash_list(digests(shape, tokens))
    ids = tables(shape, tokens)
    keys = len(shape.keys(digests(shape, tokens), tokens))
    contract = shape.contract()
    kv = KVTransfer(Always(present), contract.bind(layouts(shape, tokens)))

    def ours():
        return kv.save(contract.request(hashes=hashes, num_tokens=tokens), ids, tokens)

    result = ours()
    assert (result.stored, result.present) == ((0, keys) if present else (keys, 0))
    assert result.mark == tokens
    theirs = None
    if vllm_side.available():
        store = Always(present)
        call = vllm_side.save(shape, store)

        def theirs():
            return call(tokens, hashes, ids)

        theirs()
        assert store.asked == keys
    what = "present" if present else "missing"
    pair(f"whole save, {name}, {tokens:,} tokens, all {what}", ours, theirs, keys=keys)
