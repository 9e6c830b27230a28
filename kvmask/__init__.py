"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""

from kvmask import mooncake
from kvmask._core import Bitset, BlockHashes, HitHints
from kvmask.coordinator import Coordinator, Hit
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.hashing.chain import BlockHasher, hash_tokens
from kvmask.keys.strict import StrictKeys
from kvmask.keys.vllm import VllmKeys
from kvmask.layout import KVLayout
from kvmask.plans.blocks import LoadResult, SaveResult
from kvmask.plans.memo import PresenceMemo
from kvmask.plans.moves import CostModel, LoadPlan, LookupPlan, SavePlan
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
