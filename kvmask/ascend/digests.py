"""Block hashes as the core takes them. The scheduler sends them as lower-case hexadecimal text."""

from __future__ import annotations

from typing import Any

from kvmask._core import BlockHashes
from kvmask.errors import ArgumentError


def digests_of(block_hashes: Any) -> BlockHashes | None:
    """Digests of a list of bytes or of hexadecimal text; None leaves the list to stock."""
    if type(block_hashes) is not list:
        return None
    if not block_hashes or type(block_hashes[0]) is bytes:
        return BlockHashes.from_list(block_hashes)
    if type(block_hashes[0]) is not str:
        return None
    from_hex = getattr(BlockHashes, "from_hex", None)
    return _decoded(block_hashes) if from_hex is None else from_hex(block_hashes)


def _decoded(texts: list[str]) -> BlockHashes | None:
    """Digests of texts that are all of one length, exactly as `bytes.hex` writes them."""
    size = len(texts[0])
    try:
        if size % 2 or {size} != set(map(len, texts)):
            return None
        joined = "".join(texts)
        flat = bytes.fromhex(joined)
        return BlockHashes(flat, size // 2) if flat.hex() == joined else None
    except (TypeError, ValueError, ArgumentError):
        return None
