"""A contract as JSON: written for people to read, taken apart field by field.

::

    {"kvmask_contract": 1, "fingerprint": 16 hex digits,
     "hash": null | {"algorithm", "check": 16 hex digits of the start, "release",
                     "seed": text | "start": hex, only when asked for},
     "hash_block_size", "alignment", "retention_interval", "partial_hits", "states",
     "keys": {"format", its fields} | null when the groups have their own,
     "facts": {name: value},
     "sealed": true, only where objects are,
     "ranks": {fields of RankGrid that are not the default},
     "groups": [{"name", "kind", fields of the kind, "spec",
                 "keys": [one per object of a block],
                 "payload": [the same] | null,
                 "namespaces": [{"part", "tensor", "stage", "facts"}]}]}

The order of the groups is that of the list. Fields that are not known are refused by name, since a
reader that skips one may share keys with an engine that means something else by them.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

from kvmask.contract.templates import template_fields
from kvmask.errors import ArgumentError
from kvmask.groups import KINDS, Group
from kvmask.hashing.settings import Hashing
from kvmask.keys import FORMATS
from kvmask.keys.base import KeySchema
from kvmask.payload import PayloadFacts
from kvmask.ranks import RankGrid

VERSION = 1
MAX_CHARACTERS = 1 << 24
MAX_DEPTH = 32
#: Tensors of a block; no layout has more pieces (see `kvmask.regions.MAX_SEGMENTS`).
MAX_LAYERS = 65_536


def encode(contract: Any, *, with_seed: bool) -> str:
    """The text of a contract."""
    coord = contract.coordinator
    first = next(row[0] for row in contract.keys if row)
    own_keys = any(len(row) > 1 for row in contract.keys) or any(
        template_fields(schema) != template_fields(first) for row in contract.keys for schema in row
    )
    document = {
        "kvmask_contract": VERSION,
        "fingerprint": contract.fingerprint,
        "hash": _hash_fields(contract.hashing, with_seed),
        "hash_block_size": int(coord.hash_block_size),
        "alignment": int(coord.alignment),
        "retention_interval": _int(coord.retention_interval),
        "partial_hits": coord.partial_hits,
        "states": contract.states,
        "keys": None if own_keys else _schema_fields(first),
        "facts": dict(contract.facts),
        # Not where it is false: older releases read such a contract too.
        **({"sealed": True} if contract.sealed else {}),
        "ranks": _grid_fields(contract.ranks),
        "groups": [
            _group_fields(contract, index, own_keys) for index in range(len(contract.groups))
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _int(value: Any) -> int | None:
    return None if value is None else int(value)


def _hash_fields(hashing: Hashing | None, with_seed: bool) -> dict[str, Any] | None:
    if hashing is None:
        return None
    found = {
        "algorithm": hashing.algorithm,
        "check": hashing.check,
        "release": hashing.release,
    }
    if with_seed:
        if hashing.start is None:
            raise ArgumentError(
                "`with_seed` needs a contract that knows its seed, got one loaded without it"
            )
        if hashing.seed is not None:
            found["seed"] = hashing.seed
        else:
            found["start"] = hashing.start.hex()
    return found


def _schema_fields(schema: KeySchema) -> dict[str, Any]:
    name = type(schema).__name__
    if FORMATS.get(name) is not type(schema):
        raise ArgumentError(f"`keys` must be of a format of kvmask to stand in JSON, got {name}")
    return {"format": name, **template_fields(schema)}


def _grid_fields(grid: RankGrid) -> dict[str, Any]:
    found = {}
    for item in fields(grid):
        value = getattr(grid, item.name)
        if value != item.default:
            found[item.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _group_fields(contract: Any, index: int, own_keys: bool) -> dict[str, Any]:
    group, name = contract.groups[index], contract.names[index]
    found: dict[str, Any] = {
        "name": name,
        "kind": next(kind for kind, cls in KINDS.items() if type(group) is cls),
    }
    for item in fields(group):
        value = getattr(group, item.name)
        if item.name == "spec":
            value = _spec(value, name)
        elif not isinstance(value, bool):
            value = int(value)
        found[item.name] = value
    if own_keys:
        found["keys"] = [_schema_fields(schema) for schema in contract.keys[index]]
    payload = contract.payload[index]
    found["payload"] = payload and [facts.plain() for facts in payload]
    local = [
        {
            "part": shard.part,
            "tensor": shard.tensor,
            "stage": shard.stage,
            "facts": facts.plain(),
        }
        for shard, facts in contract._local.items()
        if shard.group == index
    ]
    if local:
        found["namespaces"] = local
    return found


def _spec(value: Any, name: str, depth: int = 0) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is tuple and depth < MAX_DEPTH - 4:
        return [_spec(item, name, depth + 1) for item in value]
    raise ArgumentError(
        f"`spec` of group {name!r} must be text, integers, booleans, None or tuples of them, not "
        f"nested deeper than {MAX_DEPTH - 4}, to stand in JSON, got {type(value).__name__}"
    )


class _Fields:
    """An object of the document, taken field by field; what is left over is an error."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise ArgumentError(f"{_at(path)} must be an object, got {_kind(value)}")
        self.path = path
        self._left = dict(value)

    def name(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def take(self, field: str, kind: Any, default: Any = MISSING) -> Any:
        """A field of a JSON type."""
        if field not in self._left:
            if default is MISSING:
                raise ArgumentError(f"`{self.name(field)}` must be there, got none")
            return default
        value = self._left.pop(field)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            raise ArgumentError(
                f"`{self.name(field)}` must be {' or '.join(map(_word, kinds))}, got {_kind(value)}"
            )
        return value

    def rest(self) -> dict[str, Any]:
        left, self._left = self._left, {}
        return left

    def end(self) -> None:
        if self._left:
            shown = ", ".join(f"`{self.name(field)}`" for field in sorted(self._left)[:4])
            raise ArgumentError(f"a contract must hold no field that is not known, got {shown}")


def _at(path: str) -> str:
    return f"`{path}`" if path else "a contract"


_WORDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "an integer",
    bool: "true or false",
    float: "a number with a fraction",
    type(None): "null",
}


