"""Renewals of what lookups leave out, beside the store client that makes the lookups.

See `kvmask.plans.renew`. The calls are counted in vLLM's statistics as operations ``renew_exists``.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

from kvmask.errors import ArgumentError
from kvmask.plans import PlanTools, Renewals
from kvmask.renewer import Renewer
from kvmask.switch import is_on
from kvmask.vllm.ending import CALLS
from kvmask.vllm.releases import logger

# Turns renewals off where no option of a connector says anything.
VARIABLE = "KVMASK_RENEW"


def check_option(value: Any) -> bool:
    """Refuse what is no switch; None leaves it to the environment."""
    if value is None:
        given = os.environ.get(VARIABLE, "").strip()
        on = is_on(VARIABLE) if given else True
        if on is None:  # as with the other variables, a wrong value ends no process
            logger.error("`%s` must be 1 or 0, got %r: lookups are renewed", VARIABLE, given)
        return on is not False
    if not isinstance(value, bool):
        raise ArgumentError(f"`renew` must be true or false, got {value!r}")
    return value


def renewer_for(lookups: Any) -> Renewer:
    """A thread that renews what these lookups make worth keeping.

    It starts with the first hit, and does not keep the lookups alive.

    Args:
        lookups: A `kvmask.vllm.lookup.Lookups`.
    """
    known = weakref.ref(lookups)

    def alive() -> bool:
        there = known()
        return there is not None and not there.closed()

    def ask(keys: list[str]) -> Any:
        there = known()
        if there is None:
            return []
        start = time.perf_counter()
        try:
            with CALLS:
                answers = there.store.batch_is_exist(keys)
        except Exception:
            seconds = time.perf_counter() - start
            there.record(
                "renew_exists", seconds, len(keys), status="error", num_failed_keys=len(keys)
            )
            raise
        there.record("renew_exists", time.perf_counter() - start, len(keys))
        return answers

    tools = PlanTools(lookups.tools.policy, breaker=lookups.tools.breaker, log=logger)
    tools.stats = lookups.stats
    return Renewer(Renewals(), ask, tools, alive)
