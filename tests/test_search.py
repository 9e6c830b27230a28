"""The hit search: the core against the reference, and what every hit must obey."""

import random

import strategies
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceCoordinator, ceil_div

from kvmask import Bitset, Coordinator, FullAttention, Mamba, SlidingWindow


def searched(coord, present, max_length):
    """Length, masks as lists and tails of either coordinator."""
    found = coord.find_hit(present, max_length)
    if isinstance(found, tuple):
        return found
    for mask in found.masks:
        strategies.check_bitset(mask)
    return found.length, tuple(list(m) for m in found.masks), found.tail_tokens


@given(st.data())
def test_hits(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    present = data.draw(strategies.presence(config, num_tokens))
    max_length = data.draw(
        st.sampled_from((num_tokens, num_tokens, num_tokens + config.common, num_tokens // 2))
    )
    core, reference = Coordinator(*config.args), ReferenceCoordinator(*config.args)
    bitsets = [Bitset.from_bools(units) for units in present]
    assert searched(core, bitsets, max_length) == searched(reference, present, max_length)


@given(st.data())
def test_what_every_hit_obeys(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    present = data.draw(strategies.presence(config, num_tokens))
    hit = Coordinator(*config.args).find_hit(present, num_tokens)
    assert 0 <= hit.length <= num_tokens
    assert hit.length % config.unit == 0
    for group, mask, tail, units in zip(
        config.groups, hit.masks, hit.tail_tokens, present, strict=True
    ):
        if not group.prefix_cacheable or hit.length == 0:
            assert tail == 0
            continue
        assert hit.length <= tail <= ceil_div(hit.length, group.block_size) * group.block_size
        assert len(mask) == ceil_div(hit.length, group.block_size)
        if isinstance(group, FullAttention):
            assert mask.count() == len(mask)
        if isinstance(group, Mamba):
            assert mask.indices() == [len(mask) - 1]
        # Every block that the hit says to load is there, under the name that it says.
        entry = config.entry(group)
        for i in mask.indices():
            last = (i + 1) * group.block_size if i < len(mask) - 1 else tail
            if not config.partial_hits:
                last = (i + 1) * group.block_size
            assert units[last // entry - 1]


@given(
    st.lists(st.tuples(st.integers(1, 80), st.booleans()), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 130),
)
def test_a_drafter_costs_one_block_however_many_groups_it_touches(windows, full_eagle, blocks):
    # With one block size. Where sizes differ, a window that reaches back to
    # the start of the request can lose one aligned unit more, as it does in vLLM.
    groups = [SlidingWindow(16, window=w, eagle=e) for w, e in windows]
    coord = Coordinator([FullAttention(16, eagle=full_eagle), *groups], 16)
    hit = coord.find_hit([Bitset.ones(blocks)] * len(coord.groups), blocks * 16)
    assert hit.length >= (blocks - 1) * 16


@given(st.data())
def test_the_hit_masks_are_load_masks_where_nothing_ends_inside_a_block(data):
    config = data.draw(strategies.configs())
    num_tokens = data.draw(strategies.token_counts(config))
    present = data.draw(strategies.presence(config, num_tokens))
    coord = Coordinator(*config.args)
    hit = coord.find_hit(present, num_tokens)
    load = coord.load_mask(hit.length)
    for found, mask in zip(hit.masks, load, strict=True):
        assert len(found) == len(mask)


@given(st.data())
def test_more_in_the_store_never_shortens_the_hit_of_one_kind(data):
    """Not a law for mixed kinds under EAGLE; it is one for a single set without."""
    size = data.draw(st.sampled_from((1, 4)))
    group = data.draw(
        st.sampled_from(
            (FullAttention(size), Mamba(size), SlidingWindow(size, window=3 * size + 1))
        )
    )
    few = data.draw(strategies.bool_lists)
    more = [a or b for a, b in zip(few, data.draw(strategies.bools(len(few))), strict=True)]
    coord = Coordinator([group], size)
    length = len(few) * size
    assert coord.find_hit([few], length).length <= coord.find_hit([more], length).length


def test_a_window_run_across_several_words():
    # The right-most run of 130 blocks, between runs that are one too short.
    need, size = 130, 4
    coord = Coordinator([SlidingWindow(size, window=need * size + 1)], size)
    units = [False] + [True] * need + [False] + [True] * (need - 1) + [False] * 7
    hit = coord.find_hit([units], len(units) * size)
    assert hit.length == (need + 1) * size
    assert hit.masks[0].indices() == list(range(1, need + 1))


def test_random_holes_against_every_aligned_length():
    """Two plain groups without EAGLE: the hit is the longest length that both can serve."""
    rng = random.Random(7)
    full, window = FullAttention(16), SlidingWindow(16, window=32)
    coord = Coordinator([full, window], 16)
    for _ in range(500):
        n = rng.choice((1, 8, 63, 64, 65))
        present = [[rng.random() < d for _ in range(n)] for d in (0.98, 0.7)]
        best = max(
            (
                k * 16
                for k in range(1, n + 1)
                if all(present[0][:k]) and all(present[1][max(0, k - 2) : k])
            ),
            default=0,
        )
        assert coord.find_hit(present, n * 16).length == best


def test_retained_tokens_count_as_window_when_specs_are_compared():
    # One set of two groups: the flag of one drops a block of both, and only once.
    groups = [SlidingWindow(16, window=32), SlidingWindow(16, window=31, extra_retained_tokens=1)]
    groups.append(SlidingWindow(16, window=31, extra_retained_tokens=1, eagle=True))
    for coord in (Coordinator(groups, 16), ReferenceCoordinator(groups, 16)):
        assert searched(coord, [[True] * 6] * 3, 96)[0] == 80
    first_missing = [[False] + [True] * 5, [True] * 6, [True] * 6]
    for coord in (Coordinator(groups, 16), ReferenceCoordinator(groups, 16)):
        assert searched(coord, first_missing, 32)[0] == 0
