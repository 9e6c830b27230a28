"""StorePolicy: how a store's codes read, and what one call to it may hold.

This one is neutral: it knows no code but success, makes one call of everything and retries
nothing. `kvmask.mooncake.MooncakePolicy` is Mooncake's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Codes of kvmask's own, for keys that the store gave none.
CALL_FAILED = -900  # the call raised
MALFORMED_ANSWER = -10_001  # the answer does not fit the call
NOT_TRIED = -10_002  # no call was made for it, because an earlier one had failed
OVERSIZE = -600  # more than one call can hold
BROKEN_SEAL = -10_003  # the object does not hold what was put under its key
NO_BOUNCE = -10_004  # there is no bounce memory left
# Of these, those that leave nothing under way.
SETTLED = frozenset({NOT_TRIED, BROKEN_SEAL, NO_BOUNCE})


class StorePolicy:
    """Reads a store's codes and cuts its calls. Instances are shared by threads and hold no state.

    Attributes:
        present_codes: Codes of a put that mean that the key is there already.
        full_codes: Codes of a put that mean that the store has no room.
        renew_codes: When every key of a get answers with one of these, its lease ran out: the plan
            asks whether the keys exist, which renews it, and gets them once more.
        outage_codes: When every key of a call answers with one of these, the store did not answer:
            the plan makes no further call, as after a call that raised.
        settled_codes: Codes of a failed put or get that mean that its memory is left alone from
            then on: the transfer never began, or it is over. After any other code the store may
            still read or write the memory.
        stops_after_failure: The first get that fails, wholly or in part, ends a load: keys that
            were not tried have failed too.
        names_groups: Puts name what is evicted together; see `put_arguments`.
        unique_keys: No key can stand twice in a save, so nobody need look. Digests of a chain
            differ; those that a caller made may not.
    """

    present_codes: frozenset[int] = frozenset()
    full_codes: frozenset[int] = frozenset()
    renew_codes: frozenset[int] = frozenset()
    outage_codes: frozenset[int] = frozenset()
    settled_codes: frozenset[int] = frozenset()
    stops_after_failure = False
    names_groups = False
    unique_keys = False

    def stored(self, code: int) -> bool:
        """Whether a put's code says that the key was written. Not asked when all codes are 0.

        Args:
            code: The code of one key.
        """
        return code == 0

    def loaded(self, got: int, planned: int) -> bool:
        """Whether a get's answer says that a key was read whole; both in bytes. Not asked when all
        answers are as planned.

        Args:
            got: Bytes, or a code.
            planned: Bytes of the key.
        """
        return got == planned

    def outage(self, codes: Sequence[int]) -> bool:
        """Whether a call's codes say that the store did not answer. Not asked when all is well.

        Args:
            codes: The codes of all keys of the call.
        """
        none = self.outage_codes
        return bool(codes) and all(code in none for code in codes)

    def settled(self, code: int) -> bool:
        """Whether a failed put's or get's code says that the store leaves its memory alone.

        Args:
            code: The code of one key.
        """
        return code in self.settled_codes or code in SETTLED

    def cut_put(
        self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Cut the keys of a save into calls.

        Args:
            num_bytes: Bytes per key.
            sizes: Sizes of the pieces of memory, per key.

        Returns:
            (calls as (start, stop), positions of keys that no call can hold).
        """
        return ([(0, len(num_bytes))] if num_bytes else []), []

    def cut_get(
        self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Cut the keys of a load into calls; see `cut_put`.

        Args:
            num_bytes: Bytes per key.
            sizes: Sizes of the pieces of memory, per key.
        """
        return self.cut_put(num_bytes, sizes)

    def put_arguments(self, group_ids: list[str] | None) -> tuple[Any, ...]:
        """Further arguments of one put.

        Args:
            group_ids: Per key the id of what it is evicted with; None when not asked for.
        """
        return ()


NEUTRAL = StorePolicy()
