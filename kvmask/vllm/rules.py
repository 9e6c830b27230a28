"""vLLM's KV cache groups as kvmask's: which coordinators the core can answer for.

A coordinator is translated from the spec groups that vLLM itself made (merged, ordered and flagged
for EAGLE), so nothing of that is decided twice. A manager is recognised by its functions, not by
its name: a subclass that keeps the hit search and the mask rule of a known kind is that kind, and
any other leaves its coordinator to stock.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvmask._core import MAX_SETS, MAX_TOKENS, BlockHashes, CoordinatorCore, same_attributes
from kvmask.errors import ArgumentError
from kvmask.vllm.binding import seen, state
from kvmask.vllm.releases import BlobBlockHashes, current

# Kind, spec class, the manager whose functions make the kind, and which functions.
_KINDS = (
    ("full", FullAttentionSpec, managers.FullAttentionManager, ()),
    (
        "window",
        SlidingWindowSpec,
        managers.SlidingWindowManager,
        ("_contiguous_blocks_for_hit",),
    ),
    ("chunked", ChunkedLocalAttentionSpec, managers.ChunkedLocalAttentionManager, ()),
    ("state", MambaSpec, managers.MambaManager, ()),
)
_RULES = ("find_longest_cache_hit", "reachable_block_mask")


class Rules:
    """The core's view of one coordinator; lookup plans take it for theirs.

    Attributes:
        core: Masks and hit search.
        kinds: Kind of every group.
        block_sizes: Tokens per block of every group.
        scales: Hash blocks per bit of every group's presence.
        cacheable: Whether a group takes part in hits.
        hash_block_size: Tokens per digest.
        alignment: The least common multiple of the block sizes.
        hit_alignment: What hits are multiples of.
        partial_hits: Hits may end inside a block.
        all_cacheable: No group is left out.
        eagle: Some group drops its last block.
    """

    __slots__ = (
        "_core",
        "alignment",
        "all_cacheable",
        "block_sizes",
        "cacheable",
        "eagle",
        "hash_block_size",
        "hit_alignment",
        "kinds",
        "lengths",
        "partial_hits",
        "scales",
        "seen",
    )

    def __init__(self, coord: Any, rows: list[tuple[Any, ...]], attributes: list[Any]) -> None:
        self.seen = attributes
        self.partial_hits = partial_hits(coord)
        self.hash_block_size: int = coord.hash_block_size
        self.alignment: int = coord.lcm_block_size
        self.hit_alignment = self.hash_block_size if self.partial_hits else self.alignment
        self._core = CoordinatorCore(
            rows,
            self.hash_block_size,
            self.alignment,
            coord.retention_interval,
            partial=self.partial_hits,
        )
        self.kinds = [row[0] for row in rows]
        self.block_sizes = [row[1] for row in rows]
        self.cacheable = [row[4] for row in rows]
        self.all_cacheable = all(self.cacheable)
        self.eagle = any(row[3] for row in rows)
        self.lengths = [self.hash_block_size if self.partial_hits else b for b in self.block_sizes]
        self.scales = [max(1, length // self.hash_block_size) for length in self.lengths]

    @property
    def core(self) -> CoordinatorCore:
        """Masks and hit search."""
        return self._core


def partial_hits(coord: Any) -> bool:
    """Whether hits of a coordinator may end inside a block."""
    return bool(getattr(coord, "enable_partial_hash_hits", False))


def unwrap(spec: Any) -> Any:
    """The spec of a group whose layers share one, wrapped or not."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _same_function(cls: type, base: type, name: str) -> bool:
    mine, theirs = getattr(cls, name, None), getattr(base, name, None)
    return getattr(mine, "__func__", mine) is getattr(theirs, "__func__", theirs)


def kind_of(spec: Any, manager: type) -> str | None:
    """The kind of a group, or None when the core has no rule for it."""
    for kind, spec_cls, base, more in _KINDS:
        if isinstance(spec, spec_cls):
            same = all(_same_function(manager, base, name) for name in (*_RULES, *more))
            fine = "supports_fine_grained_hash_lookup"
            same = same and getattr(manager, fine, False) == getattr(base, fine, False)
            return kind if same else None
    return None


def _span(kind: str, spec: Any) -> int:
    if kind == "window":
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if kind == "chunked" else 0


def _rows(coord: Any) -> list[tuple[Any, ...]] | None:
    """Group rows for CoordinatorCore, or None when one of them is not the core's to answer."""
    if len(coord.attention_groups) > MAX_SETS or not coord.attention_groups:
        return None
    unit = coord.hash_block_size if partial_hits(coord) else coord.lcm_block_size
    rows: list[tuple[Any, ...] | None] = [None] * len(coord.kv_cache_groups)
    full_sets = 0
    for k, (spec, group_ids, manager, eagle) in enumerate(coord.attention_groups):
        kind = kind_of(spec, manager)
        if kind is None or not 1 <= spec.block_size <= MAX_TOKENS:
            return None
        if kind == "window" and spec.sliding_window < 1:
            return None
        # vLLM asserts these inside its search.
        if kind == "chunked" and (eagle or spec.block_size != unit):
            return None
        if kind == "window" and unit % spec.block_size and not current().partial_windows:
            return None
        full_sets += kind == "full"
        for group_id in group_ids:
            rows[group_id] = (kind, spec.block_size, _span(kind, spec), eagle, True, k)
    for i, group in enumerate(coord.kv_cache_groups):
        if rows[i] is None:
            rows[i] = ("full", unwrap(group.kv_cache_spec).block_size, 0, False, False, -1)
    done = [row for row in rows if row is not None]
    return done if current().covers(coord, full_sets) else None


# What the rules rest on. Releases differ in what they have of it.
_RESTS_ON = (
    "attention_groups",
    "kv_cache_groups",
    "hash_block_size",
    "lcm_block_size",
    "retention_interval",
    "enable_partial_hash_hits",
)


def rules_of(coord: Any) -> Rules | None:
    """The core's rules for a coordinator; None leaves it to stock.

    They are kept on the coordinator and made anew when what they rest on is replaced.
    """
    kept = state(coord).get("rules")
    if kept is not None and same_attributes(kept[0]):
        rules: Rules | None = kept[1]
        return rules
    attributes = seen(coord, *_RESTS_ON)
    try:
        rows = _rows(coord)
        rules = None if rows is None else Rules(coord, rows, attributes)
    except (ArgumentError, TypeError):
        rules = None
    state(coord)["rules"] = (attributes, rules)
    return rules


def is_plain(block_hashes: Any) -> bool:
    """Whether block hashes come in a form that is read in place, without touching each of them."""
    kind = type(block_hashes)
    return kind is list or kind is BlobBlockHashes or isinstance(block_hashes, (list, BlockHashes))


def digests_of(block_hashes: Any) -> BlockHashes:
    """Block hashes as the core takes them, without copying vLLM's two forms."""
    if type(block_hashes) is BlobBlockHashes:
        size = block_hashes._hash_len
        return BlockHashes(block_hashes._blob[: len(block_hashes) * size], size)
    if isinstance(block_hashes, BlockHashes):
        return block_hashes
    return BlockHashes.from_list(block_hashes)
