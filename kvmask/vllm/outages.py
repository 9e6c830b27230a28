"""One breaker per store: what all threads of a process know of a store that does not answer."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from kvmask.plans import Breaker

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
