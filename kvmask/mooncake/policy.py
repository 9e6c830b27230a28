"""How Mooncake's codes read, and what one call to its store may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvmask._core import check_integer, cut_calls, row_pieces
from kvmask.errors import ArgumentError
from kvmask.mooncake.codes import Code
from kvmask.plans.policy import StorePolicy

# An owner with a disk tier stages a get through a buffer for direct I/O. Every object is rounded
# up to pages and needs two more, and vLLM fills nine tenths of the buffer with one batch.
STAGING_PAGE = 4096
STAGING_PADDING = 2 * STAGING_PAGE
STAGING_USABLE = 0.9

# Mooncake's TCP transport cuts a segment into slices and refuses (-800) what does not fit a peer's
# queue of 1,024 (its defaults in 0.3.13). Half of that leaves room for another thread.
SLICE_BYTES = 1 << 16
PIECES_PER_CALL = 512

# What the client answers before a transfer begins, or once it is over. It waits 60 s for a transfer
# and answers TRANSFER_FAIL then, without cancelling it; LEASE_EXPIRED takes the place of a success.
# Codes that are not known to be either are left out.
SETTLED = frozenset(
    int(code)
    for code in (
        Code.NO_AVAILABLE_HANDLE,
        Code.INVALID_KEY,
        Code.INVALID_PARAMS,
        Code.REPLICA_IS_NOT_READY,
        Code.OBJECT_NOT_FOUND,
        Code.OBJECT_ALREADY_EXISTS,
        Code.OBJECT_HAS_LEASE,
        Code.LEASE_EXPIRED,
        Code.RPC_FAIL,
        Code.RPC_TIMEOUT,
        Code.UNAVAILABLE_IN_CURRENT_STATUS,
        Code.UNAVAILABLE_IN_CURRENT_MODE,
    )
)


def staging_bytes(num_bytes: int) -> int:
    """What one object takes of an owner's staging buffer, in bytes.

    >>> staging_bytes(4097)
    16384
    """
    return -(-num_bytes // STAGING_PAGE) * STAGING_PAGE + STAGING_PADDING


def split_calls(
    num_bytes: Sequence[int],
    staging: int | None = None,
    pieces: Sequence[int] | None = None,
    max_pieces: int | None = None,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Cut one put or get into calls that the store can take.

    Args:
        num_bytes: Bytes per key.
        staging: Bytes of an owner's staging buffer. One call fills at most nine tenths of it. A
            key that needs between that and the whole buffer goes alone.
        pieces: Transport pieces per key.
        max_pieces: Pieces per call; a key with more goes alone.

    Returns:
        (calls as (start, stop), positions of keys that cannot be staged at all).

    >>> split_calls([1, 1], staging=3 * 12288)
    ([(0, 2)], [])
    """
    if staging is None:
        needs, usable, most = [0] * len(num_bytes), 0.0, 0.0
    else:
        check_integer(staging, "staging")
        needs = [staging_bytes(size) for size in num_bytes]
        usable, most = max(1, int(staging * STAGING_USABLE)), staging
    parts = [0] * len(num_bytes) if pieces is None else list(pieces)
    return cut_calls(needs, usable, most, parts, math.inf if max_pieces is None else max_pieces)


class MooncakePolicy(StorePolicy):
    """Mooncake's codes, leases, transport slices and disk staging.

    Args:
        max_pieces: Transport pieces (segments of at most 64 KiB) per put or get. The default fits
            the queue of Mooncake's TCP transport; None sets no limit.
        staging: Bytes of the owner's staging buffer when the store has a disk tier, else None.
        replicate_config: Passed to every put when it is not None: a ``ReplicateConfig`` of
            Mooncake, or a function without arguments that makes one.
        group_ids: Every put says which keys are evicted together. It needs a function as
            ``replicate_config``, since each put then has a configuration of its own.

    Raises:
        ArgumentError: A limit is below 1, or ``group_ids`` comes without a function.
    """

    present_codes = frozenset({int(Code.OBJECT_ALREADY_EXISTS)})
    full_codes = frozenset({int(Code.NO_AVAILABLE_HANDLE)})
    renew_codes = frozenset({int(Code.LEASE_EXPIRED)})
    # A master that is gone, and one that accepts calls and stays silent.
    outage_codes = frozenset({int(Code.RPC_FAIL), int(Code.RPC_TIMEOUT)})
    settled_codes = SETTLED

    def __init__(
        self,
        *,
        max_pieces: int | None = PIECES_PER_CALL,
        staging: int | None = None,
        replicate_config: Any = None,
        group_ids: bool = False,
    ) -> None:
        for value, name in ((staging, "staging"), (max_pieces, "max_pieces")):
            if value is not None:
                check_integer(value, name)
        if not isinstance(group_ids, bool):
            raise TypeError(f"`group_ids` must be True or False, got {type(group_ids).__name__}")
        if group_ids and not callable(replicate_config):
            raise ArgumentError(
                "`replicate_config` must be a function when `group_ids` is set, "
                f"got {type(replicate_config).__name__}"
            )
        self._max_pieces = max_pieces
        self._staging = staging
        self._replicate_config = replicate_config
        self.names_groups = group_ids

    def _cut(
        self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]], staging: int | None
    ) -> tuple[list[tuple[int, int]], list[int]]:
        pieces = None
        if self._max_pieces is not None:
            pieces = row_pieces(sizes, SLICE_BYTES)  # type: ignore[arg-type]
        return split_calls(num_bytes, staging, pieces, self._max_pieces)

    def cut_put(
        self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Cut the keys of a save by their transport pieces."""
        return self._cut(num_bytes, sizes, None)

    def cut_get(
        self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Cut the keys of a load by their transport pieces and by the staging buffer."""
        return self._cut(num_bytes, sizes, self._staging)

    def put_arguments(self, group_ids: list[str] | None) -> tuple[Any, ...]:
        """The configuration of one put."""
        config = self._replicate_config
        if config is None:
            return ()
        if callable(config):
            config = config()
        if group_ids is not None:
            config.group_ids = group_ids
        return (config,)
