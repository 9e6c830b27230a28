"""StoreGuard: puts and gets of an engine's blocks by way of kvmask's own memory, and seals.

With bounce memory a block lies in one piece in a borrowed chunk while the store reads or writes it.
The engine's blocks are read before the put, and written after the get was checked. Without it, the
store has the blocks themselves, and the chunk holds their seals alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvmask._core import memory_at, read_answers
from kvmask.errors import ArgumentError, StoreError
from kvmask.guard.copies import Copies, copies_for
from kvmask.guard.memory import BounceMemory, Chunk, Chunks
from kvmask.guard.seal import SEAL_BYTES, load_seal
from kvmask.layout import KVLayout
from kvmask.plans.calls import GET, PUT
from kvmask.plans.metrics import TransferStats
from kvmask.plans.policy import BROKEN_SEAL, NO_BOUNCE, StorePolicy

# Objects begin at cache lines; seals alone lie side by side.
_LINE = 64
# Without bounce memory: chunks for seals alone.
SEALS = BounceMemory(chunk_bytes=1 << 16, chunks=16, max_retired=1024)


class StoreGuard:
    """Makes the puts and gets of one transfer. Safe to use from several threads.

    Args:
        layouts: Where the engine's blocks lie.
        register: Makes memory known to the store: called with address and size of every new chunk,
            raises when it is refused. The first are made by ``chunks.fill``.
        sealed: Objects carry a checksum.
        bounce: Memory to bounce blocks off; None transfers the blocks themselves.
        policy: How the store's codes read.
        stats: Counters.
        log: Where broken seals and the end of bounce memory are logged.

    Attributes:
        chunks: The memory.
        seals: Objects carry a checksum.
        isolates: The store never touches the engine's blocks.

    Raises:
        ArgumentError: Objects in device memory are to be sealed without bounce memory, or nothing
            can copy between the host and the device.
        MissingDependencyError: A package that is needed is not installed.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        register: Callable[[int, int], Any],
        *,
        sealed: bool,
        bounce: BounceMemory | None,
        policy: StorePolicy,
        stats: TransferStats | None,
        log: logging.Logger | None,
    ) -> None:
        self.seals = sealed
        self.isolates = bounce is not None
        self._policy = policy
        self._stats = stats
        self._log = log
        self._seal = load_seal() if sealed else None
        self._extra = SEAL_BYTES if sealed else 0
        self._copies: Copies | None = None
        if bounce is not None:
            self._copies = copies_for(layouts)
        else:
            devices = {str(layout.device) for layout in layouts if layout.storages} - {"cpu"}
            if devices:
                raise ArgumentError(
                    "sealed objects must lie in host memory, where their checksum is computed: "
                    f"pass `bounce` to the transfer, got layouts on {sorted(devices)}"
                )
        self._limits = SEALS if bounce is None else bounce

        def open_chunk(chunk: Chunk) -> None:
            # The store comes last: what raises before it leaves nothing registered.
            try:
                self._prepare(chunk)
                register(chunk.address, chunk.size)
            except BaseException:
                chunk.free()
                raise

        self.chunks = Chunks(self._limits, open_chunk, stats)

    def __repr__(self) -> str:
        return f"StoreGuard(seals={self.seals}, bounces={self.isolates})"

    def _prepare(self, chunk: Chunk) -> None:
        if self._copies is None:
            return
        try:
            self._copies.open(chunk)
        except Exception as error:  # of the device: it says nothing of the store
            raise StoreError(
                f"{chunk.size} bytes of bounce memory must be locked for the device, got {error!r}"
            ) from error

    def _need(self, num_bytes: int) -> int:
        """Bytes of a chunk that one block takes."""
        if not self.isolates:
            return SEAL_BYTES
        return -(-(num_bytes + self._extra) // _LINE) * _LINE

    def cut(self, cut: Any, num_bytes: list[int], sizes: Any) -> tuple[Any, list[int]]:
        """Cut keys into calls with a policy's function, and so that each fits a chunk.

        Args:
            cut: ``cut_put`` or ``cut_get`` of the policy.
            num_bytes: Bytes of each block.
            sizes: Sizes of its pieces.

        Returns:
            (calls as (start, stop), positions of keys that no call can hold).
        """
        extra = self._extra
        totals = [n + extra for n in num_bytes]
        if self.isolates:
            rows: Any = [[n] for n in totals]
        else:
            longer: dict[int, list[int]] = {}
            rows = []
            for row in sizes:
                known = longer.get(id(row))
                if known is None:
                    known = longer[id(row)] = [*row, extra]
                rows.append(known)
        calls, oversize = cut(totals, rows)
        room, oversize = self._limits.chunk_bytes, list(oversize)
        fitting: list[tuple[int, int]] = []
        for start, stop in calls:
            first, used = start, 0
            for i in range(start, stop):
                need = self._need(num_bytes[i])
                if used + need > room:
                    if first < i:
                        fitting.append((first, i))
                    first, used = i, 0
                if need > room:
                    oversize.append(i)
                    first = i + 1
                else:
                    used += need
            if first < stop:
                fitting.append((first, stop))
        return fitting, oversize

    def run(self, store: Any, name: str, args: tuple[Any, ...]) -> Sequence[int]:
        """Make a put or get.

        Args:
            store: The store.
            name: Of the call.
            args: Keys, addresses and sizes of the engine's blocks, and what else a put has.

        Returns:
            One code, or number of bytes, per key, as of the store. `BROKEN_SEAL` for an object that
            does not hold what was put under its key, `NO_BOUNCE` when there is no memory left.

        Raises:
            PlanStateError: The transfer is closed.
        """
        if name not in (PUT, GET):
            raise ArgumentError(f"a guard must be given puts and gets, got {name}")
        keys, addresses, sizes, *more = args
        totals = [sum(row) for row in sizes]
        offsets, used = [], 0
        for n in totals:
            offsets.append(used)
            used += self._need(n)
        if used > self._limits.chunk_bytes:
            raise ArgumentError(
                f"a call must fit {self._limits.chunk_bytes} bytes of bounce memory, got {used}"
            )
        refused: StoreError | None = None
        try:
            chunk = self.chunks.take()
        except StoreError as error:
            chunk, refused = None, error  # no outage: the store's other calls may work
        if chunk is None:
            if self._log is not None:
                why = refused or "nothing moves until the store's client is closed and made anew"
                self._log.warning(
                    "there is no bounce memory left, %d bytes are retired: %s",
                    self.chunks.retired_bytes,
                    why,
                )
            return [NO_BOUNCE] * len(keys)
        settled = False
        try:
            if name == PUT:
                codes, settled = self._put(
                    store, keys, addresses, sizes, more, totals, chunk, offsets
                )
            else:
                codes, settled = self._get(store, keys, addresses, sizes, totals, chunk, offsets)
        finally:
            # Also when the call raised: nobody knows how far it came.
            if settled:
                self.chunks.give_back(chunk)
            else:
                self.chunks.retire(chunk)
        return codes

    def _rows(
        self, addresses: Any, sizes: Any, totals: list[int], chunk: Chunk, offsets: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """What the store is given in place of the engine's pieces."""
        if self.isolates:
            return (
                [[chunk.address + offset] for offset in offsets],
                [[n + self._extra] for n in totals],
            )
        return (
            [
                [*row, chunk.address + offset]
                for row, offset in zip(addresses, offsets, strict=True)
            ],
            [[*row, SEAL_BYTES] for row in sizes],
        )

    def _seal_in(
        self, key: str, addresses: Any, sizes: Any, n: int, chunk: Chunk, offset: int
    ) -> tuple[bytes, slice]:
        """The seal of the bytes that lie there now, and its own offset in the chunk."""
        assert self._seal is not None
        if self.isolates:
            pieces = [chunk.view[offset : offset + n]]
            offset += n
        else:
            pieces = [memory_at(*piece) for piece in zip(addresses, sizes, strict=True)]
        return self._seal(key, pieces), slice(offset, offset + SEAL_BYTES)

    def _put(
        self,
        store: Any,
        keys: list[str],
        addresses: Any,
        sizes: Any,
        more: list[Any],
        totals: list[int],
        chunk: Chunk,
        offsets: list[int],
    ) -> tuple[list[int], bool]:
        if self._copies is not None:
            self._copies.gather(addresses, sizes, chunk, offsets)
        if self.seals:
            for i, key in enumerate(keys):
                seal, where = self._seal_in(
                    key, addresses[i], sizes[i], totals[i], chunk, offsets[i]
                )
                chunk.view[where] = seal
        rows = self._rows(addresses, sizes, totals, chunk, offsets)
        codes = read_answers(getattr(store, PUT)(keys, *rows, *more), len(keys))
        policy = self._policy
        settled = all(
            code == 0 or policy.stored(code) or code in policy.present_codes or policy.settled(code)
            for code in codes
        )
        return codes, settled

    def _get(
        self,
        store: Any,
        keys: list[str],
        addresses: Any,
        sizes: Any,
        totals: list[int],
        chunk: Chunk,
        offsets: list[int],
    ) -> tuple[list[int], bool]:
        rows = self._rows(addresses, sizes, totals, chunk, offsets)
        given = read_answers(getattr(store, GET)(keys, *rows), len(keys))
        policy = self._policy
        settled = all(code >= 0 or policy.settled(code) for code in given)
        good: list[int] = []
        broken = 0
        for i, (got, n) in enumerate(zip(given, totals, strict=True)):
            whole = got == n + self._extra or policy.loaded(got, n + self._extra)
            if whole and self.seals:
                seal, where = self._seal_in(keys[i], addresses[i], sizes[i], n, chunk, offsets[i])
                whole = chunk.view[where] == seal
            if whole:
                good.append(i)
                given[i] = n
            elif self.seals and got >= 0:
                given[i] = BROKEN_SEAL
                broken += 1
        if broken:
            self._tell_broken(keys, given, broken)
        if self._copies is not None and good:
            every = len(good) == len(keys)
            self._copies.scatter(
                addresses if every else [addresses[i] for i in good],
                sizes if every else [sizes[i] for i in good],
                chunk,
                offsets if every else [offsets[i] for i in good],
            )
        return given, settled

    def _tell_broken(self, keys: list[str], given: list[int], broken: int) -> None:
        if self._stats is not None:
            self._stats.add(broken_seals=broken)
        if self._log is not None:
            first = next(key for key, code in zip(keys, given, strict=True) if code == BROKEN_SEAL)
            self._log.warning(
                "%d objects do not hold what was put under their keys, such as %.200r",
                broken,
                first,
            )
