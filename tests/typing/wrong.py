"""Calls that the types must refuse. Read by mypy, never run.

`# E:` is the code of the error that mypy must report on the line.
"""

import kvmask

kvmask.FullAttention("64")  # E: arg-type
kvmask.SlidingWindow(16)  # E: call-arg
kvmask.FullAttention(16).block_size = 32  # E: misc
coord = kvmask.Coordinator([kvmask.FullAttention(16)])  # E: call-arg
coord.store_mask("256")  # E: arg-type
coord.store_mask(256)[0].count()  # E: union-attr
coord.find_hit(5, 64)  # E: arg-type

mask = kvmask.Bitset.ones(8)
mask[0] = True  # E: index
mask + mask  # E: operator
mask & [True] * 8  # E: operator
kvmask.Bitset.from_indices(8, ["0"])  # E: list-item

kvmask.BlockHashes(b"abcd")  # E: call-arg
kvmask.BlockHashes([b"abcd"], 4)  # E: arg-type
kvmask.VllmKeys()  # E: call-arg
kvmask.VllmKeys("m").keys(["digest"])  # E: list-item
kvmask.LookupPlan(coord, [object()], [b"a"], 16)  # E: list-item
kvmask.KVLayout.from_tensors([], "4")  # E: arg-type
kvmask.hash_tokens([1], block_size="16")  # E: arg-type


def uses(kv: kvmask.KVTransfer, hit: kvmask.Hit) -> None:
    kv.lookup([b"a"], 256, local="0")  # E: call-arg
    kv.load([b"a"], [[1]])  # E: call-arg
    kv.save([b"a"], [["1"]], 16)  # E: list-item
    hit.length = 3  # E: misc
