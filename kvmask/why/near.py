"""Would the prompt have hit under another seed, algorithm, namespace or grid of ranks?

Each try changes one thing of a contract, makes the digests and keys that it would have, and looks
them up. A lookup that finds nothing takes few keys, so many tries are cheap. All tries together ask
a bounded number of keys.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvmask._core import check_integer, shown
from kvmask.contract import Contract
from kvmask.errors import ArgumentError, KeyFormatWarning, KVMaskError
from kvmask.hashing.chain import ALGORITHMS, DEFAULT_SEED
from kvmask.hashing.settings import Hashing
from kvmask.hashing.tokens import Tokens
from kvmask.keys import StrictKeys, VllmKeys
from kvmask.keys.base import KeySchema
from kvmask.mooncake.policy import MooncakePolicy
from kvmask.plans.calls import Existence
from kvmask.plans.costs import CostModel
from kvmask.plans.lookup import LookupPlan
from kvmask.plans.policy import StorePolicy
from kvmask.plans.tools import PlanTools
from kvmask.why.ask import ask_all, check_questions

#: Keys that all tries together may ask for.
MAX_KEYS = 4096
# A try that finds nothing asks for this many blocks of a full-attention group.
_FIRST_BLOCKS = 8
_COSTS = CostModel(call=_FIRST_BLOCKS * CostModel().missing)
_TENSOR_SIZES = (1, 2, 4, 8, 16)
_PIPELINE_SIZES = (1, 2, 4)
_HASH_BLOCKS = (4, 8, 16, 32, 64, 128, 256)
# The largest factor of all blocks.
_MOST_TIMES = 1 << 16


@dataclass(frozen=True)
class Near:
    """One try.

    Attributes:
        change: What was changed: name of `CHANGES` to the value.
        length: Tokens of the hit.
        asked: Keys that it asked for.
        decided: False: the bound of keys ended it, and ``length`` is 0 though some keys are there.
        present: Keys of it that are there.
    """

    change: Mapping[str, Any]
    length: int
    asked: int
    decided: bool
    present: int

    @property
    def name(self) -> str:
        """The change in words."""
        if "extra_keys" in self.change:
            return "without salt and adapter"
        names = [name.replace("_", " ") for name in self.change]
        if not any(self.change.values()):
            return f"without {' and '.join(names)}"
        pairs = zip(names, self.change.values(), strict=True)
        return f"with {' and '.join(_word(name, value) for name, value in pairs)}"

    def plain(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {
            "change": dict(self.change),
            "length": self.length,
            "asked": self.asked,
            "decided": self.decided,
            "present": self.present,
        }


def _word(name: str, value: Any) -> str:
    if name == "blocks":
        return f"all blocks {float(value):g} times as large"
    return f"{name} {value!r}"


def _integer(name: str, value: Any) -> int:
    """A positive integer, or its digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, str):
        raise ArgumentError(f"`{name}` must be an integer, got {shown(value)}")
    return check_integer(value, name)


def _factor(name: str, value: Any) -> float:
    """A factor of sizes, or its digits."""
    try:
        factor = float(value)
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if isinstance(value, bool) or not 0 < factor <= _MOST_TIMES:
        raise ArgumentError(
            f"`{name}` must be a number above 0 and at most {_MOST_TIMES}, got {shown(value)}"
        )
    return factor


def _hashing(contract: Contract, **fields: Any) -> dict[str, Any]:
    if contract.hashing is None:
        raise ArgumentError("`hashing` of the contract must be given to try others, got None")
    old = contract.hashing
    given = {"algorithm": old.algorithm, "seed": old.seed, "release": old.release} | fields
    if given["seed"] is None and "seed" not in fields and "algorithm" not in fields:
        given["start"] = old.start
    return {"hashing": Hashing(**given)}


def _schemas(contract: Contract, **fields: Any) -> dict[str, Any]:
    rows: dict[str, Sequence[KeySchema]] = {}
    for name, row in zip(contract.names, contract.keys, strict=True):
        if row:
            rows[name] = [_schema(schema, fields) for schema in row]
    return {"keys": rows}


def _schema(schema: KeySchema, fields: Mapping[str, Any]) -> KeySchema:
    known: Any = schema
    for name in fields:
        if not hasattr(known, name) or name in schema.rank_fields:
            raise ArgumentError(
                f"`{name}` must be a part of {type(schema).__name__} that a contract does not "
                "fill in, got another"
            )
    made: KeySchema = replace(known, **fields)
    return made


