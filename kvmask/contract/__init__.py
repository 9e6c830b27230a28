"""What engines must agree on to share a KV cache, and what one rank adds to it."""

from kvmask.contract.agreement import Contract
from kvmask.contract.bound import BoundContract

__all__ = ["BoundContract", "Contract"]
