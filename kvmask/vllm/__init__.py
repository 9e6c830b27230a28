"""kvmask inside vLLM's MooncakeStoreConnector. The only package of kvmask that imports vLLM."""

import kvmask.vllm._first  # noqa: F401
from kvmask.vllm.connector import KVMaskStoreConnector
from kvmask.vllm.coordinator import MooncakeStoreCoordinator
from kvmask.vllm.hashing import request_block_hasher
from kvmask.vllm.layouts import ChunkedTokenDatabase
from kvmask.vllm.placing import install, uninstall
from kvmask.vllm.releases import (
    BlobBlockHashes,
    ExternalCachedBlockPool,
    KeyMetadata,
    PoolKey,
    chunk_hashes_for_block_size,
)

__all__ = [
    "BlobBlockHashes",
    "ChunkedTokenDatabase",
    "ExternalCachedBlockPool",
    "KVMaskStoreConnector",
    "KeyMetadata",
    "MooncakeStoreCoordinator",
    "PoolKey",
    "chunk_hashes_for_block_size",
    "install",
    "request_block_hasher",
    "uninstall",
]