def _word(kind: type) -> str:
    return _WORDS.get(kind, kind.__name__)


def _kind(value: Any) -> str:
    return _word(type(value))


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"a contract must name each field once, got {twice!r} twice")
    return found


def _refuse(text: str) -> Any:
    raise ArgumentError(f"a contract must hold JSON numbers, got {text}")


def _check_depth(parsed: Any) -> None:
    """Refuse nesting that a message could not show, without recursion of our own."""
    level, depth = [parsed], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ArgumentError(f"a contract must be nested at most {MAX_DEPTH} deep, got more")
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]


def decode(
    text: str, seed: str | None, start: bytes | None
) -> tuple[dict[str, Any], dict[tuple[int, int, int, int], PayloadFacts], str]:
    """Arguments of Contract, facts of single ranks, and the fingerprint that the text states."""
    if not isinstance(text, str):
        raise TypeError(f"`text` must be a str, got {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise ArgumentError(
            f"a contract must have at most {MAX_CHARACTERS} characters, got {len(text)}"
        )
    try:
        parsed = json.loads(text, object_pairs_hook=_pairs, parse_constant=_refuse)
    except ArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"a contract must be JSON, got {type(error).__name__}: {error}"
        ) from None
    _check_depth(parsed)
    top = _Fields(parsed, "")
    version = top.take("kvmask_contract", int)
    if version != VERSION:
        raise ArgumentError(
            f"`kvmask_contract` must be {VERSION}, the version that this release reads, "
            f"got {version}"
        )
    fingerprint = top.take("fingerprint", str)
    hashing = top.take("hash", (dict, type(None)))
    made: dict[str, Any] = {
        "hashing": None if hashing is None else _hashing(_Fields(hashing, "hash"), seed, start),
        "hash_block_size": top.take("hash_block_size", int),
        "alignment": top.take("alignment", int),
        "retention_interval": top.take("retention_interval", (int, type(None))),
        "partial_hits": top.take("partial_hits", bool),
        "states": top.take("states", str),
        "facts": top.take("facts", dict),
        "sealed": top.take("sealed", bool, False),
    }
    if hashing is None and (seed is not None or start is not None):
        raise ArgumentError("`seed` must be None for a contract without hashing, got one")
    keys = top.take("keys", (dict, type(None)))
    grid = _Fields(top.take("ranks", dict), "ranks")
    made["ranks"] = _build(RankGrid, grid)
    groups: dict[str, Group] = {}
    own_keys: dict[str, tuple[KeySchema, ...]] = {}
    payload: dict[str, Any] = {}
    local: dict[tuple[int, int, int, int], PayloadFacts] = {}
    for index, value in enumerate(top.take("groups", list)):
        row = _Fields(value, f"groups[{index}]")
        name = row.take("name", str)
        if name in groups:
            raise ArgumentError(f"`{row.path}.name` must be of one group alone, got {name!r} again")
        facts = row.take("payload", (list, type(None)), None)
        if facts is not None:
            payload[name] = [
                _payload(_Fields(item, f"{row.path}.payload[{i}]")) for i, item in enumerate(facts)
            ]
        for i, item in enumerate(row.take("namespaces", list, [])):
            entry = _Fields(item, f"{row.path}.namespaces[{i}]")
            shard = (index, *(entry.take(part, int) for part in ("part", "tensor", "stage")))
            if shard in local:
                raise ArgumentError(
                    f"`{row.path}.namespaces` must name each shard once, got {shard[1:]} again"
                )
            local[shard] = _payload(_Fields(entry.take("facts", dict), f"{entry.path}.facts"))
            entry.end()
        if keys is None:
            schemas = row.take("keys", list)
            if schemas:
                own_keys[name] = tuple(
                    _schema(_Fields(item, f"{row.path}.keys[{i}]"))
                    for i, item in enumerate(schemas)
                )
        groups[name] = _group(row)
    top.end()
    made["groups"] = groups
    made["keys"] = own_keys if keys is None else _schema(_Fields(keys, "keys"))
    made["payload"] = payload or None
    return made, local, fingerprint


