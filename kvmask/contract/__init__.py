"""What engines must agree on to share a KV cache, and what one rank adds to it."""

from kvmask.contract.agreement import BoundContract, Contract

__all__ = ["BoundContract", "Contract"]
