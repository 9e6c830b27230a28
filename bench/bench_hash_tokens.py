"""Block hashes of token ids, for the table of `make bench`. bench_hashes.py measures more."""

import random

import bench_hashes
import pytest
import vllm_side

from kvmask.hashing.chain import hash_tokens

TOKENS = 131_072


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def bench_hash_tokens(pair, monkeypatch, algorithm, block_size):
    monkeypatch.setenv("PYTHONHASHSEED", bench_hashes.SEED)  # vLLM's seed
    pick = random.Random(1)
    tokens = [pick.randrange(129_280) for _ in range(TOKENS)]
    blocks = TOKENS // block_size

    def ours():
        return hash_tokens(tokens, block_size, algorithm, seed=bench_hashes.SEED)

    whole = list(ours())
    middle = TOKENS // 2
    halves = list(hash_tokens(tokens[:middle], block_size, algorithm, seed=bench_hashes.SEED))
    halves += hash_tokens(tokens[middle:], block_size, algorithm, parent=halves[-1])
    assert whole == halves
    theirs = None
    if vllm_side.available():
        theirs = bench_hashes.vllm_hashers(algorithm, block_size, tokens)[0]
        assert theirs() == whole
    pair(
        f"hash_tokens {algorithm}, blocks of {block_size}, {TOKENS:,} tokens",
        ours,
        theirs,
        keys=blocks,
        target=bench_hashes.TARGETS[algorithm],
    )