def _build(make: Callable[..., Any], given: _Fields, **more: Any) -> Any:
    """Call a constructor with the rest of an object's fields, those that it has."""
    known = {item.name for item in fields(make) if item.init}  # type: ignore[arg-type]
    values = given.rest()
    if unknown := sorted(values.keys() - known):
        raise ArgumentError(
            "a contract must hold no field that is not known, got "
            + ", ".join(f"`{given.name(field)}`" for field in unknown[:4])
        )
    try:
        return make(**values, **more)
    except (TypeError, ArgumentError) as error:
        raise ArgumentError(f"{_at(given.path)} must be valid: {error}") from error


def _hashing(given: _Fields, seed: str | None, start: bytes | None) -> Hashing:
    algorithm, release = given.take("algorithm", str), given.take("release", str)
    check = given.take("check", str)
    own_seed, own_start = given.take("seed", str, None), given.take("start", str, None)
    given.end()
    if seed is None and start is None:
        seed = own_seed
        if own_start is not None:
            try:
                start = bytes.fromhex(own_start)
            except ValueError:
                raise ArgumentError("`hash.start` must be hexadecimal digits, got others") from None
    values: dict[str, Any] = {"algorithm": algorithm, "release": release, "check": check}
    if seed is not None or start is not None:
        return Hashing(seed=seed, start=start, **values)
    with suppress(ArgumentError, ImportError):
        found = Hashing(algorithm, release=release)
        if found.check == check:
            return found
    return Hashing(**values)


def _schema(given: _Fields) -> KeySchema:
    name = given.take("format", str)
    if name not in FORMATS:
        raise ArgumentError(
            f"`{given.name('format')}` must be one of {', '.join(FORMATS)}, got {name!r}"
        )
    made: KeySchema = _build(FORMATS[name], given)
    return made


def _group(given: _Fields) -> Group:
    kind = given.take("kind", str)
    if kind not in KINDS:
        raise ArgumentError(
            f"`{given.name('kind')}` must be one of {', '.join(KINDS)}, got {kind!r}"
        )
    spec = _hashable(given.take("spec", (str, int, bool, list, type(None)), None), given.path)
    flags = {
        name: given.take(name, bool, default)
        for name, default in (("prefix_cacheable", True), ("eagle", False))
    }
    made: Group = _build(KINDS[kind], given, spec=spec, **flags)
    return made


def _hashable(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(item, path) for item in value)
    if type(value) in (dict, float):
        raise ArgumentError(
            f"`{path}.spec` must hold text, integers, booleans, null or lists, got {_kind(value)}"
        )
    return value


def _payload(given: _Fields) -> PayloadFacts:
    layers = given.take("layers", (list, type(None)), None)
    if layers is not None:
        total = 0
        for run in layers:
            pair = type(run) is list and len(run) == 2 and all(type(n) is int for n in run)
            if not pair or run[0] < 1:
                raise ArgumentError(
                    f"`{given.name('layers')}` must hold pairs of integers, the first above 0, "
                    f"got {run!r}"
                )
            total += run[0]
        if total > MAX_LAYERS:
            raise ArgumentError(
                f"`{given.name('layers')}` must be at most {MAX_LAYERS}, got {total}"
            )
        layers = tuple(entry for count, entry in layers for _ in range(count))
    made: PayloadFacts = _build(PayloadFacts, given, layers=layers)
    return made


def write_text(path: str | os.PathLike[str], text: str, *, private: bool) -> None:
    """Put a text in place of a file, at once; a private one is only its owner's to read."""
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    # The system takes the umask off. Asking for it would change it for all threads.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        handle = os.open(temporary, flags, 0o600 if private else 0o666)
    except OSError as error:
        # Nobody but this function knows the temporary name.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, or so much of it that `decode` refuses its length."""
    try:
        # An integer would be a file that is open already, and closed after that.
        with open(os.fspath(path), encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"`path` must be a file in UTF-8, got {os.fspath(path)!r}: {error.reason}"
        ) from None
