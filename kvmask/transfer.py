"""KVTransfer: runs the plans of one engine rank against a store, over CUDA or CPU tensors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Any

from kvmask._core import HitHints
from kvmask.contract import BoundContract, Contract
from kvmask.coordinator import Hit
from kvmask.errors import ArgumentError, PlanStateError, StoreError
from kvmask.exits import at_exit
from kvmask.guard import BounceMemory, StoreGuard
from kvmask.guard.memory import keep
from kvmask.mooncake.codes import Code, code_name
from kvmask.mooncake.policy import MooncakePolicy
from kvmask.plans.breaker import Breaker
from kvmask.plans.calls import EXISTS, Existence, Plan, drive
from kvmask.plans.costs import DEFAULT_COSTS, CostModel
from kvmask.plans.lookup import LookupPlan, Strategy
from kvmask.plans.memo import AbsenceMemo, PresenceMemo
from kvmask.plans.metrics import TransferStats
from kvmask.plans.policy import StorePolicy
from kvmask.plans.renew import Renewals
from kvmask.plans.results import LoadResult, SaveResult
from kvmask.plans.tools import PlanTools
from kvmask.regions import merge_ranges
from kvmask.renewer import Renewer
from kvmask.request import CacheRequest


class KVTransfer:
    """Looks up, loads and saves the KV cache of one engine rank.

    Registers every storage of the layouts once, and unregisters them in ``close`` (or at the end
    of a ``with`` block). The store itself stays the caller's. Several threads may use one transfer
    at a time, each with its own requests. ``close`` waits for their calls; a call after it raises.
    A transfer belongs to the process that made it: in a child that was forked its calls raise.

    Args:
        store: A set-up MooncakeDistributedStore, or an object with the same calls (`Store`).
        contract: A bound contract. A contract that is not bound can look up only.
        policy: How the store's codes read and how its calls are cut; by default Mooncake's.
        costs: What asking costs; it sets how much a staged lookup asks at once.
        hints: Where earlier hits ended, so that most lookups take one call. True makes a table
            (8 MiB); None keeps none.
        memo: Keys not to be asked again for a short time; None asks every time.
        failed_loads: Keys that failed to load, absent in lookups for a stated time; None asks for
            them again.
        breaker: Remembers that the store does not answer: for some seconds (10) calls fail at once,
            then one tries again. True makes one, None keeps none. Transfers of one store can share
            a `Breaker`.
        null_block: Id of the block tables' empty entry, never transferred; None when they have no
            such entry.
        renew: What hits make worth keeping is asked again by a thread of its own, so that the store
            keeps it (docs/lookup.md). True makes a `Renewals`, None renews nothing.
        bounce: Memory of the transfer's own that all bytes go through, so that bytes that come too
            late never reach the engine's blocks. True takes the defaults of `BounceMemory`. The
            store then gets to know that memory alone. Objects of a sealed contract need it when
            they lie in device memory.

    Attributes:
        contract: The contract.
        tools: The plans' tools, for plans that are driven by hand.

    Raises:
        TypeError: An argument is of another kind.
        ArgumentError: ``bounce`` is given for a contract without memory; or objects are sealed in
            device memory without it.
        StoreError: The store refuses to register a storage; what was registered is undone.
    """

    def __init__(
        self,
        store: Existence,  # saves and loads need all of a `Store`
        contract: Contract | BoundContract,
        *,
        policy: StorePolicy | None = None,
        costs: CostModel = DEFAULT_COSTS,
        hints: HitHints | bool | None = True,
        memo: PresenceMemo | None = None,
        failed_loads: AbsenceMemo | None = None,
        breaker: Breaker | bool | None = True,
        null_block: int | None = 0,
        renew: Renewals | bool | None = None,
        bounce: BounceMemory | bool | None = None,
    ) -> None:
        if not isinstance(contract, Contract | BoundContract):
            raise TypeError(
                f"`contract` must be a Contract or a bound contract, got {type(contract).__name__}"
            )
        if not callable(getattr(store, EXISTS, None)):
            raise TypeError(f"`store` must have a store's calls, got {type(store).__name__}")
        self.store: Any = store  # as it is: it may have more calls
        self.contract = contract
        self.tools = PlanTools(
            MooncakePolicy() if policy is None else policy,
            costs=costs,
            hints=hints,
            memo=memo,
            failed_loads=failed_loads,
            breaker=breaker,
            null_block=null_block,
        )
        if not isinstance(renew, Renewals | bool | None):
            raise TypeError(f"`renew` must be Renewals, a bool or None, got {type(renew).__name__}")
        renewals = Renewals() if renew is True else renew or None
        self._renewer = None if renewals is None else Renewer(renewals, self._exists, self.tools)
        if not isinstance(bounce, BounceMemory | bool | None):
            raise TypeError(
                f"`bounce` must be BounceMemory, a bool or None, got {type(bounce).__name__}"
            )
        if bounce and not isinstance(contract, BoundContract):
            raise ArgumentError("`bounce` needs a contract that is bound to memory, got none")
        self._guard: StoreGuard | None = None
        if isinstance(contract, BoundContract) and (bounce or contract.scheme.sealed):
            self._guard = self.tools.guard = StoreGuard(
                [layout for row in contract.layouts for layout in row],
                self._register_one,
                sealed=contract.scheme.sealed,
                bounce=BounceMemory() if bounce is True else bounce or None,
                policy=self.tools.policy,
                stats=self.tools.stats,
                log=self.tools.log,
            )
        self._chunks: list[Any] = []  # given back by the guard, until they are unregistered
        self._registered: list[int] = []
        self._lock = threading.Condition()
        self._running: list[int] = []  # the threads whose calls run
        self._closed = False
        self._pid = os.getpid()
        at_exit(self, KVTransfer._end)
        try:
            self._register()
        except BaseException:
            self._undo()
            raise

    @property
    def stats(self) -> TransferStats:
        """The counters of all lookups, saves and loads, by hand-driven plans too."""
        stats = self.tools.stats
        assert stats is not None
        return stats

    def _exists(self, keys: list[str]) -> Any:
        return self.store.batch_is_exist(keys)

    def _register(self) -> None:
        layouts = self.contract.layouts if isinstance(self.contract, BoundContract) else ()
        guard = self._guard
        if guard is None or not guard.isolates:
            storages = [s for row in layouts for layout in row for s in layout.storages]
            for address, size in merge_ranges(storages):
                self._register_one(address, size)
                self._registered.append(address)
        if guard is not None:
            guard.chunks.fill()

    def _register_one(self, address: int, size: int) -> None:
        try:
            code = self.store.register_buffer(address, size)
        except Exception as e:
            raise StoreError(
                f"the store must register {size} bytes at {address:#x}, got {e!r}"
            ) from e
        if code != 0:
            twice = (
                ": memory that is registered already is refused so, by a transfer that is "
                "still open or by the engine"
                if code == Code.INVALID_PARAMS
                else ""
            )
            raise StoreError(
                f"the store must register {size} bytes at {address:#x}, "
                f"got code {code} ({code_name(code)}){twice}",
                code,
            )

    def _close_guard(self) -> None:
        """Have the guard's memory unregistered too, but what is retired."""
        if self._guard is not None:
            chunks = self._guard.chunks.close()
            self._chunks += chunks
            self._registered += [chunk.address for chunk in chunks]

    def _undo(self) -> None:
        """Unregister what can be; the error that led here is the one to be told."""
        self._close_guard()
        chunks = {chunk.address: chunk for chunk in self._chunks}
        while self._registered:
            address = self._registered.pop()
            undone = False
            with contextlib.suppress(Exception):
                undone = self.store.unregister_buffer(address) == 0
            chunk = chunks.get(address)
            if chunk is None:
                continue
            if not undone:
                keep(chunk)  # the store still knows it
                continue
            with contextlib.suppress(Exception):
                chunk.free()

    def close(self) -> None:
        """Wait for the calls of other threads, then unregister the storages.

        Calling it again tries again what the store refused, and else does nothing. In a forked
        child it does nothing at all: the memory is registered for the parent.

        Raises:
            PlanStateError: It is called from within a call of this thread, such as by the store or
                an event: that call would wait for itself.
            StoreError: The store refuses to unregister a storage. The others are unregistered all
                the same.
        """
        if os.getpid() != self._pid:
            return
        if self._renewer is not None:
            self._renewer.close()
        with self._lock:
            if threading.get_ident() in self._running:
                raise PlanStateError("`close` must not be called while this thread's own call runs")
            self._closed = True
            while self._running:
                self._lock.wait()
            self._close_guard()
            left: list[int] = []
            cause: Exception | None = None
            shown, last = "", None
            try:
                while self._registered:
                    try:
                        code = self.store.unregister_buffer(self._registered[-1])
                    except Exception as e:
                        cause, shown = e, repr(e)
                    else:
                        if code == 0:
                            self._registered.pop()
                            continue
                        last, shown = code, f"code {code} ({code_name(code)})"
                    left.append(self._registered.pop())
            finally:
                # An interrupt leaves the rest to the next call.
                self._registered += left[::-1]
            if not self._registered:
                while self._chunks:
                    self._chunks.pop().free()
        if left:
            raise StoreError(
                "the store must unregister every storage, "
                f"got {shown} for {len(left)} of them, at {left[-1]:#x} first",
                last,
            ) from cause

    def _end(self, deadline: float) -> None:
        """Let no call begin any more, and wait for those that run."""
        if self._renewer is not None:
            self._renewer.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._closed = True
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)

    def release_retired(self) -> int:
        """Free the bounce memory that was retired, once the store's client is closed.

        Until then a call that timed out can still read or write it. Without this call it stays for
        as long as the process lives.

        Returns:
            The bytes that were freed.

        Raises:
            PlanStateError: The transfer is not closed.
        """
        return 0 if self._guard is None else self._guard.chunks.release()

    def _run(self, plan: Plan) -> Any:
        """Run a plan, unless the transfer is closed; `close` waits for it."""
        if os.getpid() != self._pid:
            # A store's threads stay behind in a fork: its calls would wait for them for ever. And
            # the lock may be held by a thread that is not here.
            raise PlanStateError(
                "a transfer must be used in the process that made it, "
                f"got process {os.getpid()} after a fork of {self._pid}"
            )
        with self._lock:
            if self._closed:
                raise PlanStateError("the transfer is closed")
            self._running.append(threading.get_ident())
        try:
            return drive(plan, self.store)
        finally:
            with self._lock:
                self._running.remove(threading.get_ident())
                if self._closed:
                    self._lock.notify_all()

    def __enter__(self) -> KVTransfer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _checked(self, request: CacheRequest) -> CacheRequest:
        if not isinstance(request, CacheRequest):
            raise TypeError(
                "`request` must be a CacheRequest of the contract, which `contract.request` makes, "
                f"got {type(request).__name__}"
            )
        own = self.contract
        mine = own.contract if isinstance(own, BoundContract) else own
        if request.contract is not mine and request.contract.fingerprint != mine.fingerprint:
            raise TypeError(
                "`request` must be one of this contract, "
                f"got fingerprints {request.contract.fingerprint} and {mine.fingerprint}"
                f"{_fields(request.contract, mine)}"
            )
        return request

    def lookup(self, request: CacheRequest, held: Any = 0, *, strategy: Strategy = "staged") -> Hit:
        """How long the reusable prefix of a request is.

        Args:
            request: The request; the last of its tokens is left to compute.
            held: What the engine holds itself: tokens for all groups, or per group tokens or a
                Bitset (see `kvmask.plans.held`). A hit must be longer than that; otherwise its
                length is 0. The hit remembers it for the load.
            strategy: ``"staged"`` or ``"exact"`` (see `LookupPlan`).

        Returns:
            Hit, with its counters. When the store failed, `Hit.answered` is False and `Hit.cause`
            says why.

        Raises:
            ArgumentError: A number is out of range.
            PlanStateError: The transfer is closed.
        """
        plan = LookupPlan(
            self.contract,
            self._checked(request).hashes,
            request.num_tokens,
            held=held,
            strategy=strategy,
            tools=self.tools,
        )
        renewer = self._renewer
        if renewer is None:
            hit: Hit = self._run(plan)
        else:
            renewer.running.append(None)
            try:
                hit = self._run(plan)
            finally:
                renewer.running.pop()
            renewer.note(plan)
        request.hit = hit
        return hit

    def load(
        self,
        request: CacheRequest,
        hit: Hit,
        tables: Any,
        *,
        held: Any = None,
        event: Any = None,
    ) -> LoadResult:
        """Fill the blocks of a hit from the store.

        Args:
            request: The request.
            hit: What ``lookup`` returned.
            tables: Per group, by name or in order, the block table to fill.
            held: What the engine holds now, when that is more than at the lookup.
            event: CUDA event or stream to wait for before the blocks are written.

        Returns:
            LoadResult: every planned key is loaded or failed, and how much of the hit can be used.

        Raises:
            ArgumentError: The hit rests on blocks that are not held any more.
            BlockIdError: A block to be loaded has no usable entry in its table.
            PlanStateError: The contract is not bound to memory, or the transfer is closed.
        """
        plan = self._checked(request).load_plan(self.contract, hit, tables, event, self.tools, held)
        return request.loaded(self._run(plan))

    def save(
        self, request: CacheRequest, tables: Any, num_tokens: int, *, event: Any = None
    ) -> SaveResult:
        """Store what a later request can use of a computed prefix, from the request's mark on.

        Args:
            request: The request; it remembers how far it is saved.
            tables: Per group, by name or in order, the block table.
            num_tokens: Tokens whose blocks are computed.
            event: CUDA event or stream to wait for before the bytes are read.

        Returns:
            SaveResult: every planned key is stored, was present or failed.

        Raises:
            ArgumentError: The request has too few digests for the tokens.
            BlockIdError: A block id lies outside its layout.
            PlanStateError: The contract is not bound to memory, or the transfer is closed.
        """
        plan = self._checked(request).save_plan(
            self.contract, tables, num_tokens, event, self.tools
        )
        return request.saved(self._run(plan))


def _fields(theirs: Any, mine: Contract) -> str:
    """The fields in which the contract of a request differs, for a message."""
    if not isinstance(theirs, Contract):
        return ""
    found = [str(item) for item in theirs.differences(mine) if item.in_fingerprint]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f", which differ in {'; '.join(found[:4])}{more}" if found else ""
