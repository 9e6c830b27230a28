"""kvmask's counters among vLLM's: in the same ``/metrics``, with the same labels, in the same line
of the log.

vLLM collects what a connector counts after each step, from every worker and from the scheduler,
adds it up, and hands it to its loggers. The connector's statistics are vLLM's own with one entry
more. The entry is a list of records, as vLLM's are, so whoever joins lists joins it, too. A record
holds sums of counters beside what vLLM's records hold: the process with the loggers may be without
kvmask, and then takes the entry for one of its operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from kvmask.plans.metrics import COUNTERS
from kvmask.vllm.binding import state
from kvmask.vllm.releases import StockMetrics, StockStats
from kvmask.vllm.seams import stock

ENTRY = "kvmask"
# What vLLM reads of a record.
_BLANK: dict[str, Any] = {
    "duration_seconds": 0.0,
    "num_keys": 0,
    "num_bytes": 0,
    "status": "ok",
    "num_failed_keys": 0,
}
_OF_LOOKUPS = (
    "lookups",
    "asked_keys",
    "exact_keys",
    "probes",
    "hit_tokens",
    "unknown_keys",
    "failed_lookups",
    "renewed_keys",
    "dropped_renewals",
)
# The counters that vLLM shows, and what they mean.
SHOWN = {name: COUNTERS[name] for name in _OF_LOOKUPS} | {
    "exact_keys": "Keys that vLLM's own lookups would have asked for",
    "late_lookups": "Lookups that went on as misses because no answer came in time",
}


def summed(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The sums of the counters of records."""
    total: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name not in _BLANK:
                total[name] = total.get(name, 0) + value
    return total


@dataclasses.dataclass
class KVMaskStats(StockStats):  # type: ignore[misc]
    """vLLM's statistics of a Mooncake store connector, where some have kvmask's counters."""

    def aggregate(self, other: Any) -> Any:
        """As vLLM's; counters are added up."""
        super().aggregate(other)
        if len(self.data.get(ENTRY, [])) > 1:
            self.data[ENTRY] = [_BLANK | summed(self.data[ENTRY])]
        return self

    def reduce(self) -> dict[str, int | float]:
        """As vLLM's; counters stand behind its figures."""
        own, operations = _split(self.data)
        reduced: dict[str, int | float] = StockStats(data=operations).reduce() if operations else {}
        for name, value in summed(own).items():
            reduced[f"{ENTRY}_{name}"] = value
        return reduced


class KVMaskPromMetrics(StockMetrics):  # type: ignore[misc]
    """vLLM's Prometheus metrics of the connector, and one counter for each of `SHOWN`.

    Their names begin with ``vllm:``, by which vLLM knows what is its own to show and to remove.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(
                name=f"vllm:kvmask_{name}_total", documentation=text, labelnames=labelnames
            )
            for name, text in SHOWN.items()
        }
        # All series are there from the start, at 0: a rate misses no first event.
        self._kvmask = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        """As vLLM's; counters go up by what was counted."""
        if not transfer_stats_data:
            return
        own, operations = _split(transfer_stats_data)
        super().observe(operations, engine_idx)
        mine = self._kvmask[engine_idx]
        for name, value in summed(own).items():
            if name in mine:  # the process that counted may run another kvmask
                mine[name].inc(value)


def _split(data: Mapping[str, Any]) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
    """kvmask's records, and vLLM's by operation."""
    return list(data.get(ENTRY, ())), {k: v for k, v in data.items() if k != ENTRY}


def differences(now: Mapping[str, float], before: dict[str, float]) -> dict[str, float]:
    """What was counted since the last time.

    Args:
        now: Counters, of which those that vLLM shows are taken.
        before: What they were then; gets what they are now.
    """
    found = {name: value - before.get(name, 0) for name, value in now.items() if name in SHOWN}
    before.update(now)
    return found


def with_counters(stats: Any, counted: Mapping[str, float]) -> Any:
    """Statistics with kvmask's counters.

    They stay of vLLM's class, so a process without kvmask can take them.

    Args:
        stats: vLLM's, which get the counters; or None.
        counted: What was counted since the last time. What did not move is left out.

    Returns:
        The statistics, or None when there is nothing to tell.
    """
    moved = {name: value for name, value in counted.items() if value}
    if not moved:
        return stats
    made = StockStats() if stats is None else stats
    made.data.setdefault(ENTRY, []).append(_BLANK | moved)
    return made


def worker_counters(worker: Any) -> dict[str, float]:
    """What the lookups of a worker have counted since the last time."""
    kept = state(worker)
    lookups = kept.get("lookups")
    if lookups is None:
        return {}
    return differences(lookups.stats.snapshot(), kept.setdefault("counted", {}))


# The methods of vLLM's connector that `install` replaces.


def get_kv_connector_stats(self: Any) -> Any:
    """As vLLM's, with what the worker's lookups have counted."""
    stats, worker = stock("connector.stats")(self), self.connector_worker
    return stats if worker is None else with_counters(stats, worker_counters(worker))


def build_kv_connector_stats(cls: Any, data: dict[str, Any] | None = None) -> Any:
    """As vLLM's, of statistics that may have kvmask's counters."""
    return KVMaskStats(data={} if data is None else data)


def build_prom_metrics(
    cls: Any,
    vllm_config: Any,
    metric_types: Any,
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> Any:
    """As vLLM's, with kvmask's counters."""
    return KVMaskPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


REPLACED: dict[str, Any] = {
    "connector.stats": get_kv_connector_stats,
    "connector.build_stats": classmethod(build_kv_connector_stats),
    "connector.build_metrics": classmethod(build_prom_metrics),
}
