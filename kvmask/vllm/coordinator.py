"""The store coordinator's masks and hit search on bitsets.

The functions here take the place of methods of vLLM's MooncakeStoreCoordinator. Each leaves to
stock what the core has no rule for; `stock(...)` is the method that was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask._core import Bitset, present_bits
from kvmask.vllm.acting import guarded
from kvmask.vllm.releases import ExternalCachedBlockPool, StockCoordinator, current
from kvmask.vllm.rules import Rules, digests_of, is_plain, rules_of
from kvmask.vllm.seams import stock

Masks = tuple[Bitset | None, ...]


def _mask_rules(coord: Any) -> Rules | None:
    """Rules that also cover masks: stock has its own for groups that are not cacheable."""
    rules = rules_of(coord)
    return rules if rules is not None and rules.all_cacheable else None


@guarded("coordinator.store_mask")
def store_mask(
    self: Any,
    aligned_token_len: int,
    start_token: int = 0,
    num_prompt_tokens: int | None = None,
) -> Masks:
    """Per group, the blocks from ``start_token`` on that a later hit can use; None means all.

    Raises:
        AlignmentError: ``aligned_token_len`` is no multiple of the hit alignment.
    """
    rules = _mask_rules(self)
    prompt = num_prompt_tokens
    if rules is None or (prompt is not None and not current().boundaries(rules.eagle, prompt)):
        return stock("coordinator.store_mask")(
            self, aligned_token_len, start_token, num_prompt_tokens
        )
    return rules.core.reach_masks(
        aligned_token_len,
        max(0, start_token),
        prompt,
        dense=False,
        states=current().stores_states,
    )


@guarded("coordinator.lookup_mask")
def lookup_mask(self: Any, aligned_token_len: int) -> Masks:
    """Per group, the blocks that can decide a hit; None means all.

    Raises:
        AlignmentError: ``aligned_token_len`` is no multiple of the hit alignment.
    """
    rules = _mask_rules(self)
    if rules is None:
        return stock("coordinator.lookup_mask")(self, aligned_token_len)
    return rules.core.reach_masks(aligned_token_len, 0, None, dense=True, states=True)


@guarded("coordinator.load_mask")
def load_mask(self: Any, block_hashes: Sequence[bytes], token_len: int) -> tuple[Bitset, ...]:
    """Per group, the blocks that a hit of ``token_len`` fills."""
    rules = rules_of(self)
    if rules is None or token_len < 0 or len(block_hashes) * rules.hash_block_size < token_len:
        return stock("coordinator.load_mask")(self, block_hashes, token_len)
    return rules.core.load_masks(token_len)


@guarded("coordinator.find_longest_cache_hit")
def find_longest_cache_hit(
    self: Any,
    block_hashes: Sequence[bytes],
    max_length: int,
    cached_block_pool: Any,
    *,
    apply_eagle: bool = True,
) -> tuple[tuple[Bitset, ...], int]:
    """Load masks per group and the length of the longest hit of at most ``max_length``."""
    rules = rules_of(self)
    known = type(cached_block_pool) is ExternalCachedBlockPool and is_plain(block_hashes)
    if rules is None or max_length < 0 or not known:
        return stock("coordinator.find_longest_cache_hit")(
            self, block_hashes, max_length, cached_block_pool, apply_eagle=apply_eagle
        )
    exists = cached_block_pool._exists
    digests = digests_of(block_hashes)
    # Where EAGLE may look past the limit, one more block of every group is enough.
    present = [
        present_bits(digests, exists, group, scale, current().reach(max_length, size) // length)
        if cacheable
        else Bitset.zeros(0)
        for group, (scale, length, size, cacheable) in enumerate(
            zip(rules.scales, rules.lengths, rules.block_sizes, rules.cacheable, strict=True)
        )
    ]
    hit, masks, _ = rules.core.find_hit(present, max_length, eagle=apply_eagle)
    return masks, hit


class MooncakeStoreCoordinator(StockCoordinator):  # type: ignore[misc]
    """vLLM's coordinator with its masks and hit search on bitsets.

    Same arguments and results as vLLM's; masks are Bitsets (sequences of bool) or None.
    """

    kvmask_own = True
    store_mask = store_mask
    lookup_mask = lookup_mask
    load_mask = load_mask
    find_longest_cache_hit = find_longest_cache_hit
