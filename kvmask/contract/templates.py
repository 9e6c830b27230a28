"""Key templates of a contract: which one each group has, and what they become for every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from kvmask._core import KeyBuilder
from kvmask.errors import ArgumentError
from kvmask.keys.base import KeyRanks, KeySchema
from kvmask.keys.strict import StrictKeys
from kvmask.keys.vllm import VllmKeys, store_numbers
from kvmask.ranks import GroupRanks, Namespace, RankGrid

Templates = tuple[KeySchema, ...]


def check_templates(
    keys: Any, names: Sequence[str], cacheable: Sequence[bool]
) -> tuple[Templates, ...]:
    """The templates of each group, one per object of a block; none for what is not cacheable.

    Args:
        keys: One template for all groups, or a mapping by name to one or several.
        names: The groups' names.
        cacheable: Whether each takes part in keys.
    """
    if isinstance(keys, KeySchema):
        _check_blank(keys, "keys")
        return tuple((keys,) if used else () for used in cacheable)
    if not isinstance(keys, Mapping):
        raise TypeError(
            "`keys` must be a key schema, or a mapping from groups to them, "
            f"got {type(keys).__name__}"
        )
    if unknown := sorted(str(name) for name in keys if name not in names):
        raise ArgumentError(
            f"`keys` must name groups of the contract, got {unknown} and {list(names)}"
        )
    rows: list[Templates] = []
    for name, used in zip(names, cacheable, strict=True):
        if not used:
            rows.append(())
            continue
        if name not in keys:
            raise ArgumentError(f"`keys` must have a template for group {name!r}, got {list(keys)}")
        given = keys[name]
        row = (given,) if isinstance(given, KeySchema) else tuple(_sequence(given, name))
        for schema in row:
            if not isinstance(schema, KeySchema):
                raise TypeError(
                    f"`keys[{name!r}]` must hold key schemas, got {type(schema).__name__}"
                )
            _check_blank(schema, f"keys[{name!r}]")
        rows.append(row)
    kinds = sorted({type(schema).__name__ for row in rows for schema in row})
    if len(kinds) > 1:
        raise ArgumentError(f"`keys` must be of one format for all groups, got {kinds}")
    return tuple(rows)


def _sequence(given: Any, name: str) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise TypeError(
            f"`keys[{name!r}]` must be a key schema or a sequence of them, got {given!r}"
        )
    return given


def _check_blank(schema: KeySchema, name: str) -> None:
    """Refuse a template that says already what the contract fills in."""
    for item in fields(schema):  # type: ignore[arg-type]
        source = schema.rank_fields.get(item.name)
        value = getattr(schema, item.name)
        if source is not None and not source.endswith("_size") and value != item.default:
            raise ArgumentError(
                f"`{name}` must be a template whose ranks and group are left to the contract, "
                f"got {item.name} {value!r}"
            )
    if isinstance(schema, StrictKeys) and schema.facts_digest:
        raise ArgumentError(
            f"`{name}` must leave the fingerprint to the contract, "
            f"got facts_digest {schema.facts_digest!r}"
        )


def group_numbers(templates: Sequence[Templates]) -> tuple[int, ...]:
    """The number of each group in its keys.

    Its index among the groups that are prefix cacheable, or, where the format says so, among all.
    """
    every = any(schema.numbers_all_groups for row in templates for schema in row)
    numbers, count = [], 0
    for row in templates:
        numbers.append(count)
        count += every or bool(row)
    return tuple(numbers)


def check_engine(templates: Sequence[Templates], kinds: Sequence[str], grid: RankGrid) -> None:
    """Refuse what the engine of a template's keys does otherwise or does not do."""
    for row in templates:
        for schema in row:
            if isinstance(schema, VllmKeys):
                _check_vllm(schema, templates, kinds, grid)


def check_sealed(templates: Sequence[Templates]) -> None:
    """Refuse seals under keys that do not say so: readers would take them for bytes of a block."""
    for schema in (schema for row in templates for schema in row):
        if not isinstance(schema, StrictKeys):
            raise ArgumentError(
                "`sealed` needs StrictKeys, whose fingerprint says that objects are sealed, "
                f"got {type(schema).__name__}"
            )


def _check_vllm(
    schema: VllmKeys, templates: Sequence[Templates], kinds: Sequence[str], grid: RankGrid
) -> None:
    said = store_numbers(schema.namespace)
    for name, number in (("store_tp", grid.store_tp_size), ("store_pp", grid.pp_size)):
        if name in said and said[name] != number:
            raise ArgumentError(
                f"`namespace` must have the {name} of the ranks, got {schema.namespace!r} "
                f"and {number}"
            )
    if "rank_local_tp" in said and said["rank_local_tp"] != grid.tp_size:
        raise ArgumentError(
            f"`namespace` must have the `tp_size` of the ranks, got {schema.namespace!r} "
            f"and {grid.tp_size}"
        )
    if grid.store_tp_size is None:
        return
    if "store_tp" not in said:
        raise ArgumentError(
            "`namespace` of the keys must name the store's TP size, as "
            f"kvmask.keys.store_namespace({grid.pp_size}, store_tp={grid.store_tp_size}) does, "
            f"got {schema.namespace!r}"
        )
    used = [kind for kind, row in zip(kinds, templates, strict=True) if row]
    if used != ["full"] or grid.pcp_size > 1:
        raise ArgumentError(
            "`store_tp_size` must be None in keys of vLLM unless there is one group, of full "
            f"attention, and `pcp_size` is 1, got groups {used} and {grid.pcp_size}"
        )


