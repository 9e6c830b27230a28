"""Registered memory of kvmask's own, in chunks that calls borrow one at a time.

A chunk whose call may still go on is never borrowed again, nor freed: it is retired. Another takes
its place, up to a bound. What is retired stays for as long as the process lives, or until somebody
says that the store's client is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from kvmask._core import check_integer
from kvmask.errors import PlanStateError, StoreError
from kvmask.plans.metrics import TransferStats

MIB = 1 << 20
MAX_CHUNK = 1 << 40
MAX_CHUNKS = 1 << 16

# Retired memory that outlives its guard: a store's client may still touch it.
_kept: list[Chunk] = []


@dataclass(frozen=True, slots=True)
class BounceMemory:
    """How much memory a transfer takes for itself, to bounce blocks off it.

    Every put and get borrows one chunk. A call is cut to fit it, and a block that does not fit a
    chunk fails. So `chunks` is also how many calls run at a time; others wait.

    Args:
        chunk_bytes: Bytes of one chunk, at least 4096. The default holds the largest call of
            `MooncakePolicy`: 512 pieces of 64 KiB.
        chunks: Chunks that calls can borrow.
        max_retired: Chunks that may be retired and replaced. Beyond it fewer are left, and without
            any every key fails with code -10004. Memory is taken for those that are replaced alone.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: A number is no integer.
    """

    chunk_bytes: int = 32 * MIB
    chunks: int = 4
    max_retired: int = 32

    def __post_init__(self) -> None:
        limits = {
            "chunk_bytes": (4096, MAX_CHUNK),
            "chunks": (1, MAX_CHUNKS),
            "max_retired": (0, MAX_CHUNKS),
        }
        for item in fields(self):
            value = check_integer(getattr(self, item.name), item.name, *limits[item.name])
            object.__setattr__(self, item.name, value)


class Chunk:
    """A piece of memory for one call at a time.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        view: The same as a writable memoryview.
        unlock: Undoes what a device did with it.
    """

    __slots__ = ("_memory", "address", "size", "unlock", "view")

    def __init__(self, size: int) -> None:
        import ctypes  # few programs bounce: not at import
        import mmap

        try:
            # Private: a forked child that writes to it must not change what this process sends.
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreError(f"there must be {size} bytes of memory, got {error!r}") from error
        self.size = size
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.unlock: Callable[[], Any] | None = None

    def free(self) -> None:
        """End what a device keeps of it. The memory goes with the object."""
        unlock, self.unlock = self.unlock, None
        if unlock is not None:
            unlock()


def keep(chunk: Chunk) -> None:
    """Keep a chunk's memory for as long as the process lives: a store's client may touch it."""
    _kept.append(chunk)


class Chunks:
    """The chunks of one guard. Safe to use from several threads.

    Args:
        limits: Sizes and numbers.
        open_chunk: Prepares a new chunk and registers it with the store. When it raises, it leaves
            neither.
        stats: Counters.
    """

    def __init__(
        self,
        limits: BounceMemory,
        open_chunk: Callable[[Chunk], None],
        stats: TransferStats | None,
    ) -> None:
        self._limits = limits
        self._open_chunk = open_chunk
        self._stats = stats
        self._changed = threading.Condition()
        self._free: list[Chunk] = []
        self._live = 0  # free or borrowed
        self._retired: list[Chunk] = []
        self._closed = False

    @property
    def retired_bytes(self) -> int:
        """Bytes of all chunks that are retired."""
        return len(self._retired) * self._limits.chunk_bytes

    def fill(self) -> None:
        """Make and register all chunks now, so that what fails does so here."""
        for _ in range(self._limits.chunks):
            self._free.append(self._make())
            self._live += 1

    def _make(self) -> Chunk:
        chunk = Chunk(self._limits.chunk_bytes)
        self._open_chunk(chunk)
        return chunk

    def take(self) -> Chunk | None:
        """Borrow a chunk, and wait for one if need be. None: all are retired.

        Raises:
            PlanStateError: The transfer is closed.
            StoreError: The store refuses to register a new chunk.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise PlanStateError("the transfer is closed")
                if self._free:
                    return self._free.pop()
                limits = self._limits
                total = self._live + len(self._retired)
                if self._live < limits.chunks and total < limits.chunks + limits.max_retired:
                    self._live += 1
                    break
                if not self._live:
                    return None
                self._changed.wait()
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._live -= 1
                self._changed.notify_all()
            raise

    def give_back(self, chunk: Chunk) -> None:
        """End a call of which nothing is under way."""
        with self._changed:
            if self._closed:
                # A plan that is driven by hand went on: nobody unregisters the chunk any more.
                self._live -= 1
                self._retired.append(chunk)
                keep(chunk)
                return
            self._free.append(chunk)
            self._changed.notify()

    def retire(self, chunk: Chunk) -> None:
        """End a call that may still go on: its chunk is not used again."""
        with self._changed:
            self._live -= 1
            self._retired.append(chunk)
            keep(chunk)
            self._changed.notify_all()
        if self._stats is not None:
            self._stats.add(retired_bytes=chunk.size)

    def close(self) -> list[Chunk]:
        """End all borrowing; the chunks of which nothing is under way, to be unregistered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            free, self._free = self._free, []
            self._live -= len(free)
        return free

    def release(self) -> int:
        """Free what is retired, once the store's client is closed; returns its bytes.

        Raises:
            PlanStateError: Calls can still borrow chunks.
        """
        with self._changed:
            if not self._closed:
                raise PlanStateError("retired memory must be released after `close`")
        freed = 0
        while self._retired:  # one by one: what raises leaves the others to another call
            chunk = self._retired.pop()
            _kept.remove(chunk)
            freed += chunk.size
            chunk.free()
        return freed
