"""PlanTools: what the plans of one engine share. Hints, memos and counters work inside the plans,
so they work the same whoever drives them."""

from __future__ import annotations

import logging
from typing import Any

from kvmask._core import MAX_TOKENS, HitHints, check_integer
from kvmask.plans.breaker import Breaker
from kvmask.plans.calls import Guard
from kvmask.plans.costs import DEFAULT_COSTS, CostModel
from kvmask.plans.memo import AbsenceMemo, PresenceMemo
from kvmask.plans.metrics import TransferStats
from kvmask.plans.policy import NEUTRAL, StorePolicy

logger = logging.getLogger("kvmask")


class PlanTools:
    """Policy, costs, memories and counters of plans. Safe to share by threads.

    Args:
        policy: How the store's codes read and how its calls are cut; the default is neutral.
        costs: What asking costs.
        hints: Where earlier hits ended, so that most lookups take one call. True makes a table
            (8 MiB), None keeps none.
        memo: Keys that are known to be present and need not be asked for a short time.
        failed_loads: Keys that exist and failed to load: absent in lookups for a stated time.
        breaker: Remembers that the store does not answer; while it does, plans fail without a
            call. True makes one, None keeps none. Tools of one store share it.
        null_block: The id of a block table's empty entry, which is never transferred; None when
            block tables have no empty entry.
        guard: Makes puts and gets in place of the store: bounce memory and seals. `KVTransfer`
            makes one for its own memory.
        stats: False keeps no counters.
        log: Where a plan's failures are logged, once per plan; None logs nothing. With a breaker,
            an outage is logged once when it begins and once when it ends.

    Attributes:
        stats: TransferStats, the counters of all plans made with these tools, or None.
        remembers_saves: Whether any of them is told what became of a save.

    Raises:
        TypeError: An argument is of another kind.
        ArgumentError: ``null_block`` is negative.
    """

    __slots__ = (
        "breaker",
        "costs",
        "failed_loads",
        "guard",
        "hints",
        "log",
        "memo",
        "null_block",
        "policy",
        "remembers_saves",
        "stats",
    )

    def __init__(
        self,
        policy: StorePolicy = NEUTRAL,
        *,
        costs: CostModel = DEFAULT_COSTS,
        hints: HitHints | bool | None = None,
        memo: PresenceMemo | None = None,
        failed_loads: AbsenceMemo | None = None,
        breaker: Breaker | bool | None = None,
        null_block: int | None = 0,
        guard: Guard | None = None,
        stats: bool = True,
        log: logging.Logger | None = logger,
    ) -> None:
        kinds: tuple[tuple[Any, Any, str, str], ...] = (
            (policy, StorePolicy, "policy", "a StorePolicy"),
            (costs, CostModel, "costs", "a CostModel"),
            (hints, HitHints | bool | None, "hints", "HitHints, a bool or None"),
            (memo, PresenceMemo | None, "memo", "a PresenceMemo or None"),
            (failed_loads, AbsenceMemo | None, "failed_loads", "an AbsenceMemo or None"),
            (breaker, Breaker | bool | None, "breaker", "a Breaker, a bool or None"),
            (stats, bool, "stats", "True or False"),
            (log, logging.Logger | None, "log", "a Logger or None"),
        )
        for thing, kind, name, shown in kinds:
            if not isinstance(thing, kind):
                raise TypeError(f"`{name}` must be {shown}, got {type(thing).__name__}")
        if null_block is not None:
            null_block = check_integer(null_block, "null_block", 0, MAX_TOKENS)
        self.policy = policy
        self.costs = costs
        self.hints = HitHints() if hints is True else hints or None
        self.memo = memo
        self.failed_loads = failed_loads
        self.breaker = Breaker() if breaker is True else breaker or None
        self.null_block = null_block
        self.guard = guard
        self.log = log
        self.stats = TransferStats() if stats else None
        kept = (self.stats, self.memo, self.failed_loads, self.hints)
        self.remembers_saves = any(thing is not None for thing in kept)

    def unanswered(self, error: BaseException, begun: int) -> None:
        """Tell the breaker that a call was not answered. A new outage is counted and logged.

        Args:
            error: What the call raised, or what its codes mean.
            begun: `Breaker.outages` when the call began.
        """
        breaker = self.breaker
        if breaker is None or not breaker.failed(error, begun):
            return
        if self.stats is not None:
            self.stats.add(outages=1)
        if self.log is not None:
            self.log.warning(
                "the store does not answer (%s): no call is made for %g s, then one tries again",
                repr(error)[:300],
                breaker.seconds,
            )

    def answered(self, begun: int) -> None:
        """Tell the breaker that a call was answered. The end of an outage is logged.

        Args:
            begun: `Breaker.outages` when the call began.
        """
        breaker = self.breaker
        if breaker is not None and breaker.answered(begun) and self.log is not None:
            self.log.warning("the store answers again")


_NO_TOOLS = PlanTools(stats=False)


def tools_or_default(tools: PlanTools | None) -> PlanTools:
    """The tools given, or neutral ones without memories and counters.

    Raises:
        TypeError: They are something else.
    """
    if tools is None:
        return _NO_TOOLS
    if not isinstance(tools, PlanTools):
        raise TypeError(f"`tools` must be PlanTools, got {type(tools).__name__}")
    return tools