@dataclass(frozen=True, slots=True)
class FilledGroup:
    """The keys of one group for all ranks.

    Attributes:
        templates: One per object of a block.
        number: The group's number in keys.
        ranks: How the ranks share it.
    """

    templates: Templates
    number: int
    ranks: GroupRanks

    def schemas(self, grid: RankGrid, namespaces: Iterable[Namespace]) -> list[KeySchema]:
        """Filled templates, all objects of a block beside each other."""
        shards = self.ranks.shards
        return [
            schema.fill(
                KeyRanks(
                    tensor=namespace.tensor,
                    context=namespace.context,
                    prefill=namespace.prefill,
                    stage=namespace.stage,
                    group=self.number,
                    shards=shards,
                    tensor_size=grid.tp_size,
                    context_size=grid.dcp_size,
                    prefill_size=grid.pcp_size,
                    stage_size=grid.pp_size,
                )
            )
            for namespace in namespaces
            for schema in self.templates
        ]


def fill_all(
    groups: Sequence[FilledGroup], names: Sequence[str], grid: RankGrid
) -> tuple[tuple[KeyBuilder, ...], ...]:
    """The builders of all namespaces of each group; refused when two could give one key."""
    # Whether leading zeros of a digest are written does not keep keys apart: most have none.
    owners: dict[tuple[str, str], tuple[int, Namespace, int]] = {}
    rows: list[tuple[KeyBuilder, ...]] = []
    for index, group in enumerate(groups):
        if not group.templates:
            rows.append(())
            continue
        _check_sizes(group, names[index], grid)
        namespaces = group.ranks.namespaces()
        row = tuple(schema.builder for schema in group.schemas(grid, namespaces))
        count = len(group.templates)
        for at, builder in enumerate(row):
            owner = index, namespaces[at // count], at % count
            text = builder.prefix, builder.suffix
            if text in owners:
                raise ArgumentError(_clash(owners[text], owner, groups, names, builder))
            owners[text] = owner
        rows.append(row)
    return tuple(rows)


def _check_sizes(group: FilledGroup, name: str, grid: RankGrid) -> None:
    """A size that a template states must be that of the grid."""
    filled = group.schemas(grid, [Namespace(0, 0, 0, 0)])
    for template, schema in zip(group.templates, filled, strict=True):
        for item in fields(template):  # type: ignore[arg-type]
            source = template.rank_fields.get(item.name)
            if source is None or not source.endswith("_size"):
                continue
            mine, right = getattr(template, item.name), getattr(schema, item.name)
            if mine not in (right, item.default):
                raise ArgumentError(
                    f"`keys` of group {name!r} must have the sizes of the ranks, "
                    f"got {item.name} {mine} and {right}"
                )


def _clash(
    first: tuple[int, Namespace, int],
    second: tuple[int, Namespace, int],
    groups: Sequence[FilledGroup],
    names: Sequence[str],
    builder: KeyBuilder,
) -> str:
    """Why two namespaces have the same keys."""
    (group, namespace, part), (other, namespace_2, part_2) = first, second
    shown = f"{builder.prefix}...{builder.suffix}"
    if group != other:
        if "group" not in groups[group].templates[part].rank_fields.values():
            return (
                f"`keys` must have a field for the group, or a template of its own for each of the "
                f"groups {names[group]!r} and {names[other]!r}, got {shown!r} for both"
            )
        return (
            f"two groups must never share keys, got {shown!r} for groups {names[group]!r} "
            f"and {names[other]!r}"
        )
    if part != part_2:
        return (
            f"`keys[{names[group]!r}]` must hold templates of different keys, got {shown!r} for "
            f"templates {part} and {part_2}"
        )
    words = {
        "tensor": "the tensor-parallel rank, or `kv_heads` must say that all ranks are alike",
        "context": "the decode-context-parallel rank",
        "prefill": "the prefill-context-parallel rank",
        "stage": "the pipeline rank",
    }
    for name, text in words.items():
        mine, theirs = getattr(namespace, name), getattr(namespace_2, name)
        if mine != theirs:
            return (
                f"`keys` of group {names[group]!r} must have a field for {text}, "
                f"got {shown!r} for {mine} and {theirs}"
            )
    raise AssertionError("equal namespaces are listed once")


def eviction_of(groups: FilledGroup, grid: RankGrid) -> KeyBuilder | None:
    """Builds the store's group ids of a group's blocks."""
    if not groups.templates:
        return None
    return groups.schemas(grid, [Namespace(0, 0, 0, 0)])[0].eviction


def template_fields(schema: KeySchema) -> dict[str, Any]:
    """The fields of a template that a contract's JSON holds: those that are not the default."""
    found: dict[str, Any] = {}
    for item in fields(schema):  # type: ignore[arg-type]
        if (
            not item.init
            or item.name in schema.rank_fields
            or item.name in ("facts", "facts_digest")
        ):
            continue
        value = getattr(schema, item.name)
        default = item.default
        if default is MISSING and item.default_factory is not MISSING:
            default = item.default_factory()
        if value != default or type(value) is not type(default):
            found[item.name] = dict(value) if isinstance(value, Mapping) else value
    return found
