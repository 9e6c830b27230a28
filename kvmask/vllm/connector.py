"""Putting kvmask under the stock connector, and the connector that needs no installing."""

from __future__ import annotations

from typing import Any

from kvmask.vllm import coordinator, hashing, layouts, loading, local, saving, seams
from kvmask.vllm import lookup as lookups
from kvmask.vllm.releases import (
    Release,
    StockConnector,
    StockCoordinator,
    StockReceiving,
    StockSending,
    StockWorker,
    current,
)


def replacements(release: Release) -> dict[str, Any]:
    """The functions that take the place of a release's, by seam."""
    table: dict[str, Any] = {
        "worker.lookup": lookups.lookup if release.rules else lookups.lookup_by_length,
        "engine.block_hasher": hashing.request_block_hasher,
    }
    if release.rules:
        table |= {
            "coordinator.store_mask": coordinator.store_mask,
            "coordinator.lookup_mask": coordinator.lookup_mask,
            "coordinator.load_mask": coordinator.load_mask,
            "coordinator.find_longest_cache_hit": coordinator.find_longest_cache_hit,
        }
    if release.threads:
        table |= {
            "sending.handle_request": saving.handle_request,
            "receiving.handle_request": loading.handle_request,
            "layout.prepare_values": layouts.rank_local_values,
            "sharded_layout.prepare_values": layouts.sharded_values,
        }
    elif release.rules:
        table["database.prepare_values"] = layouts.database_values
    return table


def install(lookup: str = "staged") -> None:
    """Put kvmask under vLLM's MooncakeStoreConnector in this process.

    Calling it again only changes the strategy. Nothing is touched unless everything fits.

    Args:
        lookup: ``"staged"`` asks the store for the keys that decide, ``"exact"`` for all that stock
            asks for.

    Raises:
        ArgumentError: There is no such strategy.
        UnsupportedReleaseError: The installed vLLM is not as kvmask knows it; the message names
            what changed.
    """
    lookups.check_strategy(lookup)
    seams.place(replacements(current()))
    lookups.set_default(lookup)


def uninstall() -> None:
    """Give vLLM its own functions back."""
    seams.restore()


class _Sending(StockSending):  # type: ignore[misc]
    _handle_request = saving.handle_request


class _Receiving(StockReceiving):  # type: ignore[misc]
    _handle_request = loading.handle_request


class _Worker(StockWorker):  # type: ignore[misc]
    lookup = lookups.lookup

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        # The threads wait for their first request: nothing has been handled yet.
        for thread in (self.kv_send_thread, *self.kv_recv_threads):
            _become(thread, StockSending, _Sending)
            _become(thread, StockReceiving, _Receiving)


SENDING, RECEIVING, WORKER = _Sending, _Receiving, _Worker


def _become(thing: Any, stock: type, own: type) -> None:
    """Give an object that is exactly stock kvmask's methods."""
    if type(thing) is stock:
        thing.__class__ = own


def adopt_worker(worker: Any, lookup: str) -> None:
    """Give a stock worker, its coordinator and its layouts kvmask's methods."""
    if worker is None:
        return
    release = current()
    worker._kvmask_lookup = lookup
    if release.rules and getattr(worker, "coord", None) is not None:
        adopt_coordinator(worker.coord)
    if release.threads:
        for db in worker.token_dbs:
            layout = db.store_layout
            layout.__class__ = layouts.LAYOUTS.get(type(layout), type(layout))
        _become(worker, StockWorker, _Worker)
    else:
        worker.lookup = replacements(release)["worker.lookup"].__get__(worker)


def adopt_coordinator(coord: Any) -> None:
    """Give a stock coordinator kvmask's masks and hit search."""
    _become(coord, StockCoordinator, coordinator.MooncakeStoreCoordinator)


class KVMaskStoreConnector(StockConnector):  # type: ignore[misc]
    """vLLM's MooncakeStoreConnector with kvmask's masks, lookups, saves and loads.

    Loaded by vLLM from ``"kv_connector": "KVMaskStoreConnector"`` and
    ``"kv_connector_module_path": "kvmask.vllm"``. It reads two more entries of
    ``kv_connector_extra_config``: ``"lookup"``, ``"staged"`` or ``"exact"``, and ``"local_aware"``,
    whether lookups leave out what the GPU holds (see kvmask.vllm.local).

    Raises:
        ArgumentError: An entry has another value.
        UnsupportedReleaseError: The installed vLLM is not as kvmask knows it.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        strategy = lookups.check_strategy(extra.get("lookup", "staged"))
        current()
        aware = local.check_option(extra.get("local_aware", False))
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_worker(self.connector_worker, strategy)
        scheduler = self.connector_scheduler
        if scheduler is not None and getattr(scheduler, "_store_coord", None) is not None:
            adopt_coordinator(scheduler._store_coord)
        self._kvmask_aware = aware and scheduler is not None
        if self._kvmask_aware:
            local.adopt_client(scheduler)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As stock; a local-aware lookup is told what the GPU holds."""
        if self._kvmask_aware:
            local.tell(self.connector_scheduler, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found
