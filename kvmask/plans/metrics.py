"""Counters of a KVTransfer, and their Prometheus text when prometheus_client is installed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from kvmask._core import LookupSums
from kvmask.coordinator import Hit
from kvmask.errors import MissingDependencyError

COUNTERS = {
    "lookups": "Lookups finished",
    "asked_keys": "Keys that lookups asked the store for",
    "present_keys": "Asked keys that the store has",
    "exact_keys": "Keys that the exact strategy would have asked for",
    "memo_keys": "Keys that the presence memo answered",
    "avoided_keys": "Keys taken for absent because they failed to load before",
    "unknown_keys": "Asked keys that the store gave no usable answer to",
    "failed_lookups": "Lookups that ended because the store did not answer",
    "outages": "Times that the store stopped answering",
    "spared_calls": "Calls not made because the store did not answer an earlier one",
    "renewed_keys": "Keys asked again only to keep them in the store",
    "dropped_renewals": "Hits whose keys were not renewed, or not all of them",
    "probes": "Existence calls of lookups",
    "hit_tokens": "Tokens of all hits",
    "lookup_store_seconds": "Time of lookups in the store's calls",
    "lookup_other_seconds": "Time of lookups outside them",
    "saves": "Saves finished",
    "stored_keys": "Keys written",
    "stored_bytes": "Bytes written",
    "save_present_keys": "Planned keys that the store had already",
    "save_failed_keys": "Keys that were not written",
    "save_quarantined_blocks": "Blocks of failed saves that the store may still read",
    "broken_seals": "Objects read that did not hold what was put under their key",
    "retired_bytes": "Bounce memory of calls that may still go on",
    "loads": "Loads finished",
    "loaded_keys": "Keys read",
    "loaded_bytes": "Bytes read",
    "load_failed_keys": "Keys that were not read",
    "load_quarantined_blocks": "Blocks of failed loads that the store may still write",
}


class TransferStats:
    """Monotonic counters, named as in ``COUNTERS``. Safe to update from several threads.

    >>> stats = TransferStats()
    >>> stats.add(lookups=1, asked_keys=3)
    >>> stats.asked_keys
    3
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._sums = LookupSums()
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to counters by name.

        Args:
            amounts: Names of ``COUNTERS``, and what to add to each.

        Raises:
            KeyError: There is no such counter.
        """
        values = self._values  # once: `__getattr__` makes each look-up of the class dearer
        with self._lock:
            for name, amount in amounts.items():
                values[name] += amount

    def add_lookup(self, hit: Hit, failed: bool) -> None:
        """Count a lookup that is over. It is counted on the way to the engine, so by hand.

        Args:
            hit: What the lookup found.
            failed: Whether the lookup ended because the store did not answer.
        """
        self._sums.add(hit, failed)

    def __getattr__(self, name: str) -> float:
        if name in COUNTERS:
            return self._values[name] + self._sums.totals().get(name, 0)
        raise AttributeError(name)

    def snapshot(self) -> dict[str, float]:
        """All counters at one moment."""
        with self._lock:
            values = dict(self._values)
            sums = self._sums.totals()
        for name, amount in sums.items():
            values[name] += amount
        return values

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v:g}" for k, v in self.snapshot().items() if v)
        return f"TransferStats({shown})"


class StatsCollector:
    """Collector for a ``prometheus_client`` registry: ``registry.register(StatsCollector(stats))``.

    Args:
        stats: The counters.
        labels: Constant labels, for instance of the rank.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """

    def __init__(self, stats: TransferStats, labels: dict[str, str] | None = None) -> None:
        try:
            from prometheus_client.core import CounterMetricFamily
        except ImportError as e:
            raise MissingDependencyError(
                f"metrics need prometheus_client (pip install prometheus-client): {e}"
            ) from e
        self._family = CounterMetricFamily
        self._stats = stats
        self._labels = labels or {}

    def collect(self) -> Iterator[Any]:
        """One counter family per counter."""
        for name, value in self._stats.snapshot().items():
            family = self._family(f"kvmask_{name}", COUNTERS[name], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


def exposition(stats: TransferStats, labels: dict[str, str] | None = None) -> str:
    """The counters in Prometheus' text format.

    Args:
        stats: The counters.
        labels: Constant labels, for instance of the rank.

    Raises:
        MissingDependencyError: prometheus_client is not installed.
    """
    collector = StatsCollector(stats, labels)
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
