"""Short memories of keys: known to be present, or known to fail.

Both are off unless a caller passes one.

A `PresenceMemo` saves calls: keys that were stored or seen a moment ago are not asked again. An
entry may outlive its object; the load then reports the block. Its time must be shorter than the
store's lease.

An `AbsenceMemo` ends a loop. A key can exist and fail to load each time, when the machine that
holds its bytes is gone: every lookup then hits it, and every load fails. Keys that failed to load
count as absent for a while.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvmask._core import check_integer, shown
from kvmask.checks import check_function, check_number
from kvmask.errors import ArgumentError


class KeyMemo:
    """Bounded set of keys, each remembered for a time. Safe to share by threads.

    Args:
        seconds: How long an entry holds, above 0.
        capacity: Keys; the oldest go first.
        clock: Monotonic seconds, for tests.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: An argument is of another kind.
    """

    def __init__(
        self,
        seconds: float,
        capacity: int = 1 << 17,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number(seconds, "seconds")
        check_function(clock, "clock")
        if not seconds > 0:
            raise ArgumentError(f"`seconds` must be more than 0, got {shown(seconds)}")
        check_integer(capacity, "capacity")
        self._seconds = seconds
        self._capacity = capacity
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Iterable[str]) -> None:
        """Remember these keys from now on.

        Args:
            keys: The keys, as text.
        """
        until = self._clock() + self._seconds
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def known(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it is remembered.

        Args:
            keys: The keys, as text.

        Returns:
            One bool per key, in order.
        """
        now = self._clock()
        with self._lock:
            return [self._until.get(key, -math.inf) > now for key in keys]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys.

        Args:
            keys: The keys, as text. Those that are not remembered are passed over.
        """
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._until.clear()


class PresenceMemo(KeyMemo):
    """Keys that are known to be present and need not be asked.

    Args:
        seconds: How long an entry holds. Stay below the store's lease: an object whose lease ended
            can be evicted.
        capacity: Keys; the oldest go first.
        clock: Monotonic seconds, for tests.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: An argument is of another kind.

    >>> memo = PresenceMemo(seconds=1.0)
    >>> memo.add(["a"])
    >>> memo.known(["a", "b"])
    [True, False]
    """

    def __init__(
        self,
        seconds: float = 2.0,
        capacity: int = 1 << 17,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(seconds, capacity, clock)


class AbsenceMemo(KeyMemo):
    """Keys that exist and failed to load: lookups take them for absent.

    Args:
        seconds: How long an entry holds.
        capacity: Keys; the oldest go first.
        clock: Monotonic seconds, for tests.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: An argument is of another kind.

    >>> memo = AbsenceMemo(seconds=30.0)
    >>> memo.add(["a"])
    >>> memo.known(["a", "b"])
    [True, False]
    """

    def __init__(
        self,
        seconds: float = 30.0,
        capacity: int = 1 << 17,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(seconds, capacity, clock)
