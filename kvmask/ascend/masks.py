"""The coordinator's masks, computed on bitsets.

The functions here take the place of methods of AscendStoreCoordinator and give lists of bools, as
those do. What the core has no rule for is left to stock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask.ascend.releases import current, seams
from kvmask.ascend.rules import MASKED_FAMILIES, Rules, rules_of, why_stock
from kvmask.ascend.said import stays


def _rules(coord: Any, what: str, num_tokens: Any) -> Rules | None:
    """Rules of a mask of whole aligned blocks; None leaves it to stock.

    Stock says what is wrong with other lengths.
    """
    rules = rules_of(coord)
    if rules is None:
        stays(what, why_stock(coord))
        return None
    if type(num_tokens) is int and num_tokens >= 0 and num_tokens % rules.alignment == 0:
        return rules
    stays(what, "a length that is no multiple of the alignment")
    return None


def _blocks(rules: Rules, group: int, num_tokens: int) -> int:
    return num_tokens // rules.rows[group][1]


def store_mask(
    self: Any, aligned_token_len: int, num_prompt_tokens: int | None = None
) -> tuple[list[bool], ...]:
    """Per group, the blocks that a later hit can use."""
    rules = _rules(self, "store masks", aligned_token_len)
    if rules is None:
        return seams.stock("coordinator.store_mask")(self, aligned_token_len, num_prompt_tokens)
    masks = rules.store_masks(aligned_token_len, num_prompt_tokens)
    return tuple(
        []
        if not rules.rows[i][4]
        else [True] * _blocks(rules, i, aligned_token_len)
        if mask is None
        else mask.tolist()
        for i, mask in enumerate(masks)
    )


def lookup_mask(self: Any, aligned_token_len: int) -> tuple[list[bool] | None, ...]:
    """Per group, the blocks that a lookup asks for; None means all."""
    rules = _rules(self, "lookup masks", aligned_token_len)
    if rules is None:
        return seams.stock("coordinator.lookup_mask")(self, aligned_token_len)
    return tuple(
        None if mask is None or not row[4] or mask.count() == len(mask) else mask.tolist()
        for row, mask in zip(rules.rows, rules.lookup_masks(aligned_token_len), strict=True)
    )


def load_mask(
    self: Any, block_hashes: Sequence[Any], token_len: int, grouped_hash_cache: Any = None
) -> tuple[list[bool], ...]:
    """Per group, the blocks that a hit of ``token_len`` fills.

    With a cache of grouped hashes, which 0.23 fills on the way, it is stock's.
    """
    more = {} if grouped_hash_cache is None else {"grouped_hash_cache": grouped_hash_cache}
    rules = None if more else rules_of(self)
    why = ""
    if more:
        why = "a cache of grouped hashes"
    elif rules is None:
        why = why_stock(self)
    elif type(token_len) is not int or not (
        0 <= token_len <= len(block_hashes) * rules.hash_block_size
    ):
        why = "a length that its digests do not cover"
    if rules is None or why:
        stays("load masks", why)
        return seams.stock("coordinator.load_mask")(self, block_hashes, token_len, **more)
    masks = [mask.tolist() for mask in rules.core.load_masks(token_len)]
    if current().scales_families:
        # There a compressed family is loaded whole, its last block in part.
        for i, family in enumerate(self.group_cache_families):
            if family not in MASKED_FAMILIES:
                masks[i] = [True] * -(-token_len // rules.rows[i][1])
    return tuple(masks)
