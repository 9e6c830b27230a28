"""Token ids to digests: vLLM's algorithms, extra keys, and each other engine's own hash."""

from kvmask.hashing.chain import (
    ALGORITHMS,
    BlockHasher,
    chain_hashes,
    digest_size,
    hash_tokens,
    start_hash,
)
from kvmask.hashing.lmcache import lmcache_chunk_hashes
from kvmask.hashing.origin import DigestOrigin
from kvmask.hashing.settings import Hashing
from kvmask.hashing.sglang import sglang_page_hashes, sglang_seed

__all__ = [
    "ALGORITHMS",
    "BlockHasher",
    "DigestOrigin",
    "Hashing",
    "chain_hashes",
    "digest_size",
    "hash_tokens",
    "lmcache_chunk_hashes",
    "sglang_page_hashes",
    "sglang_seed",
    "start_hash",
]
