"""`"local_aware": true`: lookups that know what the GPU holds already.

Stock asks the store for the whole prefix, the part included that the engine's own prefix cache has
just found. Here the scheduler sends the length of the local hit along with the request, in the
upper half of the number of tokens (an integer of any length on the wire), and the worker leaves out
the full-attention blocks below it. Windows and states are asked for as before: what reaches below
the local hit is proved by the store, never assumed.

The local hit is rounded down to the scheduler block, because that is where stock begins to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmask.errors import ArgumentError
from kvmask.vllm.releases import (
    LOOKUP_MSG,
    StockClient,
    current,
    decode_lookup_response,
)

_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


def pack(num_tokens: int, local_tokens: int) -> int:
    """One number for both; the upper half is zero where nothing is local."""
    return local_tokens << _SHIFT | num_tokens


def unpack(packed: int) -> tuple[int, int]:
    """(num_tokens, local_tokens) of a packed number."""
    return packed & _MASK, packed >> _SHIFT


def check_option(value: Any) -> bool:
    """Refuse what is no switch."""
    if not isinstance(value, bool):
        raise ArgumentError(f"`local_aware` must be true or false, got {value!r}")
    return value


class LocalClient(StockClient):  # type: ignore[misc]
    """vLLM's lookup client; tells the worker what the GPU holds.

    ``kvmask_local`` maps requests whose lookup is on its way to the local hit it was made with.
    """

    kvmask_next: int
    kvmask_local: dict[str, int]

    def lookup(
        self, req_id: str, num_tokens: int, block_hashes: list[Any], non_block: bool = False
    ) -> Any:
        """As stock; a result that rests on more local tokens than there are now is none."""
        now = self.kvmask_next
        asked = self.kvmask_local.setdefault(req_id, now)
        result = super().lookup(req_id, pack(num_tokens, asked), block_hashes, non_block)
        if result is None:
            return None
        del self.kvmask_local[req_id]
        return current().lookup_result(0, ()) if now < asked else result

    def discard(self, req_id: str) -> None:
        """As stock."""
        self.kvmask_local.pop(req_id, None)
        super().discard(req_id)

    def _lookup(self, num_tokens: int, block_hashes: Sequence[bytes]) -> Any:
        size = len(block_hashes[0]) if block_hashes else 0
        frames = (
            LOOKUP_MSG,
            num_tokens.to_bytes(8, "big"),
            size.to_bytes(2, "big"),
            b"".join(block_hashes),
        )
        self.socket.send_multipart(frames, copy=False)
        return decode_lookup_response(self.socket.recv())


def adopt_client(scheduler: Any) -> None:
    """Give a stock scheduler's client the methods above."""
    client = scheduler.client
    client.__class__ = LocalClient
    client.kvmask_next = 0
    client.kvmask_local = {}


def tell(scheduler: Any, num_computed_tokens: int) -> None:
    """What the GPU holds of the request that is looked up next."""
    block = scheduler._block_size
    scheduler.client.kvmask_next = num_computed_tokens // block * block
