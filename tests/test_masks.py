"""Store, lookup and load masks: the core against the reference rules."""

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceCoordinator, ceil_div

from kvmask import Bitset, Coordinator, FullAttention, Mamba, SlidingWindow


def plain(masks):
    return tuple(None if m is None else list(m) for m in masks)


def same(masks, expected):
    """Equal, of the right type, and clean past the end."""
    assert plain(masks) == expected
    for mask in masks:
        if mask is not None:
            assert type(mask) is Bitset
            strategies.check_bitset(mask)


@given(st.data())
def test_store_masks(data):
    config = data.draw(strategies.configs())
    core, reference = Coordinator(*config.args), ReferenceCoordinator(*config.args)
    num_tokens = data.draw(strategies.token_counts(config, aligned=True))
    start = data.draw(st.one_of(st.just(0), st.integers(0, num_tokens + config.common)))
    prompt = data.draw(
        st.one_of(
            st.none(),
            st.integers(1, num_tokens + 2 * config.common),
            strategies.token_counts(config).map(lambda n: max(1, n)),
        )
    )
    for states in (False, True):
        same(
            core.store_mask(num_tokens, start, prompt, states=states),
            reference.store_mask(num_tokens, start, prompt, states=states),
        )


@given(st.data())
def test_lookup_masks(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config, aligned=True))
    same(
        Coordinator(*config.args).lookup_mask(num_tokens),
        ReferenceCoordinator(*config.args).lookup_mask(num_tokens),
    )


@given(st.data())
def test_load_masks(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    same(
        Coordinator(*config.args).load_mask(num_tokens),
        ReferenceCoordinator(*config.args).load_mask(num_tokens),
    )


@given(st.data())
def test_a_suffix_mask_is_the_end_of_the_whole_mask(data):
    config = data.draw(strategies.configs())
    coord = Coordinator(*config.args)
    num_tokens = data.draw(strategies.token_counts(config, aligned=True))
    start = data.draw(st.integers(0, num_tokens))
    prompt = data.draw(st.one_of(st.none(), st.integers(1, num_tokens + 1)))
    whole = coord.store_mask(num_tokens, 0, prompt, states=True)
    suffix = coord.store_mask(num_tokens, start, prompt, states=True)
    for group, all_blocks, last_blocks in zip(config.groups, whole, suffix, strict=True):
        if all_blocks is None:
            assert last_blocks is None
        else:
            assert last_blocks == all_blocks[ceil_div(start, group.block_size) :]


@given(st.data())
def test_masks_never_depend_on_retention_for_lookups(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config, aligned=True))
    groups, hash_block, alignment, _, partial = config.args
    dense = Coordinator(groups, hash_block, alignment, None, partial)
    assert Coordinator(*config.args).lookup_mask(num_tokens) == dense.lookup_mask(num_tokens)


@pytest.mark.parametrize("blocks", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("need", [1, 2, 3, 31, 63, 64])
@pytest.mark.parametrize("eagle", [False, True])
def test_periodic_masks_across_words(blocks, need, eagle):
    # One full block per `blocks` window blocks: the pattern's period hugs a word.
    groups = [FullAttention(blocks * 4), SlidingWindow(4, window=need * 4 + 1, eagle=eagle)]
    args = groups, 4
    num_tokens = blocks * 4 * 5
    for start in (0, 1, 4, 4 * blocks - 4, 4 * blocks, 4 * blocks + 4):
        same(
            Coordinator(*args).store_mask(num_tokens, start),
            ReferenceCoordinator(*args).store_mask(num_tokens, start),
        )


def test_state_masks_keep_one_state_per_interval_and_the_replay_boundary():
    coord = Coordinator([FullAttention(16), Mamba(16)], 16, retention_interval=64)
    mask = coord.store_mask(160, num_prompt_tokens=100, states=True)[1]
    assert mask.indices() == [3, 5, 7]
    assert coord.store_mask(160, num_prompt_tokens=100)[1] == [False] * 10
