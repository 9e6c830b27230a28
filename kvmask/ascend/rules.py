"""AscendStore's cache groups as kvmask's: which coordinators the core can answer for.

A coordinator is translated from the spec groups that AscendStore itself made, so nothing of that is
decided twice. Its hits ignore the drafter and its masks do not, so there are two cores.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvmask._core import MAX_SETS, MAX_TOKENS, Bitset, CoordinatorCore
from kvmask.ascend.releases import current
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError

_SPECS = {"full": FullAttentionSpec, "window": SlidingWindowSpec, "state": MambaSpec}
# Families whose masks AscendStore takes from the cache manager; of all others it keeps every block.
MASKED_FAMILIES = (None, "default", "c1")

Row = tuple[str, int, int, bool, bool, int]
Mask = Bitset | None


class Rules:
    """What plans ask of a coordinator, and AscendStore's masks.

    Args:
        rows: Per group (kind, block size, span, drafter, cacheable, set).
        hash_block_size: Tokens per digest.
        alignment: Tokens that hits are multiples of.
        retention: Tokens, 0 or None.
        masked: Per group whether a mask may leave blocks out.
    """

    partial_hits = False

    def __init__(
        self,
        rows: list[Row],
        hash_block_size: int,
        alignment: int,
        retention: int | None = None,
        masked: list[bool] | None = None,
    ) -> None:
        self.rows = rows
        self.hash_block_size = hash_block_size
        self.alignment = self.hit_alignment = alignment
        self.retention = retention
        self.masked = [True] * len(rows) if masked is None else masked
        self.eagle = any(row[3] for row in rows)
        plain = [(kind, size, span, False, *rest) for kind, size, span, _, *rest in rows]
        self._core = self._make(plain, retention)
        self._masks = self._make(rows, retention)
        # One segment per aligned boundary: the tails of all of them.
        self._tails = self._masks if retention is None else self._make(rows, alignment)

    def _make(self, rows: list[Any], retention: int | None) -> CoordinatorCore:
        return CoordinatorCore(rows, self.hash_block_size, self.alignment, retention, partial=False)

    @property
    def core(self) -> CoordinatorCore:
        """Hit search, without a drafter."""
        return self._core

    def align(self, num_tokens: int) -> int:
        """Round a token count down."""
        return num_tokens // self.alignment * self.alignment

    def find_hit(self, present: Any, max_length: int, eagle: bool) -> Hit:
        """Length and masks of the longest hit; there is no drafter to leave room for."""
        return Hit(*self._core.find_hit(present, max_length, eagle=False))

    def lookup_masks(self, num_tokens: int) -> list[Mask]:
        """Per group the blocks that a lookup asks for; None means all."""
        if self.retention is None or not current().asks_retention:
            return self._kept(self._masks.reach_masks(num_tokens, 0, None, dense=True, states=True))
        return self._every_boundary(num_tokens)

    def store_masks(self, num_tokens: int, num_prompt_tokens: int | None) -> list[Mask]:
        """Per group the blocks that a save keeps; None means all."""
        if self.retention is None:
            return self._kept(self._masks.reach_masks(num_tokens, 0, None, dense=True, states=True))
        release = current()
        if num_prompt_tokens is None:
            if release.every_boundary:
                return self._every_boundary(num_tokens)
            return self._kept(
                self._masks.reach_masks(num_tokens, 0, None, dense=False, states=True)
            )
        resume = num_prompt_tokens - 1
        if resume < 0:
            if not release.every_boundary:
                return self._kept(
                    self._masks.reach_masks(num_tokens, 0, None, dense=False, states=True)
                )
            resume = 0
        # AscendStore has this one boundary. With a drafter the core has two, one segment lower;
        # they are the same one for a prompt that ends one token past a segment.
        prompt = resume + 1
        if self.eagle:
            prompt = self.align(resume) + self.alignment + 1
        return self._kept(self._masks.reach_masks(num_tokens, 0, prompt, dense=False, states=True))

    def _kept(self, masks: tuple[Mask, ...]) -> list[Mask]:
        return [mask if keep else None for mask, keep in zip(masks, self.masked, strict=True)]

    def _every_boundary(self, num_tokens: int) -> list[Mask]:
        """The segments of the retention interval and the tail of every aligned boundary."""
        segments = self._masks.reach_masks(num_tokens, 0, None, dense=False, states=True)
        tails = self._tails.reach_masks(num_tokens, 0, None, dense=False, states=True)
        out: list[Mask] = []
        for row, keep, mask, tail in zip(self.rows, self.masked, segments, tails, strict=True):
            if mask is None or not keep:
                out.append(None)
            elif tail is not None:
                out.append(mask | tail)
            else:
                # The tails touch each other. With a drafter they lie one block further right.
                out.append(mask | ~Bitset.from_indices(len(mask), self._before_tails(row, mask)))
        return out

    def _before_tails(self, row: Row, mask: Bitset) -> list[int]:
        """Blocks before the first tail, where tails touch each other."""
        kind, size, span, eagle = row[:4]
        if kind != "window" or not eagle or not mask:
            return []
        need = -(-(span - 1) // size) + 1
        return [0] if need == self.alignment // size else []


def _span(kind: str, spec: Any) -> int:
    return int(spec.sliding_window) if kind == "window" else 0


def _rows(coord: Any) -> list[Row] | str:
    """Rows for the core, or what it has no rule for."""
    groups = coord.attention_groups
    if not groups:
        return "no cache group is cacheable"
    if len(groups) > MAX_SETS:
        return f"more than {MAX_SETS} kinds of cache groups"
    if coord.lcm_block_size < 2:
        return "blocks of one token"
    if len(groups) == 1 and groups[0][0].block_size != coord.lcm_block_size:
        return "one kind of cache groups, whose hits are not multiples of the alignment"
    rows: list[Row | None] = [None] * len(coord.kv_cache_groups)
    for k, (spec, ids, manager) in enumerate(groups):
        kind = current().kinds.kind_of(manager)
        if kind is None or not isinstance(spec, _SPECS[kind]):
            return f"a cache group whose manager, {manager.__name__}, kvmask does not know"
        if (getattr(spec, "compress_ratio", 1) or 1) > 1 and current().scales_families:
            return "a compressed cache spec"
        size = spec.block_size
        if not 1 <= size <= MAX_TOKENS or coord.lcm_block_size % size:
            return "block sizes that do not divide the alignment"
        span = _span(kind, spec)
        if kind == "window" and span < 2:
            # It needs no block, and what stock makes of that depends on who asks.
            return "a window of one token"
        for i in ids:
            if coord.group_effective_block_sizes[i] != size:
                return "cache groups of one kind with blocks of different sizes"
            rows[i] = (kind, size, span, k in coord.eagle_attn_group_indices, True, k)
    for i, size in enumerate(coord.group_effective_block_sizes):
        if rows[i] is None:
            rows[i] = ("full", max(1, int(size)), 0, False, False, -1)
    return [row for row in rows if row is not None]


def rules_of(coord: Any) -> Rules | None:
    """The core's rules for a coordinator; None leaves it to stock, and `why_stock` says why.

    They are kept on the coordinator and made anew when what they rest on is replaced.
    """
    stamp = (
        coord.hash_block_size,
        coord.lcm_block_size,
        coord.retention_interval,
        tuple(coord.group_cache_families),
        frozenset(coord.eagle_attn_group_indices),
        tuple(coord.group_effective_block_sizes),
    )
    kept = coord.__dict__.get("_kvmask_rules")
    if kept is not None and kept[0] is coord.attention_groups and kept[1] == stamp:
        known: Rules | None = kept[2]
        return known
    rules, why = None, ""
    try:
        rows = _rows(coord)
        if isinstance(rows, str):
            why = rows
        else:
            rules = _make(coord, rows)
    except (ArgumentError, TypeError) as error:
        why = str(error)
    coord.__dict__["_kvmask_rules"] = (coord.attention_groups, stamp, rules, why)
    return rules


def why_stock(coord: Any) -> str:
    """Why `rules_of` has just given None for a coordinator."""
    return str(coord.__dict__["_kvmask_rules"][3])


def _make(coord: Any, rows: list[Row]) -> Rules:
    masked = [
        family in MASKED_FAMILIES and (row[0] != "state" or current().masks_states)
        for family, row in zip(coord.group_cache_families, rows, strict=True)
    ]
    return Rules(
        rows, coord.hash_block_size, coord.lcm_block_size, coord.retention_interval, masked
    )
