"""Presence memo: keys that were stored or seen a moment ago are not asked again.

Off unless a caller passes one. It trades certainty for calls: an entry may outlive its object, and
the load then reports the block. Its time must be shorter than the store's lease.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvmask.errors import ArgumentError
from kvmask.groups import check_count


class PresenceMemo:
    """Bounded set of keys known to be present, each for a short time. Safe to share by threads.

    Args:
        seconds: How long an entry holds. Mooncake's lease is 5 s by default in 0.3.13 and can be
            configured: stay below it.
        capacity: Keys; the oldest go first.
        clock: Monotonic seconds, for tests.

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
        if not seconds > 0:
            raise ArgumentError(f"`seconds` must be more than 0, got {seconds}")
        check_count(capacity, "capacity")
        self._seconds = seconds
        self._capacity = capacity
        self._clock = clock
        self._until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Iterable[str]) -> None:
        """Remember that these keys are present now."""
        until = self._clock() + self._seconds
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._capacity:
                self._until.popitem(last=False)

    def known(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it need not be asked."""
        now = self._clock()
        with self._lock:
            return [self._until.get(key, -math.inf) > now for key in keys]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys: a load or the store said that they are gone."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._until.clear()
