"""What the connector adds on the scheduler's side: its lookups, and what the two sides tell each
other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmask.errors import ArgumentError
from kvmask.plans.lookup import Strategy
from kvmask.plans.metrics import TransferStats
from kvmask.vllm import acting, metrics, places, renewing, shadow
from kvmask.vllm.asking import Asking, Place
from kvmask.vllm.local import check_option
from kvmask.vllm.lookup import Groups, check_strategy
from kvmask.vllm.releases import (
    StockClient,
    StockStats,
    StockWorker,
    fitting,
    logger,
    lookup_path,
)

LOOKUP_IN = ("scheduler", "worker")
DEADLINE_MS = 200


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's own entries of ``kv_connector_extra_config``.

    Attributes:
        lookup: Strategy of lookups.
        local_aware: Lookups leave out what the GPU holds.
        lookup_in: Who asks the store: the scheduler where it can, or the worker.
        deadline: Seconds that a lookup may hold the scheduler.
        hasher: The engine's block hasher is replaced.
        renew: What hits make worth keeping is asked for again (see kvmask.vllm.renewing).
        switch_file: A file that can turn kvmask off (see kvmask.vllm.acting); None watches none.
        shadow: vLLM answers, and one lookup of so many is compared (see kvmask.vllm.shadow); 0
            compares none.
    """

    lookup: Strategy = "staged"
    local_aware: bool = False
    lookup_in: str = "scheduler"
    deadline: float = DEADLINE_MS / 1e3
    hasher: bool = True
    renew: bool = True
    switch_file: str | None = None
    shadow: int = 0

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Check the entries.

        Raises:
            ArgumentError: One has a wrong value.
        """
        where = extra.get("lookup_in", "scheduler")
        if where not in LOOKUP_IN:
            raise ArgumentError(f"`lookup_in` must be one of {LOOKUP_IN}, got {where!r}")
        most = extra.get("lookup_deadline_ms", DEADLINE_MS)
        number = isinstance(most, int | float) and not isinstance(most, bool)
        if not number or not 0 < most <= 600_000:
            raise ArgumentError(
                "`lookup_deadline_ms` must be a number of milliseconds above 0 and at most "
                f"600000, got {most!r}"
            )
        hasher = extra.get("hasher", True)
        if not isinstance(hasher, bool):
            raise ArgumentError(f"`hasher` must be true or false, got {hasher!r}")
        return cls(
            check_strategy(extra.get("lookup", "staged")),
            check_option(extra.get("local_aware", False)),
            where,
            most / 1e3,
            hasher,
            renewing.check_option(extra.get("renew")),
            acting.check_file(extra.get("switch_file")),
            shadow.check_option(extra.get("shadow", 0)),
        )


class SchedulerLookups:
    """The lookups of one connector on the scheduler's side.

    Args:
        connector: The connector, whose scheduler side vLLM has made.
        vllm_config: vLLM's configuration.
        options: The connector's options.

    Attributes:
        asking: What took the place of vLLM's lookup client.
    """

    def __init__(self, connector: Any, vllm_config: Any, options: Options) -> None:
        self._scheduler = connector.connector_scheduler
        self._path = lookup_path(vllm_config)
        self._options = options
        self._handshake: places.Handshake | None = None
        self._aware = options.local_aware and fitting().has("local")
        self._lock = threading.Lock()
        self._stats = StockStats()
        self._counters = TransferStats()
        self._told: dict[str, float] = {}
        self.asking = Asking(self._scheduler.client, self._choose, options.deadline)
        self._scheduler.client = self.asking

    def tell(self, num_computed_tokens: int) -> None:
        """How many tokens the GPU holds of the request that is looked up next."""
        if self._aware:
            block = self._scheduler._block_size
            self.asking.tell(num_computed_tokens // block * block)

    def take_handshake(self, metadata: Mapping[Any, Any]) -> None:
        """Take what the workers told, whichever of them did."""
        found = [m for m in metadata.values() if isinstance(m, places.Handshake)]
        if found:
            self._handshake = found[0]
        self.asking.choose_again()

    def _choose(self) -> Place:
        """What answers lookups: the best that works."""
        client = self.asking.client
        if self._options.lookup_in == "worker":  # vLLM's own protocol
            return places.OverTheWire(client)
        worker = places.worker_at(self._path)
        if worker is not None:
            logger.info("Lookups are made in the scheduler, with the worker's store client")
            return places.InProcess(worker)
        try:
            place, why = self._own_client(), "the core has no rules for these cache groups"
        except Exception as e:  # whatever it is, the worker can answer
            place, why = None, f"{type(e).__name__}: {e}"
        if place is not None:
            logger.info("Lookups are made in the scheduler, with a store client of its own")
            return place
        logger.warning("Lookups are made in the worker: %s", why)
        return places.OverTheWire(client, thrifty=fitting().has("local"))

    def _own_client(self) -> places.OwnClient | None:
        handshake = self._handshake
        if handshake is None:
            raise LookupError("vLLM's handshake brought no key prefixes of it")
        coord = self._scheduler._store_coord
        groups = Groups(
            coord,
            coord.kv_cache_groups,
            handshake.block_sizes,
            handshake.prefixes,
            coord.hash_block_size,
        )
        store = places.connect(handshake)
        with contextlib.ExitStack() as stack:
            stack.callback(store.close)
            place = places.OwnClient(
                store,
                groups,
                self._record,
                self._options.lookup,
                places.OverTheWire(self.asking.client),
                renew=self._options.renew,
                stats=self._counters,
            )
            if place.scheme() is None:
                return None
            stack.pop_all()
        return place

    def _record(self, operation: str, seconds: float, num_keys: int, **more: Any) -> None:
        with self._lock:
            self._stats.record_operation(operation, seconds, num_keys, **more)

    def take_stats(self) -> Any:
        """What the scheduler's own client did since the last call, or None."""
        stats = None
        with self._lock:
            if not self._stats.is_empty():
                stats, self._stats = self._stats, StockStats()
        if not fitting().has("metrics"):
            return stats
        now = self._counters.snapshot() | {"late_lookups": self.asking.late}
        return metrics.with_counters(stats, metrics.differences(now, self._told))


def attach(connector: Any, vllm_config: Any, options: Options) -> SchedulerLookups | None:
    """Put the scheduler's lookups in place; None where its client is not vLLM's own."""
    scheduler = connector.connector_scheduler
    if scheduler is None:
        return None
    if type(scheduler.client) is not StockClient:
        logger.warning(
            "Lookups are left to %s, which is not vLLM's lookup client",
            type(scheduler.client).__name__,
        )
        return None
    return SchedulerLookups(connector, vllm_config, options)


def offer_worker(worker: Any, vllm_config: Any) -> None:
    """Let a scheduler of this process find a worker that answers lookups."""
    if isinstance(worker, StockWorker) and getattr(worker, "lookup_server", None) is not None:
        places.offer(lookup_path(vllm_config), worker)


def handshake_of(connector: Any) -> places.Handshake | None:
    """What the worker's side tells the scheduler.

    Nothing, when the connector is part of another one: vLLM passes on what one of its parts says,
    to all of them, and the other parts may need theirs.
    """
    if connector.connector_worker is None or not is_outermost(connector):
        return None
    try:
        return places.handshake_of(connector.connector_worker)
    except Exception as e:
        logger.warning(
            "The scheduler gets no key prefixes, and leaves lookups to the worker: %s", e
        )
        return None


def is_outermost(connector: Any) -> bool:
    """Whether vLLM's worker talks to this connector itself."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return bool(has_kv_transfer_group()) and get_kv_transfer_group() is connector
