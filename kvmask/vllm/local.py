"""`"local_aware": true`: lookups that know what the GPU holds already.

Stock asks the store for the whole prefix, the part included that the engine's own prefix cache has
just found. Here the lookup is told how long that part is, and leaves out the full-attention blocks
below it. Windows and states are asked for as before: what reaches below the local hit is proved by
the store, never assumed.

The local hit is rounded down to the scheduler block, because that is where stock begins to load.

Where the worker answers lookups, vLLM's protocol has one number for both: the length of the local
hit travels in the upper half of the number of tokens (an integer of any length on the wire).
"""

from __future__ import annotations

from typing import Any

from kvmask.errors import ArgumentError

_SHIFT = 32
_MASK = (1 << _SHIFT) - 1

# A lookup of no tokens, all of which are local: the worker forgets what it remembers of the store.
FORGET = _MASK << _SHIFT


def pack(num_tokens: int, local_tokens: int) -> int:
    """One number for both; the upper half is zero where nothing is local."""
    return local_tokens << _SHIFT | num_tokens


def unpack(packed: int) -> tuple[int, int]:
    """(num_tokens, local_tokens) of a packed number."""
    return packed & _MASK, packed >> _SHIFT


def check_option(value: Any) -> bool:
    """Refuse what is no switch."""
    if not isinstance(value, bool):
        raise ArgumentError(f"`local_aware` must be true or false, got {value!r}")
    return value
