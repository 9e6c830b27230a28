"""LookupPlan: which keys to ask for, and the cost model that says how many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmask._core import LookupCore
from kvmask.coordinator import Coordinator, Hit
from kvmask.errors import ArgumentError, PlanStateError
from kvmask.keys.base import KeySchema
from kvmask.plans.blocks import Hashes, Schemas, per_group

STRATEGIES = ("staged", "exact")


@dataclass(frozen=True, slots=True)
class CostModel:
    """What asking costs, in seconds; it sets how much a staged lookup asks at once.

    The defaults were measured over loopback on one machine (Mooncake 0.3.13, see docs/lookup.md):
    asking for about 430 missing keys costs as much as another call.

    Args:
        call: One call, without its keys.
        missing: One key that the store does not have.
        present: One key that it has (its lease is renewed). Those are asked for in any case, so it
            moves no batch; it completes the price of a lookup.
        miss_rate: How often a hint is too short.
    """

    call: float = 300e-6
    missing: float = 0.7e-6
    present: float = 2.5e-6
    miss_rate: float = 0.075

    def __post_init__(self) -> None:
        for name in ("call", "missing", "present"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"`{name}` must be more than 0, got {getattr(self, name)}")
        if not 0 <= self.miss_rate <= 1:
            raise ArgumentError(f"`miss_rate` must be from 0 to 1, got {self.miss_rate}")

    @property
    def first_batch(self) -> int:
        """Full-attention blocks to ask for at once when nothing is known."""
        return max(1, round(min(self.call / self.missing, 1 << 20)))

    @property
    def slack(self) -> int:
        """Blocks past a hint that are worth asking in the same call."""
        return max(1, round(self.first_batch * self.miss_rate))


DEFAULT_COSTS = CostModel()
GROWTH = 4


class LookupPlan:
    """The keys that decide how long a reusable prefix is, batch by batch.

    ``exact`` asks once for the keys vLLM would ask, in its order. ``staged`` asks the
    full-attention groups first, in growing batches, until a miss bounds the hit, then only the
    blocks that the other groups need at the longest length still possible, moving left in growing
    batches. Both run the same hit search, so when the store does not change in between they give
    the same hit; ``staged`` never asks a key twice nor any that ``exact`` would not ask.

    Args:
        coord: The groups.
        schemas: Per group a key schema, or one per rank namespace that must hold a block for it to
            be present.
        hashes: One digest per hash block of the request.
        num_tokens: Tokens of the request. The last one is always left to compute.
        local_tokens: Tokens the engine holds itself: whole full-attention blocks below are not
            asked, and a hit that does not reach past them is none.
        strategy: ``"staged"`` or ``"exact"``.
        local_windows: The engine also holds the windows that end at ``local_tokens``; without this
            declaration they are asked for.
        hint: Tokens of a likely hit (``HitHints.predict``): the first call then asks for all that
            a hit there rests on. A wrong hint costs a call and changes no result.
        costs: What asking costs.

    Raises:
        ArgumentError: A number is out of range, or there is not one schema entry per group.

    >>> from kvmask import Coordinator, FullAttention, VllmKeys
    >>> coord = Coordinator([FullAttention(16)], hash_block_size=16)
    >>> plan = LookupPlan(coord, [VllmKeys("m")], [b"a" * 32, b"b" * 32], num_tokens=33)
    >>> while keys := plan.next_keys():
    ...     plan.feed([1] * len(keys))
    >>> plan.hit.length
    32
    """

    def __init__(
        self,
        coord: Coordinator,
        schemas: Schemas,
        hashes: Hashes,
        num_tokens: int,
        local_tokens: int = 0,
        strategy: str = "staged",
        *,
        local_windows: bool = False,
        hint: int = 0,
        costs: CostModel = DEFAULT_COSTS,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ArgumentError(f"`strategy` must be one of {STRATEGIES}, got {strategy!r}")
        rows = per_group(schemas, KeySchema, "schemas", len(coord.groups))
        self._core = LookupCore(
            coord._core,
            [tuple(s.builder for s in row) for row in rows],
            hashes,
            num_tokens,
            local_tokens,
            strategy == "staged",
            costs.first_batch,
            GROWTH,
            hint,
            costs.slack,
            local_windows,
        )
        self._hit: Hit | None = None

    def next_keys(self) -> list[str]:
        """The next keys to ask, or an empty list when the hit is decided.

        Raises:
            PlanStateError: The answers to the last batch are missing.
        """
        return self._core.next_keys()

    def feed(self, answers: Sequence[int]) -> None:
        """Take the answers to the last batch, in its order. Only ``1`` means present.

        Raises:
            PlanStateError: Nothing was asked.
            StoreError: There is not one integer per key.
        """
        self._core.feed(answers)

    @property
    def asked(self) -> int:
        """Keys asked so far."""
        return self._core.asked

    @property
    def probes(self) -> int:
        """Calls asked for so far."""
        return self._core.probes

    @property
    def candidates(self) -> int:
        """Keys that ``exact`` asks for this request."""
        return self._core.candidates

    @property
    def hit(self) -> Hit:
        """The decided hit.

        Raises:
            PlanStateError: Answers are missing.
        """
        if self._hit is None:
            found = self._core.result()
            if found is None:
                raise PlanStateError("`hit` is decided when `next_keys` returns an empty list")
            core = self._core
            self._hit = Hit(*found, core.asked, core.probes, core.present, core.candidates)
        return self._hit
