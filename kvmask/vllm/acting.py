"""Whether kvmask acts in this process, or vLLM's own functions do (see `kvmask.engines.acting`).

A function of kvmask's that has no effects is wrapped by `guarded`: while kvmask is off, vLLM's own
is called, and an error of kvmask's turns it off. Functions with effects ask `ACTING.on` themselves,
before the first of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from kvmask.engines.acting import Switch
from kvmask.errors import ArgumentError, KVMaskError
from kvmask.vllm.releases import logger
from kvmask.vllm.seams import stock

ACTING = Switch("vLLM's own code", logger)
# Names the file that is watched, in every process that kvmask is in.
FILE = "KVMASK_SWITCH_FILE"


def guarded(
    seam: str, *, strict: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function stand in for vLLM's behind a seam only while kvmask is on.

    Args:
        seam: The seam.
        strict: The function refuses arguments that vLLM's takes, and then raises.
    """

    def decorate(own: Callable[..., Any]) -> Callable[..., Any]:
        refusals = (KVMaskError,) if strict else ()
        return ACTING.guard(own, functools.partial(stock, seam), seam, refusals)

    return decorate


def check_file(value: Any) -> str | None:
    """Refuse what is no path; None when no file is to be watched."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value:
        raise ArgumentError(f"`switch_file` must be the path of a file, got {value!r}")
    return value


def watch(path: str | None = None) -> None:
    """Watch a file, and the one that the environment names."""
    for file in (path, os.environ.get(FILE)):
        if file:
            ACTING.watch(file)
