"""The one place where kvmask takes hold of vLLM's objects. Nothing else here reaches into them.

vLLM has no setting for the classes of its coordinator, worker, threads and layouts, so:

* `install` replaces functions of vLLM's classes, by `kvmask.vllm.seams`;
* the connector gives objects that vLLM has just made for it a subclass of their own class
  (`adopt`). Only objects whose class is vLLM's own are touched;
* what kvmask computes of an object is kept in one entry of its `__dict__` (`state`);
* the connector's name is registered in vLLM's factory (`kvmask._plugin.register`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_STATE = "_kvmask_state"


def adopt(thing: Any, stock: type, own: type) -> bool:
    """Give an object a class of kvmask's, if its own is exactly vLLM's.

    Args:
        thing: The object. No other thread uses it yet.
        stock: vLLM's class.
        own: A subclass that has further methods and no further state.

    Returns:
        Whether the object is of kvmask's class now.
    """
    if type(thing) is stock:
        thing.__class__ = own
    return type(thing) is own


@functools.cache
def derived(stock: type, methods: tuple[tuple[str, Callable[..., Any]], ...]) -> type:
    """A class of vLLM's with methods of kvmask's; the same one for equal arguments.

    Args:
        stock: vLLM's class.
        methods: Pairs of name and function.
    """
    return type(stock.__name__, (stock,), {**dict(methods), "kvmask_own": True})


def state(thing: Any) -> dict[str, Any]:
    """What kvmask keeps of an object of vLLM's."""
    kept: dict[str, Any] | None = thing.__dict__.get(_STATE)
    if kept is None:
        kept = thing.__dict__.setdefault(_STATE, {})
    return kept


def seen(thing: Any, *names: str) -> list[tuple[Any, str, Any]]:
    """Attributes of an object as they are now, for `same_attributes`; those it has.

    Args:
        thing: The object.
        names: The attributes. Of a list it is seen when its items are others, but not when one of
            them changes in place.
    """
    found = ((name, getattr(thing, name)) for name in names if hasattr(thing, name))
    return [(thing, name, list(value) if type(value) is list else value) for name, value in found]
