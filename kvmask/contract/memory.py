"""Layouts and payload facts of a contract's groups, in the shapes that users give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvmask.contract.templates import FilledGroup
from kvmask.errors import AlignmentError, ArgumentError
from kvmask.groups import KINDS, ChunkedLocal, Group, Mamba
from kvmask.layout import KVLayout
from kvmask.payload import PayloadFacts
from kvmask.ranks import GroupRanks, OwnRanks


class LocalShard(NamedTuple):
    """What facts of one rank's memory belong to.

    Attributes:
        group: Index of the group.
        part: Which object of a block.
        tensor: Tensor-parallel shard.
        stage: Pipeline rank.
    """

    group: int
    part: int
    tensor: int
    stage: int


def named_groups(groups: Any) -> tuple[tuple[str, ...], tuple[Group, ...]]:
    """Names and groups in order."""
    if isinstance(groups, Mapping):
        names, members = tuple(groups), tuple(groups.values())
    elif isinstance(groups, Sequence) and not isinstance(groups, str):
        kinds = tuple(KINDS.values())
        for item in groups:  # before anything is made of all: a wrong sequence can be endless
            if not isinstance(item, kinds):
                raise TypeError(f"`groups` must hold kvmask groups, got {type(item).__name__}")
        names, members = tuple(str(i) for i in range(len(groups))), tuple(groups)
    else:
        raise TypeError(
            f"`groups` must be a mapping by name or a sequence, got {type(groups).__name__}"
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"`groups` must have names of text, got {name!r}")
    return names, members


def check_chunks(names: Sequence[str], groups: Sequence[Group]) -> None:
    """Refuse attention chunks that begin inside a block.

    The search takes the blocks before a chunk for present, as vLLM's does. A hit that ends in such
    a block is then in the chunk before, whose blocks nobody asked for.
    """
    for name, group in zip(names, groups, strict=True):
        if isinstance(group, ChunkedLocal) and group.chunk_size % group.block_size:
            raise AlignmentError(
                f"`chunk_size` of group {name!r} must be a multiple of its `block_size`, "
                f"got {group.chunk_size} and {group.block_size}"
            )


def by_group(values: Any, names: Sequence[str], name: str) -> list[Any]:
    """One entry per group, from a mapping by name (None where it has none) or a sequence."""
    if isinstance(values, Mapping):
        if unknown := sorted(str(key) for key in values if key not in names):
            raise ArgumentError(
                f"`{name}` must name groups of the contract, got {unknown} and {list(names)}"
            )
        return [values.get(group) for group in names]
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(
            f"`{name}` must be a mapping by group name, or a sequence with one entry per group, "
            f"got {type(values).__name__}"
        )
    if len(values) != len(names):
        raise ArgumentError(
            f"`{name}` must have one entry per group, got {len(values)} and {len(names)}"
        )
    return list(values)


def layout_row(value: Any, name: str, shards: Sequence[int] | int, parts: int) -> list[KVLayout]:
    """The layouts of one group: the objects of a shard's block beside each other.

    Args:
        value: A KVLayout, a sequence of them, or what `head_shards` returns.
        name: The argument, for messages.
        shards: Numbers of the shards, or only how many.
        parts: Objects of a block.
    """
    count = shards if isinstance(shards, int) else len(shards)
    if isinstance(value, KVLayout):
        row: list[Any] = [value]
    elif isinstance(value, Mapping):
        found = sorted(value)
        if not isinstance(shards, int) and found != list(shards):
            raise ArgumentError(
                f"`{name}` must hold the shards of this rank, got {found} and {list(shards)}"
            )
        row = [value[key] for key in found]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        row = list(value)
    else:
        raise TypeError(f"`{name}` must be a KVLayout or several, got {type(value).__name__}")
    for item in row:
        if not isinstance(item, KVLayout):
            raise TypeError(f"`{name}` must hold KVLayout, got {type(item).__name__}")
    if len(row) != count * parts:
        each = "each object of a block and shard" if parts > 1 else "each shard"
        raise ArgumentError(
            f"`{name}` must hold one layout for {each} that a rank stores, "
            f"got {len(row)} and {count * parts}"
        )
    return row


def facts_of(layout: KVLayout, group: Group, ranks: GroupRanks, contexts: int) -> PayloadFacts:
    """The facts of a layout of a group; its tokens are those that one rank holds of a block."""
    spread = contexts * ranks.prefill_size if ranks.split else 1
    tokens = group.block_size // spread if group.block_size % spread == 0 else group.block_size
    return PayloadFacts.of(layout, tokens, state=isinstance(group, Mamba))


def payload_row(
    value: Any, name: str, group: Group, ranks: GroupRanks, contexts: int, parts: int, stages: int
) -> tuple[PayloadFacts, ...] | None:
    """Those facts of one group that all ranks share, per object of a block."""
    if value is None:
        return None
    layers = stages == 1
    if isinstance(value, PayloadFacts):
        value = [value]
    if isinstance(value, Sequence) and value and isinstance(value[0], PayloadFacts):
        if len(value) != parts or not all(isinstance(item, PayloadFacts) for item in value):
            raise ArgumentError(
                f"`{name}` must hold one PayloadFacts per object of a block, "
                f"got {len(value)} and {parts}"
            )
        for item in value:
            if item.shared(layers=layers, sizes=ranks.even) != item:
                raise ArgumentError(
                    f"`{name}` must hold facts that all ranks share; what differs between stages "
                    f"or uneven shards is for `describe_rank`, got {item}"
                )
        return tuple(value)
    if not ranks.even:
        raise ArgumentError(
            f"`{name}` must be PayloadFacts with what shards of {ranks.uneven_heads} heads over "
            f"{ranks.shards} ranks share (dtype, and the bytes of a head in `extra`), since their "
            f"layouts differ, got {type(value).__name__}"
        )
    row = layout_row(value, name, ranks.per_rank, parts)
    facts = [facts_of(layout, group, ranks, contexts) for layout in row]
    for i, item in enumerate(facts):
        if differences := facts[i % parts].differences(item):
            raise ArgumentError(
                f"`{name}` must hold shards of equal layouts, "
                f"got {'; '.join(differences)} at {i % parts} and {i}"
            )
    return tuple(item.shared(layers=layers, sizes=True) for item in facts[:parts])


def layout_rows(
    layouts: Any, names: Sequence[str], groups: Sequence[FilledGroup], ranks: OwnRanks
) -> list[list[KVLayout]]:
    """The layouts of one rank: per group one per shard and object; none where it holds no layer."""
    rows: list[list[KVLayout]] = []
    for value, name, group in zip(by_group(layouts, names, "layouts"), names, groups, strict=True):
        shown = f"layouts[{name!r}]"
        if not group.templates:
            rows.append([])
        elif ranks.pp_rank not in group.ranks.stages:
            if value is not None:
                raise ArgumentError(
                    f"`{shown}` must be None on a stage without layers of the group, got "
                    f"{type(value).__name__} on {ranks.pp_rank} for stages "
                    f"{list(group.ranks.stages)}"
                )
            rows.append([])
        elif isinstance(layouts, Mapping) and name not in layouts:
            raise ArgumentError(
                f"`layouts` must hold a KVLayout for group {name!r}, which has layers on stage "
                f"{ranks.pp_rank}, got {sorted(layouts)}"
            )
        elif value is None:
            raise ArgumentError(
                f"`{shown}` must be a KVLayout on a stage with layers of the group, got None on "
                f"{ranks.pp_rank} for stages {list(group.ranks.stages)}"
            )
        else:
            shards = [tensor for tensor, _ in group.ranks.own(ranks.tp_rank)]
            rows.append(layout_row(value, shown, shards, len(group.templates)))
    return rows


def facts_by_shard(
    index: int,
    row: Sequence[KVLayout],
    group: Group,
    filled: FilledGroup,
    contexts: int,
    ranks: OwnRanks,
) -> dict[LocalShard, PayloadFacts]:
    """The facts of each layout of one group of a rank."""
    parts, own = len(filled.templates), filled.ranks.own(ranks.tp_rank)
    return {
        LocalShard(index, i % parts, own[i // parts][0], ranks.pp_rank): facts_of(
            layout, group, filled.ranks, contexts
        )
        for i, layout in enumerate(row)
    }


def check_shards(shards: Iterable[LocalShard], groups: Sequence[FilledGroup]) -> None:
    """Refuse facts of a rank that the grid does not have."""
    for shard in shards:
        group = groups[shard.group]
        tensors = {namespace.tensor for namespace in group.ranks.namespaces()}
        if not (
            0 <= shard.part < len(group.templates)
            and shard.tensor in tensors
            and shard.stage in group.ranks.stages
        ):
            raise ArgumentError(
                f"`groups[{shard.group}].namespaces` must be of the ranks, "
                f"got part {shard.part}, tensor {shard.tensor} and stage {shard.stage}"
            )
