"""Between plans and the store: bounce memory and sealed objects. See docs/late-bytes.md."""

from kvmask.guard.memory import BounceMemory
from kvmask.guard.seal import SEAL_BYTES, seal_of
from kvmask.guard.store import StoreGuard

__all__ = ["SEAL_BYTES", "BounceMemory", "StoreGuard", "seal_of"]
