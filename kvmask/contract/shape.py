"""What shapes keys or bytes, and the fingerprint of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvmask.contract.templates import FilledGroup
from kvmask.coordinator import group_row
from kvmask.errors import ArgumentError
from kvmask.groups import Group
from kvmask.hashing.settings import Hashing
from kvmask.keys.base import KeySchema
from kvmask.keys.strict import StrictKeys
from kvmask.payload import Fact, PayloadFacts, check_facts
from kvmask.ranks import Namespace, RankGrid

# What layouts say; facts of these names beside them would be a second opinion.
_LAYOUT_FACTS = frozenset({"dtype", "layout", "token_bytes", "layers", "block_bytes"})
# How objects are sealed: see `kvmask.guard.seal`.
SEAL = "xxh3-128"
_FIRST = (Namespace(0, 0, 0, 0),)
# Fields of a group that engines may differ in and still share blocks. All others shape the bytes.
_LOCAL = frozenset({"prefix_cacheable", "eagle", "extra_retained_tokens", "spec"})


def stated_facts(
    facts: Any, templates: Sequence[Sequence[KeySchema]], payload: Sequence[Any]
) -> dict[str, Fact]:
    """The user's facts with those of the templates, sorted by name."""
    stated = check_facts({} if facts is None else facts, "facts")
    for schema in (schema for row in templates for schema in row):
        for name, value in (schema.facts if isinstance(schema, StrictKeys) else {}).items():
            if name in stated and (stated[name], type(stated[name])) != (value, type(value)):
                raise ArgumentError(
                    f"`facts` must say of {name!r} what the facts of `keys` say, "
                    f"got {stated[name]!r} and {value!r}"
                )
            stated[name] = value
    if any(payload) and (taken := sorted(_LAYOUT_FACTS & stated.keys())):
        raise ArgumentError(
            "`facts` must leave to the payload what its layouts say, and name other facts "
            f"otherwise, got {', '.join(f'{name} {stated[name]!r}' for name in taken)}"
        )
    return dict(sorted(stated.items()))


def states_bytes(payload: tuple[PayloadFacts, ...] | None, facts: Mapping[str, Fact]) -> bool:
    """Whether anything is said of what a group's bytes mean, by its payload or by the user."""
    if payload is not None and all(item.states_bytes for item in payload):
        return True
    return bool(_LAYOUT_FACTS & facts.keys())


# Names that users have for element types, and those of the layouts.
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
_KNOWN = frozenset(
    {*_DTYPES.values(), "bool", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
# Tensors of these hold bytes whose meaning only the user knows, such as fp8.
_OPAQUE = frozenset({"uint8", "int8", "bool"})


def check_stated(facts: Mapping[str, Fact], layouts: Iterable[PayloadFacts], name: str) -> None:
    """Refuse memory of another element type or size than the user's facts state.

    A dtype that is no element type's name is the user's own word, and is not compared.

    Args:
        facts: The contract's facts.
        layouts: What the layouts of one group say.
        name: The argument, for messages.

    Raises:
        ArgumentError: They disagree.
    """
    said, size = facts.get("dtype"), facts.get("block_bytes")
    for found in layouts:
        if isinstance(said, str) and found.dtype is not None:
            stated = _DTYPES.get(said.lower(), said.removeprefix("torch."))
            named = stated in _KNOWN or stated.startswith("float8_")
            if named and found.dtype != stated and found.dtype not in _OPAQUE:
                raise ArgumentError(
                    f"`{name}` must have the dtype that `facts` state, got {found.dtype!r} and "
                    f"{said!r}; `payload=layouts` states it for each group"
                )
        if isinstance(size, int) and found.block_bytes not in (None, size):
            raise ArgumentError(
                f"`{name}` must have the block_bytes that `facts` state, "
                f"got {found.block_bytes} and {size}"
            )


def without_facts(schema: KeySchema) -> KeySchema:
    """A template whose facts stand in the contract."""
    return schema.with_facts({}) if isinstance(schema, StrictKeys) else schema


def with_digest(schema: KeySchema, fingerprint: str) -> KeySchema:
    """A template that carries the fingerprint, where its format has a place for one."""
    return schema.with_facts_digest(fingerprint) if isinstance(schema, StrictKeys) else schema


def _text(schema: KeySchema) -> list[Any]:
    builder = schema.builder
    return [builder.prefix, builder.suffix, builder.as_number]


def _numbers(group: Group) -> list[Any]:
    """Kind, block size, window, chunk; then name and value of what else a kind has."""
    sizes = {
        item.name: int(getattr(group, item.name))
        for item in fields(group)  # type: ignore[arg-type]
        if item.name not in _LOCAL
    }
    row = [sizes.pop(name, None) for name in ("block_size", "window", "chunk_size")]
    return [group_row(group)[0], *row, *map(list, sorted(sizes.items()))]


def shape(
    filled: Sequence[FilledGroup],
    groups: Sequence[Group],
    hash_block_size: int,
    hashing: Hashing | None,
    grid: RankGrid,
    payload: Sequence[tuple[PayloadFacts, ...] | None],
    facts: Mapping[str, Fact],
    sealed: bool,
) -> dict[str, Any]:
    """All that shapes keys or bytes, as plain values; of the cacheable groups alone."""
    used = [i for i, group in enumerate(filled) if group.templates]
    return {
        # Left out where there are no seals: the fingerprints of such contracts stay.
        **({"sealed": SEAL} if sealed else {}),
        "groups": [_numbers(groups[i]) for i in used],
        "hash": hashing and [hashing.algorithm, hashing.check, hashing.tags_extra_keys],
        "hash_block_size": int(hash_block_size),
        # The text around the digest: model, namespace and the form itself.
        "keys": [
            [
                [b.prefix, b.suffix, b.as_number]
                for b in (s.builder for s in group.schemas(grid, _FIRST))
            ]
            for group in (filled[i] for i in used)
        ],
        "ranks": [
            [
                group.ranks.shards,
                group.ranks.contexts,
                grid.pcp_size,
                grid.pp_size,
                list(group.ranks.stages),
                group.ranks.uneven_heads,
                group.ranks.split,
            ]
            for group in (filled[i] for i in used)
        ],
        "payload": [
            None if row is None else [item.plain() for item in row]
            for row in (payload[i] for i in used)
        ],
        "facts": dict(facts),
    }


def digest(content: Mapping[str, Any]) -> str:
    """16 hex digits of plain values, the same in every process and Python."""
    import json  # `import kvmask` does not need it

    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"kvmask contract 1\n" + text.encode()).hexdigest()[:16]
