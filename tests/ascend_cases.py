"""Random cases for `ascend_oracle.py`: cache groups, ranks, a request, a store and its failures."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

FAMILIES = ("default", "default", "default", "c1", "c4", "c128", "mixed")


@dataclass(frozen=True)
class Case:
    """One worker, one request and one state of the store."""

    groups: tuple[dict[str, Any], ...]
    worker: dict[str, Any]
    hashes: int
    num_tokens: int
    text: bool
    held: int
    present: tuple[tuple[bool, ...], ...]
    ids: tuple[int, ...]
    fails: int | None
    aligned_tokens: int
    num_prompt_tokens: int | None
    mask_num: int
    shard: tuple[int, int]
    skip_null: bool
    every: int
    seed: int

    @property
    def alignment(self) -> int:
        """What hits are multiples of, ranks and families left out."""
        return math.lcm(*(g["block_size"] for g in self.groups if g.get("cacheable", True)))


def random_span(rng: random.Random, size: int) -> int:
    """Windows beside whole numbers of blocks."""
    return max(1, rng.choice((0, 1, 1, 2, 2, 3, 4, 7, 9)) * size + rng.choice((-1, 0, 1, 1, 2)))


def random_groups(rng: random.Random, unit: int, scales: tuple[int, ...]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    eagle_rate = rng.choice((0, 0, 0, 0.5))
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))):
        if groups and rng.random() < 0.25:
            groups.append({**rng.choice(groups), "eagle": rng.random() < eagle_rate})
            continue
        kind = rng.choice(("full", "full", "window", "window", "window", "state"))
        size = unit * rng.choice(scales)
        groups.append(
            {
                "kind": kind,
                "block_size": size,
                "span": random_span(rng, size) if kind == "window" else 0,
                "tag": rng.choice((0, 0, 0, 1)),
                "cacheable": rng.random() > 0.05,
                "eagle": rng.random() < eagle_rate,
            }
        )
    if not any(g["cacheable"] for g in groups):
        groups[0]["cacheable"] = True
    return groups


def near(rng: random.Random, unit: int, high: int) -> int:
    """A length from 0 to high, most often on or beside a multiple of the unit."""
    if rng.random() < 0.2:
        return rng.randint(0, high)
    value = rng.randint(0, high // unit) * unit + rng.choice((0, 0, -1, 1))
    return min(max(value, 0), high)


def random_case(seed: int, number: int, families: bool = True) -> Case:
    """Case `number` of a seed, always the same."""
    rng = random.Random(f"{seed}/{number}")
    unit = rng.choice((1, 2, 4, 16))
    scales = rng.choice(((1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 2, 3), (2, 3, 4), (6,)))
    groups = random_groups(rng, unit, scales)
    kinds = {g["kind"] for g in groups}
    worker: dict[str, Any] = {
        "hash_block_size": rng.choice((unit, unit, None)),
        "retention": rng.choice((None, None, None, 0, unit * 2, unit * 6, unit * 24, unit * 7)),
        "eagle": rng.random() < 0.15,
        "tp_size": rng.choice((1, 1, 1, 2, 4)),
        "pp_size": rng.choice((1, 1, 1, 2)),
        "dcp_size": rng.choice((1, 1, 1, 2)) if kinds == {"full"} else 1,
        "kv_heads": rng.choice((1, 2, 8)),
        "mla": rng.random() < 0.3,
        "max_model_len": rng.choice((1 << 20, 1 << 20, 50 * unit)),
        "hybrid": rng.random() < 0.93,
    }
    if families and rng.random() < 0.4:
        worker["families"] = [
            rng.choice(FAMILIES) if g["kind"] != "state" else "default" for g in groups
        ]
    sizes = [g["block_size"] for g in groups if g["cacheable"]]
    alignment = math.lcm(*sizes) * worker["dcp_size"]
    most = alignment * rng.choice((1, 2, 3, 5, 9)) + rng.randint(0, alignment)
    hashes = max(0, most // (unit * worker["dcp_size"]) + rng.choice((0, 0, 0, 1, -1, 3)))
    n = len(groups)
    density = rng.choice((1.0, 1.0, 0.98, 0.9, 0.6, 0.2))
    cut = rng.random()
    present = []
    for _ in groups:
        edge = int(hashes * rng.choice((cut, 1.0, 1.0)))
        present.append(tuple(i < edge and rng.random() < density for i in range(hashes)))
    ids = list(range(n))
    if rng.random() < 0.05:
        rng.shuffle(ids)
    if rng.random() < 0.05:
        ids = ids[: rng.randint(1, n)]
    num_tokens = near(rng, alignment, most)
    return Case(
        groups=tuple(groups),
        worker=worker,
        hashes=hashes,
        num_tokens=num_tokens,
        text=rng.random() < 0.5,
        held=near(rng, alignment, max(num_tokens, 1)) if rng.random() < 0.3 else 0,
        present=tuple(present),
        ids=tuple(ids),
        fails=rng.choice((0, 1, 2)) if rng.random() < 0.05 else None,
        aligned_tokens=rng.randint(0, 8) * alignment + (rng.random() < 0.03),
        num_prompt_tokens=None if rng.random() < 0.3 else near(rng, alignment, most),
        mask_num=near(rng, alignment, most) if rng.random() < 0.5 else 0,
        shard=(rng.randint(0, 3), rng.choice((1, 1, 2, 4))),
        skip_null=rng.random() < 0.5,
        every=rng.choice((0, 0, 1, 2, 3)),
        seed=rng.randrange(1 << 30),
    )
