"""Putting kvmask under AscendStore, and taking it out."""

from __future__ import annotations

import threading
from typing import Any

from kvmask.ascend.database import key_strings, key_strings_with_ids, prepare_value
from kvmask.ascend.lookup import (
    check_strategy,
    lookup_scheduler,
    register_kv_caches,
    set_default,
)
from kvmask.ascend.masks import load_mask, lookup_mask, store_mask
from kvmask.ascend.releases import fitting, logger, seams, version
from kvmask.engines.features import log_left, log_placed

REPLACEMENTS: dict[str, Any] = {
    "worker.lookup_scheduler": lookup_scheduler,
    "coordinator.store_mask": store_mask,
    "coordinator.lookup_mask": lookup_mask,
    "coordinator.load_mask": load_mask,
    "database.key_strings": key_strings,
    "database.key_strings_with_ids": key_strings_with_ids,
    "database.prepare_value": prepare_value,
}
# What calls stock's, whatever that does.
LISTENERS: dict[str, Any] = {"worker.register": register_kv_caches}

_lock = threading.Lock()


def install(lookup: str = "staged") -> None:
    """Put kvmask under vllm-ascend's AscendStore in this process.

    Each feature is put in place where the functions that it replaces and relies on are those of a
    known release; one line of the log names what is in place and what stays stock. Calling it again
    only changes the strategy.

    Args:
        lookup: ``"staged"`` asks the store for the keys that decide, ``"exact"`` once for all keys
            that can matter.

    Raises:
        ArgumentError: There is no such strategy.
        UnsupportedReleaseError: No feature fits the installed vllm-ascend; the message names what
            changed.
    """
    check_strategy(lookup)
    placed = fitting()
    wanted = {name: REPLACEMENTS[name] for name in placed.seams}
    wanted |= {name: listen for name, listen in LISTENERS.items() if seams.digest(name)}
    with _lock:
        # What somebody else has put over kvmask's functions stays where it is.
        if seams.placed() != wanted.keys():
            seams.place(wanted)
            log_placed(logger, placed, "vllm-ascend", version())
        set_default(lookup)


def uninstall() -> None:
    """Give AscendStore its own functions back.

    Where somebody else has put a function over kvmask's, that one stays, and the log says so: it
    may go on to call kvmask's.
    """
    log_left(logger, seams.restore())
