"""An engine's KV memory and block tables over a store, for the tests of saves and loads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from fake_store import FakeStore

from kvmask import Coordinator, KVLayout, KVTransfer, VllmKeys

BYTES_PER_TOKEN = 3


def digests(n: int, salt: int = 0) -> list[bytes]:
    return [(i + 1 + (salt << 20)).to_bytes(16, "big") for i in range(n)]


def memory(kind: str, shape: tuple[int, ...], seed: int | None) -> Any:
    """Random bytes, or zeros without a seed, as NumPy array or torch tensor."""
    array = np.zeros(shape, np.uint8)
    if seed is not None:
        array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    if kind == "torch":
        import torch

        return torch.from_numpy(array)
    return array


class Engine:
    """KV memory of every group and a KVTransfer over it.

    Args:
        store: A store or a pool's client.
        coord: The groups.
        tokens: Tokens that the block tables cover.
        seed: None for empty memory.
        kind: "numpy" or "torch".
        layers: Tensors per group.
        options: For KVTransfer.
    """

    def __init__(
        self,
        store: Any,
        coord: Coordinator,
        tokens: int,
        seed: int | None = None,
        kind: str = "numpy",
        layers: int = 2,
        model: str = "m",
        **options: Any,
    ) -> None:
        self.store, self.coord = store, coord
        self.tensors: list[list[Any]] = []
        self.tables: list[list[int]] = []
        layouts = []
        for g, group in enumerate(coord.groups):
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
        self.schemas = [VllmKeys(model, group_id=g) for g in range(len(coord.groups))]
        self.kv = KVTransfer(store, coord, self.schemas, layouts, **options)

    def block(self, group: int, index: int) -> bytes:
        """Bytes of the block at this index of a group's table."""
        block = self.tables[group][index]
        return b"".join(np.asarray(t[block]).tobytes() for t in self.tensors[group])


def pool_of(*engines: Engine) -> dict[str, bytes]:
    return engines[0].store.pool


def key(engine: Engine, group: int, digest: bytes) -> str:
    return engine.schemas[group].key(digest)


def loaded_blocks(hit: Any, start_token: int, coord: Coordinator) -> list[tuple[int, int]]:
    """(group, block index) of all that a load of this hit must fill."""
    return [
        (g, i)
        for g, (group, mask) in enumerate(zip(coord.groups, hit.masks, strict=True))
        for i in mask.indices()
        if i >= start_token // group.block_size
    ]


def assert_loaded(source: Engine, target: Engine, hit: Any, start_token: int = 0) -> int:
    """Every block of the hit has the source's bytes, and no other was touched."""
    wanted = loaded_blocks(hit, start_token, target.coord)
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
    groups: list[Any], hash_block: int, tokens: int, kind: str = "numpy", **options: Any
) -> tuple[Engine, Engine]:
    """An engine with random bytes and an empty one, clients of one pool."""
    coord_options = {
        name: options.pop(name)
        for name in ("alignment", "retention_interval", "partial_hits")
        if name in options
    }
    coord = Coordinator(groups, hash_block, **coord_options)
    store = FakeStore()
    return (
        Engine(store, coord, tokens, seed=5, kind=kind, **options),
        Engine(store.client(), coord, tokens, kind=kind, **options),
    )
