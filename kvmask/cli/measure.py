"""`kvmask bench`: a quick measurement on this machine. It needs only kvmask, and no store.

It takes two seconds and works with an installed package. The benches in the repository are more
thorough: they compare with vLLM and give statistics.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from kvmask._core import Bitset, BlockHashes
from kvmask.contract import Contract
from kvmask.errors import ArgumentError
from kvmask.groups import FullAttention, Group, SlidingWindow
from kvmask.keys.vllm import VllmKeys
from kvmask.layout import KVLayout
from kvmask.plans.lookup import STRATEGIES, LookupPlan, Strategy
from kvmask.plans.tools import PlanTools

SHAPES: dict[str, tuple[Sequence[Group], int]] = {
    "DeepSeek-V4": (
        (
            FullAttention(256),
            SlidingWindow(64, window=128),
            SlidingWindow(64, window=512),
            SlidingWindow(4, window=16),
            SlidingWindow(8, window=64),
        ),
        4,
    ),
    "Gemma": ((FullAttention(16), *(SlidingWindow(16, window=1024),) * 3), 16),
    "full 16": ((FullAttention(16),), 16),
}
REGIONS = 61
# The addresses of all blocks in all regions are Python ints. At this length they take about 2 GB.
MAX_TOKENS = 1 << 22


def best(call: Callable[[], object], repeat: int) -> float:
    """Return the seconds of the fastest of `repeat` runs, the one least disturbed by others."""
    fastest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def lookup(
    contract: Contract, tools: PlanTools, hashes: BlockHashes, tokens: int, how: Strategy
) -> LookupPlan:
    """Run a whole lookup. Its store has all keys and takes no time."""
    plan = LookupPlan(contract, hashes, tokens, strategy=how, tools=tools)
    while (call := plan.next_call()) is not None:
        plan.feed([1] * len(call.args[0]))
    return plan


def measure(shape: str, num_tokens: int, repeat: int = 5) -> list[tuple[str, float, int]]:
    """Time each step for one shape and length.

    Args:
        shape: A name of `SHAPES`.
        num_tokens: Tokens of the request, rounded down to the alignment. All blocks are present.
        repeat: Runs of each step. The fastest counts.

    Raises:
        ArgumentError: The shape is unknown, `num_tokens` is out of range, or `repeat` is below 1.

    Returns:
        Per step its name, its seconds, and the number of keys or blocks that it handled.
    """
    if shape not in SHAPES:
        raise ArgumentError(f"`shape` must be one of {', '.join(SHAPES)}, got {shape!r}")
    groups, hash_block = SHAPES[shape]
    # The digests are random bytes, so no start hash is needed.
    contract = Contract(groups, hash_block, VllmKeys("DeepSeek-V4"), hashing=None)
    coord = contract.coordinator
    if repeat < 1:
        raise ArgumentError(f"`repeat` must be at least 1, got {repeat}")
    if not coord.alignment <= num_tokens <= MAX_TOKENS:
        raise ArgumentError(
            f"`tokens` must be from {coord.alignment} to {MAX_TOKENS} for {shape!r}, "
            f"got {num_tokens}"
        )
    num_tokens = coord.align(num_tokens)
    digests = random.Random(0).randbytes(num_tokens // hash_block * 32)
    hashes = BlockHashes(digests, 32)
    schemas = [VllmKeys("DeepSeek-V4", group_id=g) for g in range(len(groups))]
    masks = coord.store_mask(num_tokens)
    blocks = [num_tokens // g.block_size for g in groups]
    present = [Bitset.ones(n) for n in blocks]
    stride = 4096
    layout = KVLayout.from_regions(
        [(stride * (blocks[0] + 1) * r + stride, 512, stride) for r in range(REGIONS)],
        blocks[0],
        storages=[(stride, stride * (blocks[0] + 1) * REGIONS)],
    )
    ids = list(range(blocks[0]))

    def keys() -> list[str]:
        scales = [g.block_size // hash_block for g in groups]
        rows = zip(schemas, masks, scales, strict=True)
        return list(itertools.chain(*(s.keys(hashes, m, scale=k) for s, m, k in rows)))

    stored = len(keys())
    rows = [
        ("store_mask", best(lambda: coord.store_mask(num_tokens), repeat), sum(blocks)),
        ("find_hit", best(lambda: coord.find_hit(present, num_tokens), repeat), sum(blocks)),
        ("keys of a save", best(keys, repeat), stored),
        (
            f"addresses, {REGIONS} regions",
            best(lambda: layout.addresses(ids), repeat),
            len(ids) * REGIONS,
        ),
    ]
    tools = PlanTools()
    for how in reversed(STRATEGIES):

        def run(how: Strategy = how) -> LookupPlan:
            return lookup(contract, tools, hashes, num_tokens, how)

        asked = run().asked
        seconds = best(run, repeat)
        rows.append((f"lookup, {how}", seconds, asked))
    return rows
