"""Let a forked child of a connected process end.

The client of Mooncake has threads, which a fork leaves behind. When the child ends, the client's
destructors wait for them or use what they held; the child of 0.3.13 dies of SIGSEGV, whatever its
status was. So the child destroys neither the store nor what its library keeps. A child that calls
``exec``, as `subprocess` does, is another program and not concerned.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def spare_in_forks(store: Any) -> None:
    """From now on, forked children end without destroying this store."""
    _stores.add(store)
    _register()


@functools.cache
def _register() -> None:
    """Register, once, what a forked child does first."""
    if not hasattr(os, "register_at_fork"):
        return
    import ctypes

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):  # glibc has it
        return
    leave = ctypes.cast(libc._exit, ctypes.c_void_p)

    def in_child() -> None:
        for kept in list(_stores):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        if _stores:
            # What is registered last runs first: Python has ended by then, and the destructors of
            # libraries that were loaded before the fork do not run. The status stays.
            libc.on_exit(leave, None)

    os.register_at_fork(after_in_child=in_child)
