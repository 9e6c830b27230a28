"""Lookup, save, load: pure state machines with one protocol. See `kvmask.plans.calls`."""

from kvmask.plans.breaker import Breaker
from kvmask.plans.calls import EXISTS, GET, PUT, WAIT, Call, Guard, Plan, Store, drive
from kvmask.plans.costs import DEFAULT_COSTS, CostModel
from kvmask.plans.handoffs import Handoff
from kvmask.plans.held import Held
from kvmask.plans.load import LoadPlan
from kvmask.plans.lookup import STRATEGIES, LookupPlan
from kvmask.plans.memo import AbsenceMemo, PresenceMemo
from kvmask.plans.policy import (
    BROKEN_SEAL,
    CALL_FAILED,
    MALFORMED_ANSWER,
    NO_BOUNCE,
    NOT_TRIED,
    OVERSIZE,
    StorePolicy,
)
from kvmask.plans.renew import Renewals
from kvmask.plans.results import BlockFailure, LoadResult, SaveResult
from kvmask.plans.save import SavePlan
from kvmask.plans.scheme import Addresses, GroupScheme, Scheme
from kvmask.plans.tools import PlanTools

__all__ = [
    "BROKEN_SEAL",
    "CALL_FAILED",
    "DEFAULT_COSTS",
    "EXISTS",
    "GET",
    "MALFORMED_ANSWER",
    "NOT_TRIED",
    "NO_BOUNCE",
    "OVERSIZE",
    "PUT",
    "STRATEGIES",
    "WAIT",
    "AbsenceMemo",
    "Addresses",
    "BlockFailure",
    "Breaker",
    "Call",
    "CostModel",
    "GroupScheme",
    "Guard",
    "Handoff",
    "Held",
    "LoadPlan",
    "LoadResult",
    "LookupPlan",
    "Plan",
    "PlanTools",
    "PresenceMemo",
    "Renewals",
    "SavePlan",
    "SaveResult",
    "Scheme",
    "Store",
    "StorePolicy",
    "drive",
]
