"""Models and lengths for all benches, with inputs and expected results in plain Python."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvmask import BlockHashes, Contract, Coordinator, FullAttention, SlidingWindow, VllmKeys
from kvmask.groups import Group

MODEL = "DeepSeek-V4"
DIGEST_BYTES = 32
LENGTHS = (8_192, 131_072, 1_048_576)


@dataclass(frozen=True)
class Shape:
    """Groups of a model, as an engine would configure them."""

    name: str
    groups: tuple[Group, ...]
    hash_block: int
    alignment: int

    def coordinator(self) -> Coordinator:
        return Coordinator(self.groups, self.hash_block, self.alignment)

    def contract(self) -> Contract:
        return Contract(
            self.groups,
            self.hash_block,
            VllmKeys(MODEL),
            hashing=None,  # the digests are random bytes
            alignment=self.alignment,
        )

    def schemas(self) -> list[VllmKeys]:
        return [VllmKeys(MODEL, group_id=g) for g in range(len(self.groups))]

    def blocks(self, num_tokens: int) -> list[int]:
        return [num_tokens // g.block_size for g in self.groups]

    def masks(self, num_tokens: int) -> list[list[bool] | None]:
        """Return the store masks, by a simple rule without retention and EAGLE.

        A block of a window group is stored when it is one of the last `need` blocks before an
        aligned boundary.
        """
        out: list[list[bool] | None] = []
        for group in self.groups:
            per = self.alignment // group.block_size
            if not isinstance(group, SlidingWindow):
                out.append(None)
                continue
            need = -(-(group.window - 1) // group.block_size)
            if need >= per:
                out.append(None)
            else:
                out.append([i % per >= per - need for i in range(num_tokens // group.block_size)])
        return out

    def keys(self, digests: bytes, num_tokens: int) -> list[str]:
        """Return the keys of all blocks that the masks select, made by string formatting."""
        keys = []
        for g, (group, mask) in enumerate(zip(self.groups, self.masks(num_tokens), strict=True)):
            prefix = f"{MODEL}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:{g}"
            step = group.block_size // self.hash_block * DIGEST_BYTES
            for i in range(num_tokens // group.block_size):
                if mask is None or mask[i]:
                    end = (i + 1) * step
                    keys.append(f"{prefix}@{digests[end - DIGEST_BYTES : end].hex()}")
        return keys


# The window groups of a Gemma model have different tensors, so they get different specs. Their
# block sizes and windows are equal.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "dsv4",
            (
                FullAttention(256),
                SlidingWindow(64, window=128),
                SlidingWindow(64, window=512),
                SlidingWindow(4, window=16),
                SlidingWindow(8, window=64),
            ),
            4,
            256,
        ),
        Shape(
            "gemma",
            (FullAttention(16), *(SlidingWindow(16, window=1024, spec=i) for i in (1, 2, 3))),
            16,
            16,
        ),
        Shape("full16", (FullAttention(16),), 16, 16),
    )
}


def block_hashes(buffer: bytes) -> BlockHashes:
    """Return digests in one buffer as an engine passes them, without a copy."""
    return BlockHashes(buffer, DIGEST_BYTES)


@functools.lru_cache(4)
def digests(shape: Shape, num_tokens: int) -> bytes:
    """Return one random digest per hash block, in one buffer."""
    return random.Random(num_tokens).randbytes(num_tokens // shape.hash_block * DIGEST_BYTES)


def holes(shape: Shape, num_tokens: int, every: int = 1000) -> list[list[bool]]:
    """Return presence with a few random missing blocks per group, none in the first quarter."""
    pick = random.Random(3)
    present = []
    for n in shape.blocks(num_tokens):
        bits = [True] * n
        for _ in range(max(1, n // every)):
            bits[pick.randrange(n // 4, n)] = False
        present.append(bits)
    return present


class Always:
    """A store that takes no time. Every key gets the same answer, from a list made beforehand."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.lists: dict[int, list[int]] = {}
        self.asked = 0
        self.calls = 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        n = len(keys)
        self.asked += n
        self.calls += 1
        if n not in self.lists:
            self.lists[n] = [self.answer] * n
        return self.lists[n]

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: Sequence[object], sizes: Sequence[object], *config: object
    ) -> list[int]:
        return [0] * len(keys)

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0
