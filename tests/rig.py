"""An engine's KV memory and block tables over a store, for the tests of plans and transfers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fake_store import FakeStore

from kvmask import ChunkedLocal, Contract, Coordinator, KVLayout, KVTransfer, VllmKeys, drive
from kvmask._core import build_keys
from kvmask.coordinator import group_row
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import EXISTS, GET, PUT, GroupScheme, PlanTools, Scheme

BYTES_PER_TOKEN = 3
COORD_OPTIONS = ("alignment", "retention_interval", "partial_hits")


def digests(n: int, salt: int = 0) -> list[bytes]:
    return [(i + 1 + (salt << 20)).to_bytes(16, "big") for i in range(n)]


def flat_layout(num_blocks: int = 1 << 14, size: int = 64) -> KVLayout:
    """Blocks of so many bytes, one behind the other; nothing lies there."""
    return KVLayout.from_regions(
        [(1 << 20, size, size)], num_blocks, [(1 << 20, size * num_blocks)]
    )


def scheme_of(
    coord: Coordinator,
    layouts: Sequence[Any] | None = None,
    *,
    schemas: Sequence[Any] | None = None,
    lookup_schemas: Sequence[Any] | None = None,
    writers: Sequence[int] | None = None,
    writer: int = 0,
    **options: Any,
) -> Scheme:
    """A scheme without a contract, so that a test can state any part of it.

    Args:
        coord: The groups.
        layouts: Per group a layout, or one per shard; None for lookups alone.
        schemas: Per group this rank's key schema, or one per shard.
        lookup_schemas: Per group the schemas of all ranks; by default this rank's.
        writers: Per group how many ranks hold the same bytes.
        writer: This rank's number among them: it writes blocks ``i`` of group ``g`` with
            ``i % writers == (writer + g) % writers``.
        options: Further fields of Scheme.
    """

    def rows(items: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [tuple(i) if isinstance(i, list | tuple) else (i,) for i in items]

    n = len(coord.groups)
    own = rows([VllmKeys("m", group_id=g) for g in range(n)] if schemas is None else schemas)
    every = own if lookup_schemas is None else rows(lookup_schemas)
    places = rows([()] * n if layouts is None else layouts)
    steps = [1] * n if writers is None else writers
    made = []
    for g, group in enumerate(coord.groups):
        kind, size, span = group_row(group)
        cacheable = group.prefix_cacheable
        made.append(
            GroupScheme(
                g,
                f"group{g}",
                kind,
                size,
                span,
                cacheable,
                tuple(s.builder for s in every[g]) if cacheable else (),
                tuple(s.builder for s in own[g]) if cacheable and layouts is not None else (),
                places[g] if cacheable else (),
                steps[g],
                (writer + g) % steps[g],
            )
        )
    return Scheme(coord, tuple(made), bound=layouts is not None, **options)


def mooncake_tools(**options: Any) -> PlanTools:
    """Tools with Mooncake's policy: options are the policy's, but for those of PlanTools."""
    mine = {
        name: options.pop(name)
        for name in (
            "costs",
            "hints",
            "memo",
            "failed_loads",
            "breaker",
            "null_block",
            "stats",
            "log",
        )
        if name in options
    }
    return PlanTools(MooncakePolicy(**options), **mine)


def coord_of(groups: list[Any], hash_block: int, options: dict[str, Any]) -> Coordinator:
    """A coordinator; takes its options out of ``options``."""
    mine = {name: options.pop(name) for name in COORD_OPTIONS if name in options}
    return Coordinator(groups, hash_block, **mine)


def answer_with(plan: Any, answer: Callable[[Any], Any]) -> list[Any]:
    """Drive a plan with a function from its call to the answer; returns the calls."""
    calls = []
    while (call := plan.next_call()) is not None:
        calls.append(call)
        plan.feed(answer(call))
        assert len(calls) < 5000
    return calls


def ask(plan: Any, present: Any) -> list[list[str]]:
    """Drive a lookup against a set of keys or a function of one; returns the keys of each call."""
    there = present if callable(present) else present.__contains__
    calls = answer_with(plan, lambda call: [int(there(key)) for key in call.args[0]])
    assert all(call.name == EXISTS for call in calls)
    return [call.args[0] for call in calls]


def keys_of(calls: Sequence[Any], name: str) -> list[str]:
    """The keys of all calls of this name."""
    return [key for call in calls if call.name == name for key in call.args[0]]


def memory(kind: str, shape: tuple[int, ...], seed: int | None) -> Any:
    """Random bytes, or zeros without a seed, as NumPy array or torch tensor."""
    array = np.zeros(shape, np.uint8)
    if seed is not None:
        array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    if kind == "torch":
        import torch

        return torch.from_numpy(array)
    return array


def contract_of(
    groups: Any, hash_block: int, keys: Any = None, *, model: str = "m", **options: Any
) -> Contract:
    """A contract over digests that nobody hashes."""
    options.setdefault("hashing", None)
    return Contract(groups, hash_block, VllmKeys(model) if keys is None else keys, **options)


def whole_chunks(group: Any) -> Any:
    """The group with attention chunks of whole blocks, as a contract demands them."""
    if not isinstance(group, ChunkedLocal):
        return group
    return replace(group, chunk_size=-(-group.chunk_size // group.block_size) * group.block_size)


class Engine:
    """KV memory of every group of a contract, and a KVTransfer over it.

    Args:
        store: A store or a pool's client.
        contract: The contract, of one rank.
        tokens: Tokens that the block tables cover.
        seed: None for empty memory.
        kind: "numpy" or "torch".
        layers: Tensors per group.
        bind: For ``Contract.bind``.
        options: For MooncakePolicy or KVTransfer.
    """

    def __init__(
        self,
        store: Any,
        contract: Contract,
        tokens: int,
        seed: int | None = None,
        kind: str = "numpy",
        layers: int = 2,
        bind: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.store, self.contract, self.coord = store, contract, contract.coordinator
        self.tensors: list[list[Any]] = []
        self.tables: list[list[int]] = []
        layouts = []
        for g, group in enumerate(contract.groups):
            count = -(-tokens // group.block_size)
            blocks = count + 2
            shape = (blocks, group.block_size, BYTES_PER_TOKEN + g)
            tensors = [
                memory(kind, shape, None if seed is None else seed * 1000 + 10 * g + n)
                for n in range(layers)
            ]
            self.tensors.append(tensors)
            order = random.Random((seed or 0) + g).sample(range(1, blocks), count)
            self.tables.append(order)
            layouts.append(KVLayout.from_tensors(tensors, num_blocks=blocks))
        self.bound = contract.bind(layouts, **(bind or {}))
        policy = {
            name: options.pop(name)
            for name in ("max_pieces", "staging", "replicate_config", "group_ids")
            if name in options
        }
        if policy:
            options["policy"] = MooncakePolicy(**policy)
        self.kv = KVTransfer(store, self.bound, **options)

    def request(self, hashes: Any, num_tokens: int | None = None, **options: Any) -> Any:
        """A request that is made from digests."""
        return self.contract.request(hashes=hashes, num_tokens=num_tokens, **options)

    def lookup(self, hashes: Any, num_tokens: int, held: Any = 0, **options: Any) -> Any:
        """The hit of a new request."""
        return self.kv.lookup(self.request(hashes, num_tokens), held, **options)

    def save(
        self,
        hashes: Any,
        num_tokens: int,
        start_token: int = 0,
        *,
        tables: Any = None,
        prompt: int | None = None,
        event: Any = None,
    ) -> Any:
        """Save a request that is saved up to ``start_token``."""
        request = self.request(hashes, num_prompt_tokens=prompt)
        request.mark = start_token
        return self.kv.save(
            request, self.tables if tables is None else tables, num_tokens, event=event
        )

    def load(self, hashes: Any, hit: Any, *, tables: Any = None, **options: Any) -> Any:
        """Load a hit into this engine's memory."""
        tables = self.tables if tables is None else tables
        return self.kv.load(self.request(hashes), hit, tables, **options)

    def block(self, group: int, index: int) -> bytes:
        """Bytes of the block at this index of a group's table."""
        block = self.tables[group][index]
        return b"".join(np.asarray(t[block]).tobytes() for t in self.tensors[group])


