"""One breaker per store: what all threads of a process know of a store that does not answer."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from kvmask.plans import Breaker, PlanTools
from kvmask.vllm.releases import logger

_lock = threading.Lock()
_breakers: weakref.WeakKeyDictionary[Any, Breaker] = weakref.WeakKeyDictionary()


def breaker_of(store: Any) -> Breaker:
    """The breaker of a store; lookups, saves and loads that use the store share it.

    A store that cannot be remembered gets a new one each time.
    """
    with _lock:
        try:
            found = _breakers.get(store)
            if found is None:
                found = _breakers[store] = Breaker()
        except TypeError:  # neither hashable nor weakly referable
            found = Breaker()
        return found


class ThreadTools(PlanTools):
    """Tools of a transfer thread: outages are logged, once each. Failed keys are the thread's to
    name."""

    __slots__ = ()

    def unanswered(self, error: BaseException, begun: int) -> None:
        """See `PlanTools`."""
        breaker = self.breaker
        if breaker is not None and breaker.failed(error, begun):
            logger.warning(
                "The Mooncake store does not answer (%s): no call is made for %g s, then one "
                "tries again",
                repr(error)[:300],
                breaker.seconds,
            )

    def answered(self, begun: int) -> None:
        """See `PlanTools`."""
        breaker = self.breaker
        if breaker is not None and breaker.answered(begun):
            logger.warning("The Mooncake store answers again")
