"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""

from kvmask import mooncake
from kvmask._core import Bitset, BlockHashes, HitHints
from kvmask.block_plan import LoadResult, SaveResult
from kvmask.coordinator import Coordinator, Hit
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.hashes import BlockHasher, hash_tokens
from kvmask.keys_strict import StrictKeys
from kvmask.keys_vllm import VllmKeys
from kvmask.layout import KVLayout
from kvmask.memo import PresenceMemo
from kvmask.plan import CostModel, LoadPlan, LookupPlan, SavePlan
from kvmask.transfer import KVTransfer

__all__ = [
    "Bitset",
    "BlockHasher",
    "BlockHashes",
    "ChunkedLocal",
    "Coordinator",
    "CostModel",
    "FullAttention",
    "Hit",
    "HitHints",
    "KVLayout",
    "KVTransfer",
    "LoadPlan",
    "LoadResult",
    "LookupPlan",
    "Mamba",
    "PresenceMemo",
    "SavePlan",
    "SaveResult",
    "SlidingWindow",
    "StrictKeys",
    "VllmKeys",
    "hash_tokens",
    "mooncake",
]
__version__ = "0.1.0"
