"""`"local_aware"`: what the GPU holds is not asked, and never taken for loadable."""

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from vllm_cases import Case, random_case
from vllm_oracle import digest

from kvmask import FullAttention
from kvmask.errors import ArgumentError
from kvmask.vllm import local
from kvmask.vllm.releases import fitting

pytestmark = pytest.mark.vllm


def hashes_of(case: Case) -> list[bytes]:
    return [digest(i) for i in range(case.num_tokens // case.hash_block_size)]


def test_hits_that_reach_past_the_local_tokens_are_stocks():
    longer = 0
    for seed in range(600):
        case = random_case(5, seed)
        if any(g.eagle for g in case.groups):
            continue
        keys = pair.present_keys(case)
        whole = pair.lookup_worker(case, "kvmask", pair.Script(0, keys))
        stock = whole.lookup(case.num_tokens, hashes_of(case)).hit_length
        block = case.effective_alignment
        for blocks in range(1, case.num_tokens // block + 1):
            held = blocks * block
            store = pair.Script(0, keys)
            worker = pair.lookup_worker(case, "kvmask", store, "staged")
            found = worker.lookup(local.pack(case.num_tokens, held), hashes_of(case)).hit_length
            asked = {key for _, batch in store.calls for key in batch}
            for g, group in enumerate(case.groups):
                if isinstance(group, FullAttention) and group.prefix_cacheable and not case.partial:
                    below = {
                        digest((i + 1) * case.per_block(g) - 1).hex()
                        for i in range(held // group.block_size)
                    }
                    mine = {k.rpartition("@")[2] for k in asked if f"@group:{g}@" in k}
                    assert not below & mine, case
            # Nothing that the store lacks below the local hit can end the hit; the rest can.
            assert found == 0 or found > held, case
            if stock > held:
                assert found >= stock, case
            longer += found > held >= stock
    assert longer  # holes below the local hit do not matter


def test_the_option():
    assert local.check_option(True) is True
    for wrong in ("true", 1, None):
        with pytest.raises(ArgumentError, match="`local_aware` must be true or false"):
            local.check_option(wrong)
    assert fitting().has("local")
