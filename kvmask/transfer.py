"""KVTransfer: runs plans against a Mooncake store, over CUDA or CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import ArgumentError, StoreError
from kvmask.keys import KeySchema
from kvmask.layout import KVLayout
from kvmask.plan import (
    Hashes,
    Layouts,
    LoadPlan,
    LoadResult,
    LookupPlan,
    SavePlan,
    SaveResult,
    Schemas,
    per_group,
)

# The code that a whole batch gets when the call itself raised.
CALL_FAILED = -900


class Store(Protocol):
    """The calls of ``mooncake.store.MooncakeDistributedStore`` that kvmask makes."""

    def batch_is_exist(self, keys: list[str], /) -> Sequence[int]: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], *config: Any
    ) -> Sequence[int]: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> Sequence[int]: ...
    def register_buffer(self, address: int, size: int, /) -> int: ...
    def unregister_buffer(self, address: int, /) -> int: ...


def wait_for(event: Any) -> None:
    """Block until a CUDA event or stream (anything with ``synchronize``) is done; None is ready."""
    if event is None:
        return
    synchronize = getattr(event, "synchronize", None)
    if not callable(synchronize):
        raise TypeError(
            f"`event` must be a CUDA event or stream with synchronize(), got {type(event).__name__}"
        )
    synchronize()


class KVTransfer:
    """Saves, looks up and loads the KV cache of one engine rank.

    Registers every storage of the layouts once, and unregisters them in ``close`` (or at the end
    of a ``with`` block). The store itself stays the caller's.

    Args:
        store: A set-up MooncakeDistributedStore, or an object with the same calls.
        coord: The groups.
        schemas: Per group the key schema, or one per shard that this rank stores.
        layouts: Per group the layout, or one per shard, in the order of the schemas.
        lookup_schemas: Per group every rank namespace that must hold a block for it to be present;
            None: those of ``schemas``.
        null_block: Id of the block table's empty entry, never transferred; None when there is none.
        put_steps: Per group, how many ranks hold the same bytes (see SavePlan).
        rank: This rank: its turn among those, and where its loads begin.
        replicate_config: Passed to every put when it is not None.
        staging: Bytes of the owner's staging buffer when the store has a disk tier.

    Raises:
        ArgumentError: There is not one entry per group.
        StoreError: The store refuses to register a storage; what was registered is undone.
    """

    def __init__(
        self,
        store: Store,
        coord: Coordinator,
        schemas: Schemas,
        layouts: Layouts,
        lookup_schemas: Schemas | None = None,
        *,
        null_block: int | None = 0,
        put_steps: Sequence[int] | None = None,
        rank: int = 0,
        replicate_config: Any = None,
        staging: int | None = None,
    ) -> None:
        n = len(coord.groups)
        self.store = store
        self.coord = coord
        self._schemas = per_group(schemas, KeySchema, "schemas", n)  # type: ignore[type-abstract]
        self._layouts = per_group(layouts, KVLayout, "layouts", n)
        self._lookup_schemas = (
            self._schemas
            if lookup_schemas is None
            else per_group(lookup_schemas, KeySchema, "lookup_schemas", n)  # type: ignore[type-abstract]
        )
        self._null_block = null_block
        self._put_steps = put_steps
        self._rank = rank
        self._put_config = () if replicate_config is None else (replicate_config,)
        self._staging = staging
        self._registered: list[int] = []
        self._register()

    def _register(self) -> None:
        devices = sorted({str(p.device) for row in self._layouts for p in row if p.storages})
        if len(devices) > 1:
            raise ArgumentError(f"`layouts` must be on one device, got {devices}")
        for address, size in merge_ranges(
            [s for row in self._layouts for place in row for s in place.storages]
        ):
            code = self.store.register_buffer(address, size)
            if code != 0:
                self.close()
                raise StoreError(
                    f"the store must register {size} bytes at {address:#x}, got code {code}", code
                )
            self._registered.append(address)

    def close(self) -> None:
        """Unregister the storages. Calling it again does nothing."""
        while self._registered:
            self.store.unregister_buffer(self._registered.pop())

    def __enter__(self) -> KVTransfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lookup(
        self, hashes: Hashes, num_tokens: int, local_tokens: int = 0, strategy: str = "staged"
    ) -> Hit:
        """How long the reusable prefix of a request is.

        Args:
            hashes: One digest per hash block.
            num_tokens: Tokens of the request; the last one is left to compute.
            local_tokens: Tokens the engine holds itself.
            strategy: ``"staged"`` or ``"exact"`` (see LookupPlan).

        Returns:
            Hit, with the number of keys and calls it took.

        Raises:
            StoreError: The store raised, or did not answer every key.
        """
        plan = LookupPlan(
            self.coord, self._lookup_schemas, hashes, num_tokens, local_tokens, strategy
        )
        while keys := plan.next_keys():
            plan.feed(self._exists(keys))
        return plan.hit

    def _exists(self, keys: list[str]) -> Sequence[int]:
        try:
            return self.store.batch_is_exist(keys)
        except Exception as e:
            raise StoreError(f"the store failed to answer {len(keys)} keys: {e}") from e

    def save(
        self,
        hashes: Hashes,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        event: Any = None,
        *,
        states: bool = False,
    ) -> SaveResult:
        """Store what a later request can use of a computed prefix.

        Args:
            hashes: One digest per hash block.
            block_ids: Per group the block table.
            num_tokens: Tokens whose blocks are computed.
            start_token: Everything below is stored already.
            num_prompt_tokens: Length of the prompt, for the replay boundaries.
            event: CUDA event or stream to wait for before the bytes are read.
            states: Save state groups by their position in the block table too.

        Returns:
            SaveResult: every planned key is stored, was present or failed.

        Raises:
            StoreError: The store raised while it was asked what it has.
            BlockIdError: A block id lies outside its layout.
        """
        plan = SavePlan(
            self.coord,
            self._schemas,
            self._layouts,
            hashes,
            block_ids,
            num_tokens,
            start_token,
            num_prompt_tokens,
            states=states,
            null_block=self._null_block,
            put_steps=self._put_steps,
            rank=self._rank,
        )
        if plan.keys:
            plan.feed_exists(self._exists(plan.keys))
        batch = plan.put_batch()
        if batch is not None:
            wait_for(event)
            try:
                codes = self.store.batch_put_from_multi_buffers(*batch, *self._put_config)
            except Exception:
                plan.fail(CALL_FAILED)
            else:
                plan.feed_puts(codes)
        return plan.result

    def load(
        self,
        hashes: Hashes,
        block_ids: Sequence[Sequence[int]],
        hit: Hit,
        start_token: int = 0,
        event: Any = None,
    ) -> LoadResult:
        """Fill the blocks of a hit from the store.

        Args:
            hashes: One digest per hash block.
            block_ids: Per group the block table to fill.
            hit: What ``lookup`` returned.
            start_token: Blocks that end at or below are held already.
            event: CUDA event or stream to wait for before the blocks are written.

        Returns:
            LoadResult: every planned key is loaded or failed.

        Raises:
            BlockIdError: A block to be loaded has no usable entry in its table.
        """
        plan = LoadPlan(
            self.coord,
            self._schemas,
            self._layouts,
            hashes,
            block_ids,
            hit,
            start_token,
            null_block=self._null_block,
            rotation=self._rank,
            staging=self._staging,
        )
        if plan.keys:
            wait_for(event)
        while (batch := plan.next_batch()) is not None:
            try:
                if plan.renew:
                    self.store.batch_is_exist(plan.renew)
                results = self.store.batch_get_into_multi_buffers(*batch)
            except Exception:
                plan.fail(CALL_FAILED)
            else:
                plan.feed(results)
        return plan.result


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Each byte once: ranges that overlap become one; ranges that merely touch stay apart, since
    two allocations are two registrations.

    >>> merge_ranges([(0, 8), (4, 8), (12, 4), (0, 0)])
    [(0, 12), (12, 4)]
    """
    merged: list[list[int]] = []
    for start, size in sorted(r for r in ranges if r[1] > 0):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], start + size)
        else:
            merged.append([start, start + size])
    return [(start, stop - start) for start, stop in merged]
