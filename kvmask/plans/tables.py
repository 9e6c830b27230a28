"""Block tables and masks, in the shapes that engines give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmask.errors import ArgumentError
from kvmask.plans.scheme import Scheme


def as_list(items: Any, name: str) -> list[Any]:
    """A list of the items of any iterable; anything else is an error that names the argument."""
    try:
        return list(items)
    except TypeError:
        raise TypeError(f"`{name}` must be a sequence, got {type(items).__name__}") from None


def block_tables(scheme: Scheme, tables: Any) -> list[list[int]]:
    """A block table per group, from a mapping by name or a sequence in order.

    Lists are taken as they are, since a plan reads them once, when it is made. A mapping may leave
    out groups of which this rank keeps nothing.

    Raises:
        ArgumentError: There is not one table per group, or a name is unknown.
    """
    if type(tables) is not tuple and isinstance(tables, Mapping):
        names = [g.name for g in scheme.groups]
        unknown = [name for name in tables if name not in names]
        lacking = [g.name for g in scheme.groups if g.own and g.name not in tables]
        if unknown or lacking:
            raise ArgumentError(
                f"`tables` must hold one block table per group, got {list(tables)!r} and {names}"
            )
        tables = [tables.get(name, ()) for name in names]
    rows = tables if type(tables) is list else as_list(tables, "tables")
    for table in rows:
        if type(table) is not list:
            rows = [t if type(t) is list else as_list(t, "tables") for t in rows]
            break
    if len(rows) != len(scheme.groups):
        raise ArgumentError(
            f"`tables` must hold one block table per group, got {len(rows)} and "
            f"{len(scheme.groups)}"
        )
    return rows


def check_masks(masks: Any, groups: int) -> None:
    """Refuse what is not one mask per group.

    Raises:
        ArgumentError: There are more or fewer.
        TypeError: It is no sequence.
    """
    if not isinstance(masks, tuple | list):
        raise TypeError(f"`masks` must be a sequence of masks, got {type(masks).__name__}")
    if len(masks) != groups:
        raise ArgumentError(f"`masks` must hold one mask per group, got {len(masks)} and {groups}")
