"""The interpreter's exit waits for daemon threads that are in a call of a store.

A thread that comes back from such a call into an interpreter that has ended is ended by Python, in
the middle of C++ frames: the process aborts. So the exit waits for the calls that are under way,
and no other begins.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# The longest wait of Mooncake's client in one call is 60 s.
EXIT_SECONDS = 120.0
# Seconds between two looks at what still runs, and how long nothing may have run until a queue
# counts as empty.
_LOOK = 0.005
_QUIET = 0.02

_Ending = Callable[[Any, float], None]
_endings: weakref.WeakKeyDictionary[Any, tuple[int, _Ending]] = weakref.WeakKeyDictionary()


def at_exit(thing: Any, end: _Ending) -> None:
    """Have the exit of this process end something, for as long as it lives. Forked children do not.

    Args:
        thing: It is not kept alive.
        end: Called with it and the moment, on `time.monotonic`, until which it may wait. It lets
            no call of a store begin any more, and waits for those that run.
    """
    _endings[thing] = os.getpid(), end
    _register()


@functools.cache
def _register() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thing, (pid, end) in list(_endings.items()):
        if pid == os.getpid():
            end(thing, deadline)


class StoreCalls:
    """Wraps the calls of threads that nobody joins, so that the exit waits for them.

    A thread that begins one after that is ended, by `SystemExit`.

    Args:
        grace: Seconds for which others may still begin at the exit, one after another: what waits
            in a queue.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self._grace = grace
        # The threads in a call; a thread can be there twice. Appending and removing are atomic.
        self._running: list[int] = []
        self._closed = False
        at_exit(self, StoreCalls._end)
        if hasattr(os, "register_at_fork"):
            known = weakref.ref(self)

            def in_child() -> None:
                calls = known()
                if calls is not None:  # the threads of its calls stayed behind
                    calls._running.clear()
                    at_exit(calls, StoreCalls._end)

            os.register_at_fork(after_in_child=in_child)

    def __enter__(self) -> None:
        self._running.append(threading.get_ident())
        # Looked at after that: either the exit sees this call, or this call sees the exit.
        if self._closed:
            self._running.remove(threading.get_ident())
            raise SystemExit

    def __exit__(self, *error: object) -> None:
        self._running.remove(threading.get_ident())

    def _end(self, deadline: float) -> None:
        now = time.monotonic()
        stop, busy = min(deadline, now + self._grace), now
        while now < stop and (self._running or now < busy + _QUIET):
            if self._running:
                busy = now
            time.sleep(_LOOK)
            now = time.monotonic()
        self._closed = True
        own = threading.get_ident()
        while any(thread != own for thread in list(self._running)):
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK)
