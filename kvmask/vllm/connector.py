"""The connector that needs no installing: vLLM's own, whose parts get kvmask's methods."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvmask._plugin import register
from kvmask.engines import Placed
from kvmask.errors import UnsupportedReleaseError
from kvmask.vllm import (
    acting,
    agreement,
    binding,
    coordinator,
    hashing,
    layouts,
    loading,
    metrics,
    options,
    saving,
    scheduling,
    shadow,
)
from kvmask.vllm.lookup import close as close_lookups
from kvmask.vllm.placing import replacements, say
from kvmask.vllm.releases import (
    StockConnector,
    StockCoordinator,
    StockDatabase,
    StockReceiving,
    StockSending,
    StockWorker,
    current,
    fitting,
    logger,
)

register(KVConnectorFactory)


class _Sending(StockSending):  # type: ignore[misc]
    kvmask_own = True
    _handle_request = saving.handle_request


class _Receiving(StockReceiving):  # type: ignore[misc]
    kvmask_own = True
    _handle_request = loading.handle_request


def classes() -> dict[str, type]:
    """The classes that the connector gives to vLLM's objects, by the name of vLLM's class.

    Layouts and databases get theirs by `kvmask.vllm.layouts.adopt_addresses`.
    """
    placed = fitting()
    methods: dict[str, Any] = {"close": _close}
    if placed.has("saving") or placed.has("loading"):  # releases before have other threads
        methods["register_kv_caches"] = _register_kv_caches
    if placed.has("lookup"):
        methods["lookup"] = replacements(placed, current())["worker.lookup"]
    own = {StockWorker.__name__: binding.derived(StockWorker, tuple(methods.items()))}
    if placed.has("masks"):
        own[StockCoordinator.__name__] = coordinator.MooncakeStoreCoordinator
    if placed.has("layouts"):
        own[StockDatabase.__name__] = layouts.ChunkedTokenDatabase
    if placed.has("saving"):
        own[StockSending.__name__] = _Sending
    if placed.has("loading"):
        own[StockReceiving.__name__] = _Receiving
    return own | {StockConnector.__name__: KVMaskStoreConnector}


def _adopt(thing: Any, stock: type) -> bool:
    """Give an object the class for its own, where there is one; whether it has it now."""
    own = classes().get(stock.__name__)
    return own is not None and binding.adopt(thing, stock, own)


def adopt_worker(worker: Any, lookup: str, renew: bool = False) -> None:
    """Give a stock worker, its coordinator, layouts and threads kvmask's methods.

    Args:
        worker: vLLM's worker, just made; None does nothing.
        lookup: Strategy of its lookups.
        renew: What its hits make worth keeping is renewed.
    """
    if worker is None:
        return
    binding.state(worker)["strategy"] = lookup
    binding.state(worker)["renew"] = renew
    if getattr(worker, "coord", None) is not None:
        adopt_coordinator(worker.coord)
    if fitting().has("layouts"):
        for db in worker.token_dbs:
            layouts.adopt_addresses(db)
    if not _adopt(worker, StockWorker):
        logger.error("kvmask leaves a worker to %s, which is not vLLM's", type(worker).__name__)


def _register_kv_caches(self: Any, kv_caches: Any) -> None:
    """As stock; the threads that it starts get kvmask's jobs."""
    StockWorker.register_kv_caches(self, kv_caches)
    # The threads wait for their first request: nothing has been handled yet.
    for thread in (self.kv_send_thread, *self.kv_recv_threads):
        _adopt(thread, StockSending)
        _adopt(thread, StockReceiving)


def _close(self: Any) -> None:
    """As stock, once nothing of kvmask's asks the store."""
    close_lookups(self)
    StockWorker.close(self)


def adopt_coordinator(coord: Any) -> None:
    """Give a stock coordinator kvmask's masks and hit search, where they fit."""
    _adopt(coord, StockCoordinator)


def _fitting(on_unknown: str) -> Placed | None:
    """What fits; None when nothing does and vLLM's own connector is to go on.

    Raises:
        UnsupportedReleaseError: Something does not fit, and that is to be refused.
    """
    try:
        placed = fitting()
    except UnsupportedReleaseError as e:
        if on_unknown == "refuse":
            raise
        logger.error("vLLM goes on without kvmask: %s", e)
        return None
    if not placed.has("connector"):
        changed = "; ".join(placed.stock["connector"])
        if on_unknown == "refuse":
            raise UnsupportedReleaseError(f"KVMaskStoreConnector does not fit this vLLM: {changed}")
        logger.error("vLLM goes on without kvmask: %s", changed)
        return None
    if placed.stock and on_unknown == "refuse":
        name, changed_seams = next(iter(placed.stock.items()))
        raise UnsupportedReleaseError(
            f"kvmask's {name} does not fit this vLLM: {'; '.join(changed_seams)}"
        )
    return placed


