"""What a diagnosis holds: per group the blocks that matter and those that are there; reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvmask._core import Bitset
from kvmask.groups import Group
from kvmask.ranks import Namespace


def runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: (first, last) pairs.

    >>> runs([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and found[-1][1] == block - 1:
            found[-1] = (found[-1][0], block)
        else:
            found.append((block, block))
    return found


def runs_text(blocks: Iterable[int], most: int = 4) -> str:
    """Blocks in words, at most ``most`` runs of them.

    >>> runs_text([8, 9, 10, 11]), runs_text([3]), runs_text([0, 2, 4, 6, 8], most=2)
    ('8 to 11', '3', '0, 2 and 3 more')
    """
    found = runs(blocks)
    parts = [str(a) if a == b else f"{a} to {b}" for a, b in found[:most]]
    left = sum(b - a + 1 for a, b in found[most:])
    if left:
        parts.append(f"{left} more")
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


@dataclass(frozen=True)
class Shard:
    """What one rank namespace holds of a group's blocks.

    Attributes:
        namespace: Whose keys they are.
        part: Index of the object, where a block has several.
        name: The ranks in words; empty where there is one namespace.
        present: The blocks that are there, of those that matter.
    """

    namespace: Namespace
    part: int
    name: str
    present: Bitset


@dataclass(frozen=True)
class GroupView:
    """One KV cache group of a diagnosis.

    Bits stand for blocks. All bitsets of a group have one length, which is 0 for a group that is
    not prefix-cacheable.

    Attributes:
        index: Index of the group.
        name: Its name.
        group: The group.
        needed: Blocks that can affect the hit: those that an ``exact`` lookup asks for.
        present: Those of them that are there, in every rank namespace.
        rests: Blocks that the hit rests on, which a load would read.
        shards: Per rank namespace what it holds.
        inside: With partial hits, digests inside of blocks whose keys are there; else 0.
    """

    index: int
    name: str
    group: Group
    needed: Bitset
    present: Bitset
    rests: Bitset
    shards: tuple[Shard, ...]
    inside: int = 0

    @property
    def missing(self) -> Bitset:
        """Blocks that can affect the hit and are not there."""
        return self.needed & ~self.present

    def plain(self) -> dict[str, Any]:
        """The same as values for JSON: block numbers as (first, last) runs."""
        found: dict[str, Any] = {
            "index": self.index,
            "name": self.name,
            "kind": self.group.kind,
            "block_size": self.group.block_size,
            "blocks": len(self.needed),
            "eagle": self.group.eagle,
            "prefix_cacheable": self.group.prefix_cacheable,
        }
        for name in ("needed", "present", "missing", "rests"):
            found[name] = runs(getattr(self, name).indices())
        found["shards"] = [
            {
                **shard.namespace._asdict(),
                "part": shard.part,
                "present": runs(shard.present.indices()),
            }
            for shard in self.shards
        ]
        return found


@dataclass(frozen=True)
class Reason:
    """One thing that keeps a hit from being longer.

    Attributes:
        kind: ``"missing"``: a full-attention group lacks a block. ``"boundary"``: another group
            lacks what a hit needs at the longest length that is left. ``"last token"``,
            ``"alignment"``, ``"eagle"``, ``"short"``, ``"never"``: no key could make it longer.
        bound: No hit can be longer than this many tokens because of it.
        text: The reason as a sentence.
        group: Index of the group, if it is one group's.
        blocks: The blocks that are missing.
    """

    kind: str
    bound: int
    text: str
    group: int | None = None
    blocks: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {
            "kind": self.kind,
            "bound": self.bound,
            "text": self.text,
            "group": self.group,
            "blocks": runs(self.blocks),
        }


@dataclass(frozen=True)
class Diagnosis:
    """Why a hit is as long as it is.

    Attributes:
        num_tokens: Tokens of the request.
        length: Tokens of the hit.
        longest: The hit if every key were there.
        groups: What each group needs and has.
        reasons: Why the hit is not longer. The first one decides.
        exact_keys: Keys that an ``exact`` lookup asks for. The diagnosis asked for the same.
        staged_keys: Keys that a ``staged`` lookup asks for.
        staged_calls: Calls that it makes for them.
        present_keys: Keys that the store has, of those asked for.
        unknown_keys: Keys that the store gave no usable answer to. They count as not there.
    """

    num_tokens: int
    length: int
    longest: int
    groups: tuple[GroupView, ...]
    reasons: tuple[Reason, ...]
    exact_keys: int
    staged_keys: int
    staged_calls: int
    present_keys: int
    unknown_keys: int

    @property
    def sentence(self) -> str:
        """The length of the hit and why it is not longer."""
        head = (
            f"The hit is {self.length} of {self.num_tokens} tokens"
            if self.length
            else f"No hit for {self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        )
        return f"{head}: {self.reasons[0].text}." if self.reasons else f"{head}."

    def plain(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {
            "num_tokens": self.num_tokens,
            "length": self.length,
            "longest": self.longest,
            "sentence": self.sentence,
            "reasons": [reason.plain() for reason in self.reasons],
            "groups": [view.plain() for view in self.groups],
            "exact_keys": self.exact_keys,
            "staged_keys": self.staged_keys,
            "staged_calls": self.staged_calls,
            "present_keys": self.present_keys,
            "unknown_keys": self.unknown_keys,
        }
