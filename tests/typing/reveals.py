"""What the types of the public interface are. Read by mypy, never run.

`# R:` is the type that mypy must reveal on the line.
"""

import array
from typing import reveal_type

import kvmask

coord = kvmask.Coordinator([kvmask.FullAttention(64), kvmask.SlidingWindow(16, window=32)], 16)
reveal_type(coord.store_mask(256))  # R: tuple[kvmask._core.Bitset | None, ...]
reveal_type(coord.load_mask(256))  # R: tuple[kvmask._core.Bitset, ...]
reveal_type(coord.align(100))  # R: int

mask = kvmask.Bitset.from_indices(8, [0, 5])
reveal_type(mask[0])  # R: bool
reveal_type(mask[1:3])  # R: kvmask._core.Bitset
reveal_type(~mask & kvmask.Bitset.ones(8))  # R: kvmask._core.Bitset
reveal_type(mask.runs())  # R: list[tuple[int, int]]
reveal_type(next(iter(mask)))  # R: bool

hit = coord.find_hit([[True], mask], 64)
reveal_type(hit)  # R: kvmask.coordinator.Hit
reveal_type(hit.masks)  # R: tuple[kvmask._core.Bitset, ...]
reveal_type(hit.tail_tokens)  # R: tuple[int, ...]

hashes = kvmask.hash_tokens([1, 2, 3], block_size=1)
reveal_type(hashes)  # R: kvmask._core.BlockHashes
reveal_type(hashes[0])  # R: bytes
reveal_type(hashes.digest_size)  # R: int | None

schema = kvmask.VllmKeys("m")
reveal_type(schema.prefix)  # R: str
reveal_type(schema.keys(hashes, mask=mask))  # R: list[str]

layout = kvmask.KVLayout.from_regions([(4096, 64, 64)], 4, storages=[(4096, 256)])
reveal_type(layout.addresses([0]))  # R: tuple[list[list[int]], list[list[int]]]

contract = kvmask.Contract({"full": kvmask.FullAttention(16)}, 16, schema)
reveal_type(contract.fingerprint)  # R: str
reveal_type(contract.to_json())  # R: str
reveal_type(kvmask.Contract.from_json("{}"))  # R: kvmask.contract.agreement.Contract
bound = contract.bind([layout], tp_rank=0)
reveal_type(bound)  # R: kvmask.contract.bound.BoundContract
reveal_type(bound.layouts)  # R: tuple[tuple[kvmask.layout.KVLayout, ...], ...]
request = contract.request(range(33))
reveal_type(request)  # R: kvmask.request.CacheRequest
reveal_type(request.mark)  # R: int
contract.request(memoryview(array.array("q", [1, 2]))).extend(array.array("i", [3]))
contract.request((1, 2)).lookup_plan(strategy="exact")

plan = kvmask.LookupPlan(contract, hashes, 256)
reveal_type(plan.asked)  # R: int
reveal_type(plan.result)  # R: kvmask.coordinator.Hit
reveal_type(kvmask.SavePlan(bound, hashes, [[1]], 16).result)  # R: kvmask.plans.results.SaveResult


def uses(kv: kvmask.KVTransfer) -> None:
    reveal_type(kv.lookup(request, held=16))  # R: kvmask.coordinator.Hit
    reveal_type(kv.save(request, [[1]], 16))  # R: kvmask.plans.results.SaveResult
    reveal_type(kv.load(request, hit, [[1]]))  # R: kvmask.plans.results.LoadResult
    reveal_type(kv.stats.snapshot())  # R: dict[str, float]
