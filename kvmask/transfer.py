"""KVTransfer: runs plans against a Mooncake store, over CUDA or CPU tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from kvmask._core import BlockHashes, HitHints, checked_answers
from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import ArgumentError, StoreError
from kvmask.groups import check_count
from kvmask.keys.base import KeySchema
from kvmask.layout import KVLayout, merge_ranges
from kvmask.plans.blocks import (
    PIECES_PER_CALL,
    Hashes,
    Layouts,
    LoadResult,
    SaveResult,
    Schemas,
    per_group,
)
from kvmask.plans.memo import PresenceMemo
from kvmask.plans.metrics import TransferStats
from kvmask.plans.moves import DEFAULT_COSTS, CostModel, LoadPlan, LookupPlan, SavePlan

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
        max_pieces: Transport pieces (segments of at most 64 KiB) per put or get; the default fits
            the queue of Mooncake's TCP transport, None makes one call of everything.
        costs: What asking costs; it sets how much a staged lookup asks at once.
        hints: Where earlier hits ended, so that most lookups take one call; None keeps none. The
            default table takes 8 MiB.
        memo: Keys not to be asked again for a short time; None (the default) asks every time.

    Attributes:
        stats: TransferStats, the counters of all lookups, saves and loads.

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
        max_pieces: int | None = PIECES_PER_CALL,
        costs: CostModel = DEFAULT_COSTS,
        hints: HitHints | bool | None = True,
        memo: PresenceMemo | None = None,
    ) -> None:
        n = len(coord.groups)
        self.store = store
        self.coord = coord
        self._schemas = per_group(schemas, KeySchema, "schemas", n)
        self._layouts = per_group(layouts, KVLayout, "layouts", n)
        self._lookup_schemas = (
            self._schemas
            if lookup_schemas is None
            else per_group(lookup_schemas, KeySchema, "lookup_schemas", n)
        )
        if null_block is not None:
            check_count(null_block, "null_block", 0)
        self._null_block = null_block
        self._put_steps = None if put_steps is None else list(put_steps)
        for step in self._put_steps or ():
            check_count(step, "put_steps")
        check_count(rank, "rank", 0)
        for value, name in ((staging, "staging"), (max_pieces, "max_pieces")):
            if value is not None:
                check_count(value, name)
        for thing, kind, name in (
            (costs, CostModel, "costs"),
            (hints, HitHints | bool | None, "hints"),
            (memo, PresenceMemo | None, "memo"),
        ):
            if not isinstance(thing, kind):
                raise TypeError(f"`{name}` must be {kind}, got {type(thing).__name__}")
        self._rank = rank
        self._put_config = () if replicate_config is None else (replicate_config,)
        self._staging = staging
        self._max_pieces = max_pieces
        self._costs = costs
        self._hints = HitHints() if hints is True else hints or None
        self._memo = memo
        self.stats = TransferStats()
        self._registered: list[int] = []
        self._register()

    def _register(self) -> None:
        devices = sorted({str(p.device) for row in self._layouts for p in row if p.storages})
        if len(devices) > 1:
            raise ArgumentError(f"`layouts` must be on one device, got {devices}")
        for address, size in merge_ranges(
            [s for row in self._layouts for place in row for s in place.storages]
        ):
            try:
                code = self.store.register_buffer(address, size)
            except Exception as e:
                self._undo()
                raise StoreError(
                    f"the store must register {size} bytes at {address:#x}, got {e!r}"
                ) from e
            if code != 0:
                self._undo()
                raise StoreError(
                    f"the store must register {size} bytes at {address:#x}, got code {code}", code
                )
            self._registered.append(address)

    def _undo(self) -> None:
        """Unregister what can be; the error that led here is the one to be told."""
        while self._registered:
            with contextlib.suppress(Exception):
                self.store.unregister_buffer(self._registered.pop())

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
        self,
        hashes: Hashes,
        num_tokens: int,
        local_tokens: int = 0,
        strategy: str = "staged",
        *,
        local_windows: bool = False,
    ) -> Hit:
        """How long the reusable prefix of a request is.

        Args:
            hashes: One digest per hash block.
            num_tokens: Tokens of the request; the last one is left to compute.
            local_tokens: Tokens the engine holds itself; a hit that does not reach past them is
                none.
            strategy: ``"staged"`` or ``"exact"`` (see LookupPlan).
            local_windows: The engine also holds the windows that end at ``local_tokens``.

        Returns:
            Hit, with its counters.

        Raises:
            StoreError: The store raised, or did not answer every key.
        """
        started = time.perf_counter()
        digests = hashes if isinstance(hashes, BlockHashes) else BlockHashes.from_list(hashes)
        units = self.coord.hash_block_size, self.coord.alignment
        hint = 0
        if self._hints is not None and strategy == "staged":
            hint = self._hints.predict(digests, *units, max(num_tokens - 1, 0))
        plan = LookupPlan(
            self.coord,
            self._lookup_schemas,
            digests,
            num_tokens,
            local_tokens,
            strategy,
            local_windows=local_windows,
            hint=hint,
            costs=self._costs,
        )
        in_store = 0.0
        while keys := plan.next_keys():
            answers, seconds = self._answers(keys)
            in_store += seconds
            plan.feed(answers)
        hit = plan.hit
        if self._hints is not None and hit.length:
            self._hints.learn(digests, *units, hit.length)
        total = time.perf_counter() - started
        self.stats.add(
            lookups=1,
            asked_keys=hit.asked,
            present_keys=hit.present,
            exact_keys=hit.exact_keys,
            probes=hit.probes,
            hit_tokens=hit.length,
            lookup_store_seconds=in_store,
            lookup_other_seconds=total - in_store,
        )
        return replace(hit, store_seconds=in_store, other_seconds=total - in_store)

    def _answers(self, keys: list[str]) -> tuple[Sequence[int], float]:
        """Answers to a batch of keys, through the memo when there is one, and the store's time."""
        if self._memo is None:
            started = time.perf_counter()
            answers = self._exists(keys)
            return answers, time.perf_counter() - started
        known = self._memo.known(keys)
        unknown = [key for key, skip in zip(keys, known, strict=True) if not skip]
        self.stats.add(memo_keys=len(keys) - len(unknown))
        if not unknown:
            return [1] * len(keys), 0.0
        started = time.perf_counter()
        given = self._exists(unknown)
        seconds = time.perf_counter() - started
        given = checked_answers(given, len(unknown))
        self._memo.add(key for key, answer in zip(unknown, given, strict=True) if answer == 1)
        rest = iter(given)
        return [1 if skip else next(rest) for skip in known], seconds

    def _exists(self, keys: list[str]) -> list[int]:
        try:
            return list(self.store.batch_is_exist(keys))
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
            max_pieces=self._max_pieces,
        )
        if plan.keys:
            plan.feed_exists(self._exists(plan.keys))
        waited = False
        while (batch := plan.next_batch()) is not None:
            if not waited:
                wait_for(event)
                waited = True
            try:
                codes = self.store.batch_put_from_multi_buffers(*batch, *self._put_config)
            except Exception:
                plan.fail(CALL_FAILED)
            else:
                plan.feed(codes)
        result = plan.result
        self._saved(plan, hashes, result)
        return result

    def _saved(self, plan: SavePlan, hashes: Hashes, result: SaveResult) -> None:
        self.stats.add(
            saves=1,
            stored_keys=result.stored,
            stored_bytes=result.num_bytes,
            save_present_keys=result.present,
            save_failed_keys=len(result.failed),
        )
        if self._memo is not None:
            failed = {f.key for f in result.failed}
            self._memo.add(key for key in plan.keys if key not in failed)
        if self._hints is not None and result.saved_tokens:
            self._hints.learn(
                hashes, self.coord.hash_block_size, self.coord.alignment, result.saved_tokens
            )

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
            max_pieces=self._max_pieces,
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
        result = plan.result
        self.stats.add(
            loads=1,
            loaded_keys=result.loaded,
            loaded_bytes=result.num_bytes,
            load_failed_keys=len(result.failed),
        )
        if self._memo is not None and result.failed:
            self._memo.forget(f.key for f in result.failed)
        return result