def _has_metrics() -> bool:
    """Whether vLLM's statistics are as kvmask knows them."""
    try:
        return fitting().has("metrics")
    except UnsupportedReleaseError:
        return False


class KVMaskStoreConnector(StockConnector):  # type: ignore[misc]
    """vLLM's MooncakeStoreConnector with kvmask's masks, lookups, saves and loads.

    Loaded by vLLM from ``"kv_connector": "KVMaskStoreConnector"`` and
    ``"kv_connector_module_path": "kvmask.vllm"``. Its further entries of
    ``kv_connector_extra_config`` are those of `kvmask.vllm.scheduling.Options`; ``"on_unknown"``,
    whether a vLLM that kvmask does not know keeps its own functions (``"stock"``, and the log says
    which) or the engine does not start (``"refuse"``); ``"contract"``, the path of a file where
    rank 0 writes its contract (see kvmask.vllm.agreement).

    Raises:
        ArgumentError: An entry has another value, or a name that looks like a typing error.
        UnsupportedReleaseError: The installed vLLM is not as kvmask knows it, and ``"on_unknown"``
            is ``"refuse"``.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        unread = options.check_names(extra)
        chosen = scheduling.Options.of(extra)
        placed = _fitting(options.check_on_unknown(extra.get("on_unknown", "stock")))
        contract = agreement.check_option(extra.get("contract"))
        if unread:
            logger.warning("%s", options.said_of(unread))
        self._kvmask_asks = False
        self._kvmask_lookups: scheduling.SchedulerLookups | None = None
        super().__init__(vllm_config, role, kv_cache_config)
        if placed is None:
            return
        if chosen.shadow:
            if self.connector_worker is not None and placed.has("lookup"):
                shadow.attach(self.connector_worker, chosen.shadow, chosen.lookup)
            return
        acting.watch(chosen.switch_file)
        say(placed, f"lookup {chosen.lookup}")
        adopt_worker(self.connector_worker, chosen.lookup, chosen.renew)
        agreement.write(self.connector_worker, vllm_config, contract)
        scheduler = self.connector_scheduler
        if scheduler is not None and getattr(scheduler, "_store_coord", None) is not None:
            adopt_coordinator(scheduler._store_coord)
        self._kvmask_asks = placed.has("asking")
        if self._kvmask_asks:
            scheduling.offer_worker(self.connector_worker, vllm_config)
            self._kvmask_lookups = scheduling.attach(self, vllm_config, chosen)
        if chosen.local_aware and not placed.has("local"):
            logger.error("`local_aware` stays off: vLLM %s cannot have it", current().name)
        if scheduler is not None and placed.has("hasher"):
            if chosen.hasher:
                hashing.place_for_next_engine()
            else:
                hashing.withdraw()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As stock; the lookup may hold the scheduler for so long only."""
        if self._kvmask_lookups is not None:
            self._kvmask_lookups.tell(num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def get_handshake_metadata(self) -> Any:
        """What the scheduler must know to ask the store itself."""
        return scheduling.handshake_of(self) if self._kvmask_asks else None

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Take what the workers told."""
        if self._kvmask_lookups is not None:
            self._kvmask_lookups.take_handshake(metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """The same, where vLLM also names the pipeline rank."""
        self.set_xfer_handshake_metadata(metadata)

    def get_kv_connector_stats(self) -> Any:
        """As stock, with kvmask's counters; on the scheduler's side, of its own store client."""
        if self._kvmask_lookups is not None:
            return self._kvmask_lookups.take_stats()
        if not _has_metrics():
            return super().get_kv_connector_stats()
        return metrics.get_kv_connector_stats(self)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """As stock, with kvmask's counters."""
        if not _has_metrics():
            return super().build_kv_connector_stats(data)
        return metrics.build_kv_connector_stats(cls, data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """As stock, with kvmask's counters."""
        args = vllm_config, metric_types, labelnames, per_engine_labelvalues
        if not _has_metrics():
            return super().build_prom_metrics(*args)
        return metrics.build_prom_metrics(cls, *args)

    def shutdown(self) -> None:
        """As stock; the scheduler's own store client is closed."""
        mine = getattr(self, "_kvmask_lookups", None)
        if mine is not None:
            self._kvmask_lookups = None
            mine.asking.close()
        super().shutdown()