def key(engine: Engine, group: int, digest: bytes) -> str:
    """The key of a digest in this rank's first namespace of a group."""
    return build_keys(engine.bound.scheme.groups[group].own[:1], [digest])[0]


def loaded_blocks(hit: Any, start_token: int, coord: Coordinator) -> list[tuple[int, int]]:
    """(group, block index) of all that a load of this hit must fill, when the engine holds every
    whole block below ``start_token``."""
    return [
        (g, i)
        for g, (group, mask) in enumerate(zip(coord.groups, hit.masks, strict=True))
        for i in mask.indices()
        if i >= start_token // group.block_size
    ]


def assert_loaded(source: Engine, target: Engine, hit: Any, start_token: int = 0) -> int:
    """Every block of the hit has the source's bytes, and no other was touched."""
    return assert_blocks(source, target, loaded_blocks(hit, start_token, target.coord))


def assert_blocks(source: Engine, target: Engine, wanted: list[tuple[int, int]]) -> int:
    """These blocks have the source's bytes, and no other was touched; returns their number."""
    for g, i in wanted:
        assert target.block(g, i) == source.block(g, i), (g, i)
    for g, tensors in enumerate(target.tensors):
        touched = {target.tables[g][i] for group, i in wanted if group == g}
        for tensor in tensors:
            for block in range(len(tensor)):
                if block not in touched:
                    assert not np.asarray(tensor[block]).any(), (g, block)
    return len(wanted)


def pair(
    groups: Any, hash_block: int, tokens: int, kind: str = "numpy", **options: Any
) -> tuple[Engine, Engine]:
    """An engine with random bytes and an empty one, clients of one pool."""
    mine = {
        name: options.pop(name)
        for name in (*COORD_OPTIONS, "keys", "states", "model")
        if name in options
    }
    contract = contract_of(groups, hash_block, **mine)
    store = FakeStore()
    return (
        Engine(store, contract, tokens, seed=5, kind=kind, **options),
        Engine(store.client(), contract, tokens, kind=kind, **options),
    )


__all__ = [
    "EXISTS",
    "GET",
    "PUT",
    "Engine",
    "answer_with",
    "ask",
    "assert_blocks",
    "assert_loaded",
    "contract_of",
    "coord_of",
    "digests",
    "drive",
    "flat_layout",
    "key",
    "keys_of",
    "loaded_blocks",
    "memory",
    "mooncake_tools",
    "pair",
    "scheme_of",
    "whole_chunks",
]
