"""How vLLM's transfer threads read the store's codes and cut its calls.

One put of everything, whatever its size; gets cut to the owner's staging buffer as vLLM cuts them.
A get in which a key is refused ends the load. Nothing is tried again within a job. When the store
does not answer at all, nothing is asked for some seconds (`kvmask.vllm.outages`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvmask._core import cut_calls
from kvmask.mooncake import MooncakePolicy
from kvmask.plans import StorePolicy
from kvmask.vllm.releases import NO_HANDLE, staging_bytes

Calls = tuple[list[tuple[int, int]], list[int]]


class SendingPolicy(StorePolicy):
    """Of a sending thread.

    Args:
        thread: Whose puts these are. Its settings are read anew for each of them.
    """

    full_codes = frozenset({NO_HANDLE})
    outage_codes = MooncakePolicy.outage_codes
    unique_keys = True

    def __init__(self, thread: Any) -> None:
        self._thread = thread

    @property
    def names_groups(self) -> bool:  # type: ignore[override]
        """Whether the connector is told to name what is evicted together, and the store can."""
        return bool(self._thread.enable_group_semantics and self._thread.supports_group_ids)

    def stored(self, code: int) -> bool:
        """Every code but a negative one."""
        return code >= 0

    def put_arguments(self, group_ids: list[str] | None) -> tuple[Any, ...]:
        """The thread's replication settings, which also carry the group ids."""
        config = self._thread.replicate_config
        if group_ids is not None:
            config.group_ids = group_ids
        return (config,)


class ReceivingPolicy(StorePolicy):
    """Of a receiving thread.

    Args:
        thread: Whose gets these are.
    """

    outage_codes = MooncakePolicy.outage_codes
    stops_after_failure = True

    def __init__(self, thread: Any) -> None:
        self._thread = thread

    def cut_get(self, num_bytes: Sequence[int], sizes: Sequence[Sequence[int]]) -> Calls:
        """One get where everything fits the staging buffer, else several.

        When one key alone does not fit, nothing is read at all.
        """
        usable = self._thread.usable_disk_offload_buffer_budget_bytes
        if usable is None:
            return super().cut_get(num_bytes, sizes)
        need_of = {n: staging_bytes([n]) for n in set(num_bytes)}
        needs = [need_of[n] for n in num_bytes]
        if sum(needs) <= usable:
            return super().cut_get(num_bytes, sizes)
        most = self._thread.disk_offload_buffer_budget_bytes
        calls, oversize = cut_calls(needs, usable, most, [0] * len(needs), math.inf)
        return ([], list(range(len(needs)))) if oversize else (calls, [])
