"""Block hashes as the core takes them. The scheduler sends them as lower-case hexadecimal text."""

from __future__ import annotations

from typing import Any

from kvmask._core import BlockHashes


def digests_of(block_hashes: Any) -> BlockHashes | None:
    """Digests of a list of bytes or of hexadecimal text; None leaves the list to stock."""
    if type(block_hashes) is not list:
        return None
    if not block_hashes or type(block_hashes[0]) is bytes:
        return BlockHashes.from_list(block_hashes)
    return BlockHashes.from_hex(block_hashes) if type(block_hashes[0]) is str else None
