"""The compiled hot path of a KV-cache offload connector: masks, keys, addresses, hits."""

from kvmask._core import Bitset, BlockHashes
from kvmask.coordinator import Coordinator, Hit
from kvmask.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from kvmask.keys import StrictKeys, VllmKeys

__all__ = [
    "Bitset",
    "BlockHashes",
    "ChunkedLocal",
    "Coordinator",
    "FullAttention",
    "Hit",
    "Mamba",
    "SlidingWindow",
    "StrictKeys",
    "VllmKeys",
]
__version__ = "0.1.0"
