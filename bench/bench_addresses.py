"""Addresses and sizes of blocks: kvmask, plain Python and, if it is installed, vLLM.

Every bench first asserts that its result equals that of the plain Python reference. Block ids are
shuffled, as in a block table of a running engine. Compare only figures of one run. `extra_info`
holds the ns per address.

"made" does not time the release of a result, because a transfer holds its addresses until the store
has answered. "made and freed" does. It spends most of its time in the allocator: one int per
address for kvmask, two for vLLM, which also creates the sizes each time.
"""

import random

import pytest

from kvmask.layout import KVLayout

BASE = 0x7F00_0000_0000
BLOCK_BYTES = 30_208
NUM_BLOCKS = 32_768
STORAGE = BLOCK_BYTES * NUM_BLOCKS

# (regions per block, blocks): 61 layers, and a block-major cache with one region per block
SHAPES = [(61, 64), (61, 2048), (1, 64), (1, 8192)]


def block_ids(count):
    return random.Random(7).sample(range(NUM_BLOCKS), count)


def bases(num_regions):
    return [BASE + i * (1 << 32) for i in range(num_regions)]


def reference(num_regions, ids):
    rows = [[base + i * BLOCK_BYTES for base in bases(num_regions)] for i in ids]
    return rows, [[BLOCK_BYTES] * num_regions for _ in ids]


def note(benchmark, num_regions, count):
    if benchmark.stats is not None:  # None with --benchmark-disable
        per_address = benchmark.stats.stats.median / (num_regions * count) * 1e9
        benchmark.extra_info["ns_per_address"] = round(per_address, 1)


def kvmask_call(num_regions):
    layout = KVLayout.from_regions(
        [(base, BLOCK_BYTES, BLOCK_BYTES) for base in bases(num_regions)],
        NUM_BLOCKS,
        [(base, STORAGE) for base in bases(num_regions)],
    )
    return layout.addresses


def python_call(num_regions):
    return lambda ids: reference(num_regions, ids)


def vllm_call(num_regions):
    data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")
    layout = data.RankLocalStoreLayout(data.KeyMetadata("bench", 0, 0, 0, 0), 16, 16)
    layout.set_kv_caches_base_addr(bases(num_regions))
    layout.set_block_len([BLOCK_BYTES] * num_regions)

    def call(ids):
        chunks = [(i * 16, i * 16 + 16) for i in range(len(ids))]
        shards = [0] * len(ids)
        return lambda: layout.prepare_values(chunks, ids, shards)[:2]

    return call


@pytest.mark.parametrize(("num_regions", "count"), SHAPES)
@pytest.mark.parametrize("who", ["kvmask", "python", "vllm"])
@pytest.mark.parametrize("what", ["made", "made and freed"])
def bench_addresses(benchmark, what, who, num_regions, count):
    benchmark.group = f"addresses {what}: {num_regions} regions, {count} blocks"
    ids = block_ids(count)
    if who == "vllm":
        run = vllm_call(num_regions)(ids)
    else:
        call = {"kvmask": kvmask_call, "python": python_call}[who](num_regions)

        def run():
            return call(ids)

    addresses, sizes = run()
    assert (addresses, sizes) == reference(num_regions, ids)
    if what == "made":
        held = []
        rounds = max(20, 2_000_000 // (num_regions * count))
        benchmark.pedantic(lambda: held.append(run()), setup=held.clear, rounds=min(rounds, 2000))
    else:
        benchmark(run)
    note(benchmark, num_regions, count)
