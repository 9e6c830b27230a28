"""What asking the store costs: it decides how many keys a staged lookup puts into one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmask._core import check_integer, shown
from kvmask.checks import check_number
from kvmask.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from kvmask.plans.calls import Store

_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of existence calls, in seconds.

    The defaults were measured over loopback on one machine (Mooncake 0.3.13, see docs/lookup.md).
    With them, asking for about 430 missing keys costs as much as another call.

    Args:
        call: One call, without its keys.
        missing: One key that the store does not have.
        present: One key that it has: its lease is renewed. Present keys are asked for in any case,
            so this does not change what a lookup asks.
        miss_rate: How often a hint is too short, from 0 to 1.

    Attributes:
        first_batch: Full-attention blocks to ask for at once when nothing is known.
        slack: Blocks past a hint that are worth asking in the same call.

    Raises:
        ArgumentError: A time is not above 0, or the rate is out of range.
        TypeError: One is no number.
    """

    call: float = 300e-6
    missing: float = 0.7e-6
    present: float = 2.5e-6
    miss_rate: float = 0.075
    first_batch: int = field(init=False, repr=False, compare=False)
    slack: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("call", "missing", "present", "miss_rate"):
            check_number(getattr(self, name), name)
        for name in ("call", "missing", "present"):
            given = getattr(self, name)
            if not given > 0:
                raise ArgumentError(f"`{name}` must be more than 0, got {shown(given)}")
            try:
                float(given)
            except OverflowError:
                raise ArgumentError(f"`{name}` must fit a float, got {shown(given)}") from None
        if not 0 <= self.miss_rate <= 1:
            raise ArgumentError(f"`miss_rate` must be from 0 to 1, got {shown(self.miss_rate)}")
        first = max(1, round(min(self.call / self.missing, 1 << 20)))
        object.__setattr__(self, "first_batch", first)
        object.__setattr__(self, "slack", max(1, round(first * self.miss_rate)))

    @classmethod
    def measure(
        cls,
        store: Store,
        *,
        present_keys: Sequence[str] = (),
        num_keys: int = 512,
        rounds: int = 5,
        miss_rate: float = miss_rate,
    ) -> CostModel:
        """Measure the times with existence calls to a store, and return a model with them.

        It makes at most 3 * `rounds` + 1 calls, which block. Nothing is put. Asking for a present
        key renews its lease, as every lookup does: for that long the store does not evict it.

        Args:
            store: A connected store.
            present_keys: Keys that it may have. Without any that it has, `present` is the default.
            num_keys: The most keys in one call, 2 to 65,536.
            rounds: How often each call is made; the fastest counts, 1 to 1,000.
            miss_rate: See the class.

        Raises:
            StoreError: The store did not answer with 0 or 1 for each key.
        """
        import uuid  # not at the top, because `import kvmask` imports this module

        num_keys = check_integer(num_keys, "num_keys", 2, 1 << 16)
        rounds = check_integer(rounds, "rounds", 1, 1000)
        name = f"kvmask-measure/{uuid.uuid4().hex}"
        missing = [f"{name}/{i:06}" for i in range(num_keys)]
        given = list(present_keys[:num_keys])
        there = _ask(store, given)[1] if given else []
        present = [key for key, answer in zip(given, there, strict=True) if answer == 1]
        one = min(_ask(store, missing[:1])[0] for _ in range(rounds))
        many = min(_ask(store, missing)[0] for _ in range(rounds))
        # A clock may be coarser than a key takes, so no time is 0.
        each = max((many - one) / (num_keys - 1), _LEAST)
        call = max(one - each, _LEAST)
        if not present:
            return cls(call=call, missing=each, miss_rate=miss_rate)
        times = min(_ask(store, present)[0] for _ in range(rounds))
        renewed = max((times - call) / len(present), _LEAST)
        return cls(call=call, missing=each, present=renewed, miss_rate=miss_rate)


def _ask(store: Store, keys: list[str]) -> tuple[float, Sequence[int]]:
    """Return how long one call took, in seconds, and its answer."""
    begin = time.perf_counter()
    answer = store.batch_is_exist(keys)
    seconds = time.perf_counter() - begin
    if len(answer) != len(keys) or any(value not in (0, 1) for value in answer):
        wrong = [value for value in answer if value not in (0, 1)][:3]
        raise StoreError(
            f"the store must answer 0 or 1 for each of {len(keys)} keys, got {len(answer)} answers"
            f"{f', some of them {wrong}' if wrong else ''}"
        )
    return seconds, answer


DEFAULT_COSTS = CostModel()
