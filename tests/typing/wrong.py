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
contract = kvmask.Contract([kvmask.FullAttention(16)], 16, kvmask.VllmKeys("m"))
kvmask.Contract([kvmask.FullAttention(16)], 16)  # E: call-arg
kvmask.Contract(kvmask.FullAttention(16), 16, kvmask.VllmKeys("m"))  # E: arg-type
kvmask.Contract([kvmask.FullAttention(16)], 16, "m")  # E: arg-type
contract.to_json(True)  # E: call-arg
contract.bind([], rank=0)  # E: call-arg
contract.request(hashes=[b"a"], num_tokens="16")  # E: arg-type
kvmask.RankGrid(tp_size="8")  # E: arg-type
kvmask.LookupPlan(contract, [b"a"])  # E: call-arg
kvmask.LookupPlan(contract, [b"a"], 16, 4)  # E: call-arg
contract.differences("text")  # E: arg-type
kvmask.PlanTools(memo=5)  # E: arg-type
kvmask.KVLayout.from_tensors([], "4")  # E: arg-type
kvmask.hash_tokens([1], block_size="16")  # E: arg-type
kvmask.hash_tokens(5)  # E: arg-type
kvmask.hash_tokens("12")  # E: arg-type
contract.request(5)  # E: arg-type
contract.request([1.5])  # E: list-item
contract.request([1, 2]).extend(3)  # E: arg-type
contract.request([1, 2]).lookup_plan(strategy="fast")  # E: arg-type
kvmask.LookupPlan(contract, [b"a"], 16, strategy="fast")  # E: arg-type
kvmask.KVTransfer(None, contract)  # E: arg-type


def uses(kv: kvmask.KVTransfer, request: kvmask.CacheRequest, hit: kvmask.Hit) -> None:
    kv.lookup([b"a"])  # E: arg-type
    kv.lookup(request, strategy="fast")  # E: arg-type
    kv.lookup(request, local_tokens=0)  # E: call-arg
    kv.load(request, hit)  # E: call-arg
    request.saved(kv.load(request, hit, [[1]]))  # E: arg-type
    kvmask.LoadPlan(contract, [b"a"], [[1]], hit)  # E: arg-type
    kv.save(request, [[1]], "16")  # E: arg-type
    hit.length = 3  # E: misc
