"""Putting kvmask's functions in place of vLLM's, and what a process says about it."""

from __future__ import annotations

import importlib.metadata
import os
import threading
from typing import Any

import kvmask
from kvmask.engines import Placed, after_import
from kvmask.engines.features import log_left
from kvmask.errors import UnsupportedReleaseError
from kvmask.switch import ALLOWED, LOOKUP, PLUGIN, RAY_PREFIXES, SWITCH, allow_list, ray_prefixes
from kvmask.vllm import acting, coordinator, hashing, layouts, loading, metrics, saving, seams
from kvmask.vllm import lookup as lookups
from kvmask.vllm.features import ABSENT
from kvmask.vllm.releases import Release, current, fitting, logger, version

_HASHER = "engine.block_hasher"
_ENGINE = "vllm.v1.engine.core"
_BEFORE: dict[str, str | None] = {}
_lock = threading.Lock()
_said: set[str] = set()
_wanted = {"hasher": False}


def functions(release: Release) -> dict[str, Any]:
    """kvmask's function for every seam that it replaces in some release."""
    return {
        "worker.lookup": lookups.lookup if release.rules else lookups.lookup_by_length,
        "coordinator.store_mask": coordinator.store_mask,
        "coordinator.lookup_mask": coordinator.lookup_mask,
        "coordinator.load_mask": coordinator.load_mask,
        "coordinator.find_longest_cache_hit": coordinator.find_longest_cache_hit,
        "sending.handle_request": saving.handle_request,
        "receiving.handle_request": loading.handle_request,
        **layouts.VALUES,
        **metrics.REPLACED,
        _HASHER: hashing.request_block_hasher,
    }


def replacements(placed: Placed, release: Release) -> dict[str, Any]:
    """The functions that take the place of the installed release's, by seam."""
    own = functions(release)
    return {name: own[name] for name in sorted(placed.seams)}


def install(lookup: str = "staged") -> None:
    """Put kvmask under vLLM's MooncakeStoreConnector in this process and in those that it starts.

    Each feature is put in place where the functions that it replaces and relies on are those of a
    known release; the log says what is in place and what stays vLLM's. The block hasher follows as
    soon as the process has imported the module that uses it. Processes that vLLM starts learn of it
    through the environment variables of kvmask's plugin. Calling it again only changes the
    strategy.

    Args:
        lookup: ``"staged"`` asks the store for the keys that decide, ``"exact"`` for all that stock
            asks for.

    Raises:
        ArgumentError: There is no such strategy.
        UnsupportedReleaseError: Nothing fits the installed vLLM, or somebody else has replaced one
            of its functions; the message names what changed. Nothing is touched then.
    """
    lookups.check_strategy(lookup)
    placed = fitting()
    if not placed.seams:
        raise UnsupportedReleaseError(f"nothing of kvmask fits vLLM {version()}")
    wanted = replacements(placed, current())
    hasher = wanted.pop(_HASHER, None)
    seams.place(wanted)
    lookups.set_default(lookup)
    acting.watch()
    if hasher is not None:
        _wanted["hasher"] = True
        after_import(_ENGINE, _place_hasher)
    _tell_children(lookup)
    say(placed, f"lookup {lookup}")


def uninstall() -> None:
    """Give vLLM its own functions back.

    Where somebody else has put a function over kvmask's, that one stays, and the log says so: it
    may go on to call kvmask's.
    """
    _wanted["hasher"] = False
    log_left(logger, seams.restore())
    with _lock:
        for name, value in _BEFORE.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _BEFORE.clear()


def _place_hasher() -> None:
    if not _wanted["hasher"]:
        return  # it was uninstalled meanwhile
    try:
        seams.place({_HASHER: hashing.request_block_hasher})
    except UnsupportedReleaseError as e:
        logger.error("The block hasher stays vLLM's: %s", e)


def _tell_children(lookup: str) -> None:
    """Let processes that vLLM starts do the same, or say that they will not."""
    told = {SWITCH: "1", LOOKUP: lookup, RAY_PREFIXES: ray_prefixes()}
    with _lock:
        for name, value in told.items():
            _BEFORE.setdefault(name, os.environ.get(name))
            os.environ[name] = value
    allowed = allow_list()
    if allowed is not None and PLUGIN not in allowed:
        _once(
            "Processes that vLLM starts stay without kvmask: %s does not list %r",
            ALLOWED,
            PLUGIN,
        )
    elif not importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN):
        _once(
            "Processes that vLLM starts stay without kvmask: its plugin is not installed "
            "(kvmask is on the path, but pip has not installed it)"
        )


def _once(text: str, *args: Any) -> None:
    """A warning that a process gives once."""
    with _lock:
        if text in _said:
            return
        _said.add(text)
    logger.warning(text, *args)


def say(placed: Placed, settings: str) -> None:
    """The lines of the log at the start of a process: what is in place, what stays vLLM's and why.

    Args:
        placed: What fits.
        settings: What was chosen, for the end of the first line.
    """
    with _lock:
        if settings in _said:
            return
        _said.add(settings)
    names = ", ".join(f.name for f in placed.features if f.name != "connector")
    logger.info(
        "kvmask %s is in place in vLLM %s, whose functions are those of %s: %s (%s)",
        kvmask.__version__,
        version(),
        placed.release,
        names,
        settings,
    )
    for name in placed.absent:
        if name in ABSENT:
            logger.info("kvmask leaves %s to vLLM %s: %s", name, placed.release, ABSENT[name])
    for name, changed in placed.stock.items():
        logger.error("kvmask leaves %s to vLLM %s: %s", name, version(), "; ".join(changed))
