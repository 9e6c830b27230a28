"""What asking the store costs: it decides how many keys a staged lookup puts into one call."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmask.errors import ArgumentError


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
    """

    call: float = 300e-6
    missing: float = 0.7e-6
    present: float = 2.5e-6
    miss_rate: float = 0.075
    first_batch: int = field(init=False, repr=False, compare=False)
    slack: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("call", "missing", "present"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"`{name}` must be more than 0, got {getattr(self, name)}")
        if not 0 <= self.miss_rate <= 1:
            raise ArgumentError(f"`miss_rate` must be from 0 to 1, got {self.miss_rate}")
        first = max(1, round(min(self.call / self.missing, 1 << 20)))
        object.__setattr__(self, "first_batch", first)
        object.__setattr__(self, "slack", max(1, round(first * self.miss_rate)))


DEFAULT_COSTS = CostModel()