def _grid(contract: Contract, **fields: Any) -> dict[str, Any]:
    grid = contract.ranks
    if grid.kv_heads is None and grid.replication is None:
        fields = {"replication": 1} | fields
    if grid.dcp_size > 1 and fields.get("tp_size", grid.tp_size) % grid.dcp_size:
        raise ArgumentError(
            "`tp_size` must be a multiple of `dcp_size`, "
            f"got {fields.get('tp_size', grid.tp_size)} and {grid.dcp_size}"
        )
    return {"ranks": replace(grid, **fields)}


def _blocks(contract: Contract, factor: float) -> dict[str, Any]:
    """All sizes of blocks, the hash block's too, times a factor."""

    def size(tokens: int) -> int:
        if tokens * factor != int(tokens * factor):
            raise ArgumentError(f"`blocks` must leave whole tokens, got {tokens} times {factor}")
        return int(tokens * factor)

    groups = {
        name: replace(group, block_size=size(group.block_size))  # type: ignore[type-var]
        for name, group in zip(contract.names, contract.groups, strict=True)
    }
    return {
        "groups": groups,
        "hash_block_size": size(contract.hash_block_size),
        "alignment": None,
        "payload": None,
    }


#: What can be tried: a name to a function of a contract and a value, which gives arguments of
#: `Contract` that differ.
CHANGES: Mapping[str, Callable[[Contract, Any], dict[str, Any]]] = {
    "seed": lambda contract, value: _hashing(contract, seed=value),
    "algorithm": lambda contract, value: _hashing(contract, algorithm=value),
    "release": lambda contract, value: _schemas(contract, release=value),
    "model": lambda contract, value: _schemas(contract, model=value),
    "cache_prefix": lambda contract, value: _schemas(contract, cache_prefix=value),
    "namespace": lambda contract, value: _schemas(contract, namespace=value),
    "tp_size": lambda contract, value: _grid(contract, tp_size=_integer("tp_size", value)),
    "pp_size": lambda contract, value: _grid(contract, pp_size=_integer("pp_size", value)),
    "hash_block": lambda _, value: {"hash_block_size": _integer("hash_block", value)},
    "blocks": lambda contract, value: _blocks(contract, _factor("blocks", value)),
}


def changed(contract: Contract, change: Mapping[str, Any]) -> Contract:
    """A contract in which some things are others.

    Args:
        contract: The contract.
        change: Names of `CHANGES` to values.

    Raises:
        ArgumentError: A name is not known, or the contract cannot be like that.
    """
    coord = contract.coordinator
    made: dict[str, Any] = {
        "groups": dict(zip(contract.names, contract.groups, strict=True)),
        "hash_block_size": contract.hash_block_size,
        "keys": {n: row for n, row in zip(contract.names, contract.keys, strict=True) if row},
        "hashing": contract.hashing,
        "alignment": coord.alignment,
        "retention_interval": coord.retention_interval,
        "partial_hits": coord.partial_hits,
        "states": contract.states,
        "ranks": contract.ranks,
        "payload": contract.payload if any(contract.payload) else None,
        "facts": contract.facts,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeyFormatWarning)  # the contract's own keys warned already
        for name, value in change.items():
            if name == "extra_keys":
                continue
            if name not in CHANGES:
                raise ArgumentError(f"`change` must name one of {', '.join(CHANGES)}, got {name!r}")
            if name in ("seed", "algorithm") and {"seed", "algorithm"} <= change.keys():
                made |= _hashing(contract, seed=change["seed"], algorithm=change["algorithm"])
                continue
            made |= CHANGES[name](contract, value)
        return Contract(**made)


def usual_changes(contract: Contract, extra_keys: bool) -> Iterator[dict[str, Any]]:
    """What is often different, the likely things first."""
    if extra_keys:
        yield {"extra_keys": None}
    seeds = list(dict.fromkeys([DEFAULT_SEED, "0", os.environ.get("PYTHONHASHSEED", "0"), "42"]))
    if contract.hashing is not None:
        own = contract.hashing
        yield from ({"seed": seed} for seed in seeds)
        others = [name for name in ALGORITHMS if name != own.algorithm]
        if own.seed is not None:
            yield from ({"algorithm": name, "seed": own.seed} for name in others)
        yield from ({"algorithm": name, "seed": seed} for name in others for seed in seeds)
    schema = next(row[0] for row in contract.keys if row)
    for name in ("cache_prefix", "namespace"):
        if isinstance(schema, VllmKeys | StrictKeys) and bool(getattr(schema, name, "")):
            yield {name: ""}
    if isinstance(schema, VllmKeys) and not all(contract.keys):
        yield {"release": "0.28" if not schema.numbers_all_groups else "0.32"}
    # In vLLM's format the keys of more ranks hold those of fewer: they cannot be all there instead.
    strict = isinstance(schema, StrictKeys)
    for name, sizes in (("tp_size", _TENSOR_SIZES), ("pp_size", _PIPELINE_SIZES)):
        own_size = getattr(contract.ranks, name)
        for size in sizes:
            if size < own_size or (strict and size > own_size):
                yield {name: size}
    yield from ({"hash_block": n} for n in _HASH_BLOCKS if n != contract.hash_block_size)
    yield from ({"blocks": factor} for factor in (2, 0.5))


