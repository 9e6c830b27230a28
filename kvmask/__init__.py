"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""

from kvmask import _built, mooncake  # noqa: F401
from kvmask._core import Bitset, BlockHashes, HitHints
from kvmask.contract import BoundContract, Contract
from kvmask.coordinator import Coordinator, Hit
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.guard import BounceMemory
from kvmask.hashing import BlockHasher, Hashing, hash_tokens
from kvmask.keys.strict import StrictKeys
from kvmask.keys.vllm import VllmKeys
from kvmask.layout import KVLayout
from kvmask.payload import PayloadFacts
from kvmask.plans import (
    AbsenceMemo,
    BlockFailure,
    Breaker,
    Call,
    CostModel,
    LoadPlan,
    LoadResult,
    LookupPlan,
    PlanTools,
    PresenceMemo,
    SavePlan,
    SaveResult,
    Store,
    StorePolicy,
    drive,
)
from kvmask.ranks import RankGrid
from kvmask.request import CacheRequest
from kvmask.transfer import KVTransfer

__all__ = [
    "AbsenceMemo",
    "Bitset",
    "BlockFailure",
    "BlockHasher",
    "BlockHashes",
    "BounceMemory",
    "BoundContract",
    "Breaker",
    "CacheRequest",
    "Call",
    "ChunkedLocal",
    "Contract",
    "Coordinator",
    "CostModel",
    "FullAttention",
    "Hashing",
    "Hit",
    "HitHints",
    "KVLayout",
    "KVTransfer",
    "LoadPlan",
    "LoadResult",
    "LookupPlan",
    "Mamba",
    "PayloadFacts",
    "PlanTools",
    "PresenceMemo",
    "RankGrid",
    "SavePlan",
    "SaveResult",
    "SlidingWindow",
    "Store",
    "StorePolicy",
    "StrictKeys",
    "VllmKeys",
    "drive",
    "hash_tokens",
    "mooncake",
]
__version__ = "0.2.0"
