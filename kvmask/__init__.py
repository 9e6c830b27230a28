"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""

from kvmask import mooncake
from kvmask._core import Bitset, BlockHashes
from kvmask.coordinator import Coordinator, Hit
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.hashes import BlockHasher, hash_tokens
from kvmask.keys import StrictKeys, VllmKeys
from kvmask.layout import KVLayout
from kvmask.plan import LoadPlan, LoadResult, LookupPlan, SavePlan, SaveResult
from kvmask.transfer import KVTransfer

__all__ = [
    "Bitset",
    "BlockHasher",
    "BlockHashes",
    "ChunkedLocal",
    "Coordinator",
    "FullAttention",
    "Hit",
    "KVLayout",
    "KVTransfer",
    "LoadPlan",
    "LoadResult",
    "LookupPlan",
    "Mamba",
    "SavePlan",
    "SaveResult",
    "SlidingWindow",
    "StrictKeys",
    "VllmKeys",
    "hash_tokens",
    "mooncake",
]
__version__ = "0.1.0"
