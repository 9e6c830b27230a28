"""LMCache's own hashes: the chunks of a request.

An engine process names a chunk by ``H((parent, tokens, ()))``, cut to its first 8 bytes and taken
as a big-endian number. ``H`` is vLLM's hash function. `parent` is such a number too; for the first
chunk it is that of vLLM's start hash.

The multiprocess server names a chunk by vLLM's own block hash over it (``sha256_cbor``), or by
default by BLAKE3 over the parent's 32 bytes and the tokens, 4 bytes each, big endian. Its start is
the BLAKE3 of twelve zero bytes.

Sources: `v1/token_database.py` and `v1/multiprocess/token_hasher.py` of LMCache 0.5.6.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from kvmask import _core
from kvmask._core import MAX_BLOCK_TOKENS, BlockHashes, check_integer, shown
from kvmask.errors import ArgumentError, HashInputError, MissingDependencyError
from kvmask.hashing.cbor import canonical_cbor
from kvmask.hashing.chain import hash_tokens, start_hash
from kvmask.hashing.tokens import Tokens

__all__ = ["lmcache_chunk_hashes"]


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise MissingDependencyError(
            "this chunk hash needs the package `blake3` (pip install blake3)"
        ) from error
    return blake3


def lmcache_chunk_hashes(
    token_ids: Tokens,
    chunk_size: int = 256,
    algorithm: str = "sha256_cbor",
    seed: str | None = None,
    *,
    objects: bool = False,
) -> BlockHashes:
    """Chained hashes of the full chunks of a token sequence, as LMCache computes them.

    Args:
        token_ids: As `kvmask.hash_tokens` takes them.
        chunk_size: Tokens per chunk.
        algorithm: "sha256_cbor" or "sha256"; with ``objects`` also "blake3", the default there.
        seed: As `kvmask.hashing.chain.start_hash` takes it; unused by "blake3".
        objects: For the multiprocess server's keys rather than for those of an engine process.

    Returns:
        BlockHashes: digests of 8 bytes, or with ``objects`` of 32.

    Raises:
        ArgumentError: An unknown algorithm.
        HashInputError: Bad token ids, or a token that BLAKE3's form cannot hold.
        MissingDependencyError: "blake3" without the package.

    >>> len(lmcache_chunk_hashes(range(600), seed="0")[0])
    8
    """
    chunk_size = check_integer(chunk_size, "chunk_size", 1, MAX_BLOCK_TOKENS)
    known = ("sha256_cbor", "sha256", *(("blake3",) if objects else ()))
    if algorithm not in known:
        raise ArgumentError(
            f"`algorithm` must be one of {', '.join(known)}, got {shown(algorithm)}"
        )
    if objects and algorithm != "blake3":
        return hash_tokens(token_ids, chunk_size, algorithm, seed)
    ids = _core.TokenIds(token_ids)
    chunks = (
        ids.take(i, i + chunk_size)
        for i in range(0, len(ids) // chunk_size * chunk_size, chunk_size)
    )
    out = []
    if algorithm == "blake3":
        digest = _blake3()
        parent = digest(bytes(12)).digest()
        for chunk in chunks:
            try:
                words = struct.pack(f">{chunk_size}I", *chunk)
            except struct.error:
                raise HashInputError(
                    f"`token_ids` must be below 2**32 for 'blake3', got {max(chunk)}"
                ) from None
            parent = digest(parent + words).digest()
            out.append(parent)
        return BlockHashes(b"".join(out), 32)
    import pickle  # `import kvmask` does not need it

    parent = start_hash(algorithm, seed)[:8]
    for chunk in chunks:
        value = (int.from_bytes(parent, "big"), chunk, ())
        if algorithm == "sha256_cbor":
            data = canonical_cbor(value)
        else:
            data = pickle.dumps(value, protocol=5)
        parent = hashlib.sha256(data).digest()[:8]
        out.append(parent)
    return BlockHashes(b"".join(out), 8)
