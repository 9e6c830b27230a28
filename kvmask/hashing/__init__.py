"""Token ids to digests: vLLM's algorithms, extra keys, and each other engine's own hash."""

from kvmask.hashing.chain import (
    ALGORITHMS,
    BlockHasher,
    chain_hashes,
    digest_size,
    hash_tokens,
    start_hash,
)
from kvmask.hashing.origin import DigestOrigin

__all__ = [
    "ALGORITHMS",
    "BlockHasher",
    "DigestOrigin",
    "chain_hashes",
    "digest_size",
    "hash_tokens",
    "start_hash",
]
