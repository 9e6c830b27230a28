"""Where two contracts disagree, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvmask._core import shown
from kvmask.contract.shape import shape

if TYPE_CHECKING:
    from kvmask.contract.agreement import Contract

__all__ = ["Difference", "differences"]

_GROUP = ("kind", "block_size", "window", "chunk_size")
_HASHING = ("algorithm", "start", "tags_extra_keys")
_KEY = ("before", "after", "as_number")
_RANKS = ("shards", "contexts", "pcp_size", "pp_size", "stages", "uneven_heads", "context_split")
_ABSENT = "absent"


class Difference(NamedTuple):
    """One field that two contracts do not have alike.

    Attributes:
        field: Where it stands, such as "groups[1].window". Groups are counted among the cacheable
            ones in fields of the fingerprint, and among all in others. A start is shown by its
            digest.
        mine: What the first contract has.
        theirs: What the other has.
        in_fingerprint: It shapes keys or bytes: engines that disagree share nothing.
    """

    field: str
    mine: Any
    theirs: Any
    in_fingerprint: bool

    def __str__(self) -> str:
        return f"{self.field} {_word(self.mine)} and {_word(self.theirs)}"


def _word(value: Any) -> str:
    return value if value == _ABSENT else shown(value)


def differences(mine: Contract, theirs: Contract) -> list[Difference]:
    """What two contracts do not have alike; what shapes keys or bytes first.

    Args:
        mine: A contract.
        theirs: Another one.
    """
    found = [Difference(*row, True) for row in _diff(_shaping(mine), _shaping(theirs), "")]
    found += [Difference(*row, False) for row in _diff(_policy(mine), _policy(theirs), "")]
    return found


def _shaping(contract: Contract) -> dict[str, Any]:
    """What the fingerprint is made of, with names for all of it."""
    plain = shape(
        # Without the fingerprint that strict keys carry: all of them would differ by it.
        [replace(g, templates=t) for g, t in zip(contract._filled, contract.keys, strict=True)],
        contract.groups,
        contract.hash_block_size,
        contract.hashing,
        contract.ranks,
        contract.payload,
        contract.facts,
        contract.sealed,
    )
    plain["sealed"] = contract.sealed
    plain["groups"] = [
        {**_named(_GROUP, row), **dict(row[len(_GROUP) :])} for row in plain["groups"]
    ]
    plain["hashing"] = (given := plain.pop("hash")) and _named(_HASHING, given)
    plain["keys"] = [[_named(_KEY, text) for text in row] for row in plain["keys"]]
    plain["ranks"] = [_named(_RANKS, row) for row in plain["ranks"]]
    return plain


def _policy(contract: Contract) -> dict[str, Any]:
    """What engines may decide for themselves."""
    coord = contract.coordinator
    return {
        "names": list(contract.names),
        "alignment": coord.alignment,
        "retention_interval": coord.retention_interval,
        "partial_hits": coord.partial_hits,
        "states": contract.states,
        "groups": [
            {
                name: getattr(group, name)
                for name in ("prefix_cacheable", "eagle", "extra_retained_tokens", "spec")
                if hasattr(group, name)
            }
            for group in contract.groups
        ],
        "grid": {item.name: getattr(contract.ranks, item.name) for item in fields(contract.ranks)},
        "memory of ranks": {str(shard): f.plain() for shard, f in contract._local.items()},
    }


def _named(names: tuple[str, ...], values: Any) -> dict[str, Any]:
    return dict(zip(names, values, strict=False))


def _diff(mine: Any, theirs: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            where = f"{path}.{name}" if path else str(name)
            yield from _diff(mine.get(name, _ABSENT), theirs.get(name, _ABSENT), where)
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            yield from _diff(*pair, f"{path}[{i}]")
    elif (mine, type(mine)) != (theirs, type(theirs)):
        yield path, mine, theirs
