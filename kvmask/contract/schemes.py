"""The schemes that plans take, from a contract and from one that is bound to memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmask._core import BlockHashes
from kvmask.contract.templates import FilledGroup, eviction_of, fill_all
from kvmask.coordinator import Coordinator, group_row
from kvmask.layout import KVLayout
from kvmask.plans.scheme import GroupScheme, Scheme
from kvmask.ranks import Namespace, OwnRanks, RankGrid


def lookup_scheme(
    coordinator: Coordinator,
    names: Sequence[str],
    filled: Sequence[FilledGroup],
    grid: RankGrid,
    states: bool,
    sealed: bool,
    check_hashes: Callable[[BlockHashes], None],
) -> Scheme:
    """The scheme of a contract without memory: the namespaces of all ranks."""
    builders = fill_all(filled, names, grid)
    groups = []
    for index, group in enumerate(coordinator.groups):
        kind, block_size, span = group_row(group)
        groups.append(
            GroupScheme(
                index=index,
                name=names[index],
                kind=kind,
                block_size=block_size,
                span=span,
                cacheable=group.prefix_cacheable,
                namespaces=builders[index],
                eviction=eviction_of(filled[index], grid),
            )
        )
    return Scheme(
        coord=coordinator,
        groups=tuple(groups),
        states=states,
        sealed=sealed,
        check_hashes=check_hashes,
    )


def bound_scheme(
    lookup: Scheme,
    filled: Sequence[FilledGroup],
    grid: RankGrid,
    layouts: Sequence[tuple[KVLayout, ...]],
    ranks: OwnRanks,
) -> Scheme:
    """The same with the memory of one rank: its shards, where they lie, and its turn to write."""
    groups = []
    for found, group, row in zip(lookup.groups, filled, layouts, strict=True):
        if not row:
            groups.append(found)
            continue
        places = [
            Namespace(tensor, context, ranks.pcp_rank, ranks.pp_rank)
            for tensor, context in group.ranks.own(ranks.tp_rank)
        ]
        groups.append(
            replace(
                found,
                own=tuple(schema.builder for schema in group.schemas(grid, places)),
                layouts=row,
                writers=group.ranks.copies(ranks.tp_rank),
                turn=group.ranks.turn(ranks.tp_rank, group.number),
            )
        )
    return replace(lookup, groups=tuple(groups), bound=True, rank=ranks.tp_rank)
