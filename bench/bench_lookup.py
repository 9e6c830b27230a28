"""A whole lookup without the store: keys, calls, hit. The store's answers are made beforehand.

`exact` asks for the same keys as vLLM. `staged` has no hint. `hinted` is the default of KVTransfer:
`staged` with a hint from an earlier request of this process with the same prefix.
"""

import pytest
import vllm_side
from shapes import LENGTHS, SHAPES, Always, block_hashes, digests

from kvmask import KVTransfer

TARGETS = {
    ("dsv4", "exact"): 30,
    ("dsv4", "hinted"): 200,
    ("gemma", "exact"): 15,
    ("gemma", "hinted"): 80,
    ("full16", "exact"): 30,
    ("full16", "hinted"): 30,
}
# With full attention this many tokens give 4,096 keys. The allocator can still reuse the memory of
# so many.
WARM = 65_536
MAX_NS = {WARM: 40, 131_072: 100}
CASES = [
    *((name, tokens, "present") for name in SHAPES for tokens in LENGTHS),
    ("full16", WARM, "present"),
    *((name, 131_072, "missing") for name in SHAPES),
]


@pytest.mark.parametrize("how", ["exact", "staged", "hinted"])
@pytest.mark.parametrize(("name", "tokens", "there"), CASES)
def bench_lookup(pair, name, tokens, there, how):
    shape = SHAPES[name]
    buffer = digests(shape, tokens)
    store = Always(int(there == "present"))
    strategy = "exact" if how == "exact" else "staged"
    contract = shape.contract()
    kv = KVTransfer(store, contract, hints=how == "hinted" or None)

    def ours():
        request = contract.request(hashes=block_hashes(buffer), num_tokens=tokens)
        return kv.lookup(request, strategy=strategy)

    # The last token is always computed. Without it, round down to the alignment.
    expected = (tokens - 1) // shape.alignment * shape.alignment if there == "present" else 0
    assert ours().length == expected
    hit = ours()
    assert hit.length == expected
    theirs = None
    if vllm_side.available():
        reference = Always(store.answer)
        call = vllm_side.lookup(shape, reference)

        def theirs():
            return call(tokens, buffer)

        assert theirs() == expected
        assert reference.asked == hit.exact_keys
        if how == "exact":
            assert hit.asked == hit.exact_keys
    aim = {}
    if there == "present" and how == "exact" and name == "full16" and tokens in MAX_NS:
        aim = {"max_ns": MAX_NS[tokens]}
    elif there == "present" and tokens == 131_072:
        aim = {"target": TARGETS.get((name, how))}
    pair(
        f"lookup {how}, {name}, {tokens:,} tokens, all {there}: {hit.asked} keys",
        ours,
        theirs,
        keys=hit.asked,
        **aim,
    )
