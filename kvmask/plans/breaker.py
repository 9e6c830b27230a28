"""Breaker: remembers that a store does not answer, so that the next plans do not ask it.

A call to a store that is gone takes seconds before it fails. A plan makes one such call and none
after it. The breaker tells the other plans, and those to come: for some seconds they fail at once.
Then one call tries again. When it is answered, all go on as before.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from kvmask._core import shown
from kvmask.checks import check_function, check_number
from kvmask.errors import ArgumentError, StoreError


class Breaker:
    """Whether one store answers. Safe to share by threads, and by all plans of the store.

    Args:
        seconds: How long no call is made after one that was not answered, above 0. A call that
            tries again is the only one for as long.
        clock: Monotonic seconds, for tests.

    Attributes:
        open: The store did not answer, and has not answered since.
        outages: How often the store stopped answering.
        seconds: How long no call is made after one that was not answered.

    Raises:
        ArgumentError: A number is out of range.
        TypeError: An argument is of another kind.

    >>> Breaker(seconds=5.0).open
    False
    """

    __slots__ = ("_clock", "_code", "_lock", "_shown", "_until", "open", "outages", "seconds")

    def __init__(
        self, seconds: float = 10.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_number(seconds, "seconds")
        check_function(clock, "clock")
        if not 0 < seconds < math.inf:
            raise ArgumentError(f"`seconds` must be more than 0 and finite, got {shown(seconds)}")
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self.open = False
        self.outages = 0
        # What the call said that was not answered, as text: an exception would keep the frames
        # that it came through, and with them an engine's memory.
        self._shown = ""
        self._code: int | None = None
        self._until = 0.0

    def refusal(self) -> StoreError | None:
        """Why the next call is not to be made; None: make it.

        Once the time is over, one caller gets None and tries. It has to say what came of it. For
        as long again the others are refused.
        """
        with self._lock:
            if not self.open:
                return None
            now = self._clock()
            if now >= self._until:
                self._until = now + self.seconds
                return None
            shown, code = self._shown, self._code
        return StoreError(
            f"the store must answer before it is called again, got {shown} less than "
            f"{self.seconds:g} s ago",
            code,
        )

    def failed(self, error: BaseException, begun: int) -> bool:
        """A call was not answered; True when this is a new outage.

        Args:
            error: What the call raised, or what its codes mean.
            begun: What `outages` was when the call began.
        """
        with self._lock:
            if not self.open and begun != self.outages:
                return False  # it began before an outage that is over: that is old news
            self._until = self._clock() + self.seconds
            if self.open:
                return False
            self._code = getattr(error, "code", None)
            self._shown = shown(error)
            self.outages += 1
            self.open = True
            return True

    def answered(self, begun: int) -> bool:
        """A call was answered; True when this ends an outage.

        Args:
            begun: What `outages` was when the call began: one that began before the store stopped
                says nothing of now.
        """
        with self._lock:
            if not self.open or begun != self.outages:
                return False
            self.open = False
            return True


def no_answer(codes: Sequence[int]) -> StoreError:
    """What to say of a call that every key got such a code from."""
    return StoreError(
        f"the store must answer, got code {codes[0]} for all {len(codes)} keys of a call", codes[0]
    )
