"""Where digests come from: what two lists of digests must share to name the same blocks."""

from typing import NamedTuple

__all__ = ["DigestOrigin"]


class DigestOrigin(NamedTuple):
    """How a list of digests was made.

    Attributes:
        block_size: Tokens per hash block.
        algorithm: One of ``kvmask.hashing.ALGORITHMS``.
        start: The digest that stands in for the parent of a first block. It is as secret as the
            seed it derives from.
    """

    block_size: int
    algorithm: str
    start: bytes

    def __repr__(self) -> str:
        return f"DigestOrigin(block_size={self.block_size}, algorithm={self.algorithm!r})"
