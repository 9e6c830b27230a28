"""Renewer: asks a store for what `Renewals` says, in a thread of its own."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from kvmask._core import read_answers
from kvmask.plans.breaker import no_answer
from kvmask.plans.lookup import LookupPlan
from kvmask.plans.renew import Renewals
from kvmask.plans.tools import PlanTools

# Seconds between a hit and its first renewal, so that the answer is sent before; and between one
# batch and the next, so that other threads get the interpreter.
_PAUSE = 0.002
# Seconds after which an idle thread looks whether its store is still there.
_LOOK = 10.0
# Seconds without renewals after the store did not answer, or no thread could be had.
_QUIET = 10.0


_all: weakref.WeakSet[Renewer] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has none of the threads."""
    for renewer in list(_all):
        renewer._closed = True
        renewer._thread = None
        renewer.renewals = Renewals()  # the lock of the parent's may be held for ever


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class Renewer:
    """A daemon thread that renews what hits make worth keeping.

    It begins with the first hit. It asks in batches, and asks for none while a lookup is under way.
    When the store does not answer, or no thread can be started, it drops what it has, and takes no
    hits for ten seconds. In a forked child it does nothing.

    Args:
        renewals: What to ask for.
        ask: Makes one existence call, like ``store.batch_is_exist``.
        tools: Counters, policy, log and breaker of the engine's plans. Renewed keys are counted in
            its ``stats``. An outage that the breaker remembers is not tried out here.
        alive: Whether the store may still be called; the thread ends within ten seconds when it may
            not.

    Attributes:
        running: Has an entry for each lookup under way. Whoever makes a lookup appends one, and
            pops one when the lookup is over: no batch begins meanwhile.
    """

    def __init__(
        self,
        renewals: Renewals,
        ask: Callable[[list[str]], Any],
        tools: PlanTools,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.renewals = renewals
        self._ask = ask
        self._tools = tools
        self._alive = alive
        self._lock = threading.Lock()
        # A list, since its append and pop are atomic: a lock would cost a lookup more.
        self.running: list[None] = []
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._quiet_until = 0.0
        self._noted_drops = 0
        _all.add(self)

    def note(self, plan: LookupPlan) -> None:
        """Take a lookup that is over, as `Renewals.note` does; not while the store is silent."""
        if self._closed or (self._quiet_until and time.monotonic() < self._quiet_until):
            return
        if not self.renewals.note(plan):
            return
        if self._thread is None:
            try:
                self._start()
            except RuntimeError as error:  # the lookup has its hit all the same
                self._quiet_until = time.monotonic() + _QUIET
                self.renewals.drop()
                self._warn("what was to be renewed is dropped: %r", error)
                return
        if not self._wake.is_set():
            self._wake.set()

    def clear(self) -> None:
        """Forget what was noted and renewed."""
        self.renewals.clear()

    def close(self, seconds: float | None = None) -> None:
        """End the thread, and wait for a call that it makes. Later hits are dropped.

        Args:
            seconds: Wait no longer than this; None waits to the end.
        """
        self._closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        self.renewals.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="kvmask-renewals", daemon=True)
                thread.start()
                self._thread = thread  # started: `close` may join it

    def _warn(self, message: str, *values: object) -> None:
        if self._tools.log is not None:
            self._tools.log.warning(message, *values)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_LOOK)
            self._wake.clear()
            if not self._alive():
                self._closed = True
                self.renewals.clear()
                return
            try:
                self._drain()
            except Exception as error:  # such as no memory: nothing that an engine should end for
                self.renewals.drop()
                self._warn("what was to be renewed is dropped: %r", error)

    def _drain(self) -> None:
        while self.renewals.pending and not self._closed:
            time.sleep(_PAUSE)
            if self.running:
                continue
            if not self._alive():
                self._closed = True
                self.renewals.clear()
                return
            keys = self.renewals.next_keys()
            if keys and not self._renew(keys):
                self.renewals.drop()
        stats, dropped = self._tools.stats, self.renewals.dropped
        if stats is not None and dropped > self._noted_drops:
            stats.add(dropped_renewals=dropped - self._noted_drops)
            self._noted_drops = dropped

    def _renew(self, keys: list[str]) -> bool:
        """Ask for keys; False when the store did not answer."""
        tools, breaker = self._tools, self._tools.breaker
        if breaker is not None and breaker.open:
            return False
        begun = 0 if breaker is None else breaker.outages
        error: Exception | None = None
        try:
            codes = read_answers(self._ask(keys), len(keys))
        except Exception as e:
            error = e
        else:
            if tools.policy.outage(codes):
                error = no_answer(codes)
        if error is None:
            if tools.stats is not None:
                tools.stats.add(renewed_keys=len(keys))
            return True
        self._quiet_until = time.monotonic() + _QUIET
        if breaker is not None:
            tools.unanswered(error, begun)
        else:
            self._warn("the store failed to answer a renewal of %d keys: %r", len(keys), error)
        return False
