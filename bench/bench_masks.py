"""Store masks: the blocks of a prefix that a later request can use."""

import pytest
import vllm_side
from reference import ReferenceCoordinator
from shapes import LENGTHS, SHAPES


def as_lists(masks):
    return [None if mask is None else list(mask) for mask in masks]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", SHAPES)
def bench_store_mask(pair, name, tokens):
    shape = SHAPES[name]
    coord = shape.coordinator()
    expected = shape.masks(tokens)
    if tokens == LENGTHS[0]:  # the reference states the rule block by block: slow
        slow = ReferenceCoordinator(shape.groups, shape.hash_block, shape.alignment)
        assert as_lists(slow.store_mask(tokens)) == expected
    assert as_lists(coord.store_mask(tokens)) == expected
    theirs = None
    if vllm_side.available():
        engine = vllm_side.coordinator(shape)
        assert as_lists(engine.store_mask(tokens)) == expected

        def theirs():
            return engine.store_mask(tokens)

    # If every mask is None, there is nothing to measure.
    target = 500 if tokens == LENGTHS[-1] and any(expected) else None
    pair(
        f"store_mask, {name}, {tokens:,} tokens",
        lambda: coord.store_mask(tokens),
        theirs,
        target=target,
    )