def look_near(
    contract: Contract,
    store: Existence,
    token_ids: Tokens,
    *,
    extra_keys: Any = None,
    tries: Sequence[Mapping[str, Any]] = (),
    usual: bool = True,
    max_keys: int = MAX_KEYS,
    policy: StorePolicy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[Near, ...], int]:
    """Look a prompt up under contracts that differ in one thing.

    A change that gives the same keys as one before, or that the contract cannot have, is left out.

    Args:
        contract: The contract.
        store: Any object with ``batch_is_exist``.
        token_ids: The prompt.
        extra_keys: As for `Contract.request`.
        tries: Changes to try first: names of `CHANGES` to values.
        usual: Also try what is often different: seeds, algorithms, prefixes, sizes.
        max_keys: Bound of the keys that all tries ask for together.
        policy: What the store's codes mean; Mooncake's by default.
        progress: Called after each try, with the number of tries made and of all.

    Returns:
        (the tries, the number of those that the bound left out).

    Raises:
        ArgumentError: A change of ``tries`` is not known or does not fit.
        StoreError: The store does not answer.
        TypeError: An argument is of another kind.
    """
    check_integer(max_keys, "max_keys", 1)
    check_questions(store, policy, progress)
    policy = MooncakePolicy() if policy is None else policy
    tools = PlanTools(costs=_COSTS, stats=False, log=None)
    seen = {_identity(contract, extra_keys is not None)}
    plans: list[tuple[Mapping[str, Any], LookupPlan]] = []
    asked_for = [_change(change) for change in _sequence(tries)]
    for change in [*asked_for, *(usual_changes(contract, extra_keys is not None) if usual else ())]:
        mine = None if "extra_keys" in change else extra_keys
        try:
            other = changed(contract, change)
            if _identity(other, mine is not None) in seen:
                continue
            seen.add(_identity(other, mine is not None))
            request = other.request(token_ids, extra_keys=_fitting(contract, other, mine))
        except (KVMaskError, TypeError, ValueError):
            if change in asked_for:
                raise
            continue
        plans.append((change, request.lookup_plan(tools=tools)))
    found: list[Near] = []
    left = max_keys
    for number, (change, plan) in enumerate(plans):
        answers, decided = ask_all(plan, store, policy, left)
        if not decided and not answers:  # not even its first call fits
            return tuple(found), len(plans) - number
        left -= len(answers)
        length = plan.result.length if decided else 0
        found.append(Near(change, length, len(answers), decided, answers.count(1)))
        if progress is not None:
            progress(number + 1, len(plans))
    return tuple(found), 0


def _sequence(tries: Any) -> Sequence[Any]:
    if not isinstance(tries, Sequence) or isinstance(tries, str | bytes):
        raise TypeError(f"`tries` must be a sequence of mappings, got {type(tries).__name__}")
    return tries


def _change(change: Any) -> dict[str, Any]:
    if not isinstance(change, Mapping) or not change:
        raise TypeError(f"`tries` must hold mappings of names to values, got {shown(change)}")
    return dict(change)


def _identity(contract: Contract, extras: bool) -> tuple[Any, ...]:
    """What gives keys: equal for contracts whose keys of one prompt are the same."""
    hashing = contract.hashing
    return (
        contract.scheme.namespaces,
        contract.hash_block_size,
        tuple(group.block_size for group in contract.groups),
        hashing and (hashing.algorithm, hashing.check),
        extras,
    )


def _fitting(contract: Contract, other: Contract, extra_keys: Any) -> Any:
    """Extra keys for another hash block; refused where they are a list for this one."""
    if extra_keys is None or callable(extra_keys):
        return extra_keys
    if contract.hash_block_size != other.hash_block_size:
        raise ArgumentError(
            "`extra_keys` must be a function to try another hash block, got a sequence"
        )
    return extra_keys
