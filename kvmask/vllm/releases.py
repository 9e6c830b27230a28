"""What each release of vLLM does, as far as kvmask must know. All differences are stated here.

* 0.33 covers ``sliding_window + extra_retained_tokens`` of a window group; it keeps that sum as the
  window of the coordinator's spec groups, so it needs nothing further. Otherwise it is 0.32.
* 0.32 hands recurrent states over by their own path: a store mask is all false for them. An EAGLE
  group may look one block past the length that a search is limited to. Replay boundaries know
  EAGLE. A lookup answers with the hit and, per group, the boundary that keys its last block.
* 0.28 stores states by their position in the block table, never looks past the limit, has one
  replay boundary, cuts only the first of several full-attention sets to the joint hit, and answers
  a lookup with the hit alone. Masks, hit search, lookups without EAGLE and descriptors are
  replaced; its two threads stay stock and use them.
* 0.24 searches hits at other alignments and keys blocks through PoolKey objects: only the keys of
  a lookup are made by kvmask; everything else stays stock.

The table at the end holds the digests of the functions of each release that kvmask replaces or
relies on (see kvmask.vllm.seams).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from kvmask.engines import Table
from kvmask.errors import UnsupportedReleaseError
from kvmask.versions import VLLM, release_of
from kvmask.vllm import seams

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
StockClient: Any = _find(_STORE + "worker", "LookupKeyClient", _Absent)
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

RELEASES = tuple(sorted(map(release_of, VLLM), key=lambda r: tuple(map(int, r.split(".")))))


@dataclass(frozen=True)
class Release:
    """The differences between releases.

    Attributes:
        name: Release.
        rules: The coordinator's masks and hit search are replaced.
        threads: The transfer threads' jobs are replaced.
        stores_states: A store mask covers recurrent states by their position.
        eagle_peeks: An EAGLE group may look past the length a search is limited to.
        tails: A lookup also answers with the boundaries that key the tail blocks.
        cuts_every_full: All full-attention sets are cut to the joint hit.
    """

    name: str
    rules: bool = True
    threads: bool = True
    stores_states: bool = False
    eagle_peeks: bool = True
    tails: bool = True
    cuts_every_full: bool = True

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

    def lookup_result(self, hit: int, tails: Iterable[tuple[int, int]]) -> Any:
        """What this release's worker answers a lookup with."""
        if not self.tails:
            return hit
        return _LookupResult(hit, tuple(_TailBoundary(g, t) for g, t in tails))


_KNOWN = {
    "0.33": Release("0.33"),
    "0.32": Release("0.32"),
    "0.28": Release(
        "0.28",
        threads=False,
        stores_states=True,
        eagle_peeks=False,
        tails=False,
        cuts_every_full=False,
    ),
    "0.24": Release(
        "0.24",
        rules=False,
        threads=False,
        stores_states=True,
        eagle_peeks=False,
        tails=False,
        cuts_every_full=False,
    ),
}

_lock = threading.Lock()
_current: list[Release] = []


def current() -> Release:
    """The release that the installed vLLM is, by its seams.

    Raises:
        UnsupportedReleaseError: It is none of the known ones; the message names what changed.
    """
    if not _current:
        with _lock:
            if not _current:
                _current.append(detect())
    return _current[0]


def detect() -> Release:
    """Compare the seams with every known release; see `current`."""
    best: list[str] | None = None
    for release in reversed(RELEASES):
        changed = seams.differences(digests(release))
        if not changed:
            return _KNOWN[release]
        if best is None or len(changed) < len(best):
            best = changed
    import vllm

    shown = "; ".join((best or [])[:8]) + ("; ..." if len(best or []) > 8 else "")
    raise UnsupportedReleaseError(
        f"kvmask was checked against vLLM {', '.join(RELEASES)}; in the installed "
        f"{getattr(vllm, '__version__', 'unknown')} {shown}"
    )


def digests(release: str) -> dict[str, str]:
    """Digest of every seam that kvmask replaces or relies on in a release."""
    return Table(RELEASES, SEAMS).digests(release)


def is_stock_coordinator(coord: Any) -> bool:
    """Whether a coordinator's rules are vLLM's (or kvmask's), not a third party's."""
    return type(coord) is StockCoordinator or bool(getattr(type(coord), "_kvmask", False))


# seam, then its digest in every release; "-" where kvmask does not rely on it
SEAMS = """
coordinator.store_mask - 0c95db9f52 c206493f66 c206493f66
coordinator.lookup_mask - 1c1f898d87 1c1f898d87 1c1f898d87
coordinator.load_mask - 0d9c79364d 0d9c79364d 0d9c79364d
coordinator.find_longest_cache_hit - 51fcc43fc9 51fcc43fc9 51fcc43fc9
worker.lookup 0d56ea9016 3f519b131a 2c9602f10e 2c9602f10e
sending.handle_request - - f085288152 f085288152
receiving.handle_request - - 7ccf425de0 7ccf425de0
layout.prepare_values - - 9435cc3e79 9435cc3e79
sharded_layout.prepare_values - - 0fdfb5507a 0fdfb5507a
database.prepare_values - 721bf11a73 - -
coordinator.init 62661df32c 045ccfb090 dc0bff9d33 dc0bff9d33
coordinator.split - b34fbcd25c c5e25b8bb3 ea14719e89
coordinator.reachable_masks - f8926897db 8f1ce0f933 0b8a856aa7
coordinator.find_hit_blocks - 897c779ca7 37348af6e4 37348af6e4
coordinator.unwrap_spec - 97107dba76 97107dba76 97107dba76
coordinator.coverage_spec - - - 7784a42ed2
pool.init - b3dc387252 b3dc387252 b3dc387252
pool.get_cached_block - deb5d9e165 deb5d9e165 deb5d9e165
manager.reachable_block_mask - c4cfe4d962 b5f70b906e b5f70b906e
full.find - 6dd4e4634b 6dd4e4634b 6dd4e4634b
window.need - 1459460e6e 1459460e6e 1459460e6e
window.find - 9697efe263 317189354f 317189354f
window.mask - ef07d0e4bf 5e71c02618 5e71c02618
chunked.find - 8a0f8a6ad0 8a0f8a6ad0 8a0f8a6ad0
state.find - 81e2b7c1a1 81e2b7c1a1 81e2b7c1a1
state.mask - ebe9af2de7 1f91c44801 1f91c44801
core.resolve_block_hashes - c74fcc5f9f c74fcc5f9f c74fcc5f9f
core.eagle_proof_margin - - 8859217b2f 8859217b2f
core.replay_boundaries - - 0cdade56fe 0cdade56fe
data.chunk_hashes 6e6b499cd9 6e6b499cd9 6e6b499cd9 6e6b499cd9
data.blob_hashes 4534864a61 4534864a61 4534864a61 4534864a61
data.build_prefix - d11e6e3f0a cef788d391 cef788d391
data.build_key - 3ea52eee27 3ea52eee27 3ea52eee27
database.process_tokens - 05e0a088ff 05e0a088ff 05e0a088ff
database.init - 8a87cb1849 abf803ff0d abf803ff0d
layout.key_for - - 130fcbfae6 130fcbfae6
sharded_layout.key_for - - d8b63c23ef d8b63c23ef
sharded_layout.templates - - e011251e9e e011251e9e
worker.tail_key_boundaries - - 9b455e7290 9b455e7290
worker.record 7e0cf2f39a 7e0cf2f39a 7e0cf2f39a 7e0cf2f39a
worker.register - 891867c13b 20d19fda4f 20d19fda4f
worker.prefixes - afe679298f 0d88384948 0d88384948
worker.group_id - - 6af3a5c327 6af3a5c327
worker.staging - - b35c14072e b35c14072e
worker.split_batches - - b815d0d650 b815d0d650
thread.init - - aaf69411b2 aaf69411b2
thread.record - - 99f630fe9c 99f630fe9c
sending.init - - d441ba55a6 d441ba55a6
sending.boundaries - - 1fbacce196 1fbacce196
sending.retry - - 63e025ecb5 63e025ecb5
sending.finish - - 32742158e1 32742158e1
sending.saved - - 8c6a50300a 8c6a50300a
receiving.init - - d727e42595 d727e42595
receiving.report - - d869be5935 d869be5935
core.block_hasher d1e20a3599 d1e20a3599 6d5800ff3c 300c28bc4c
core.hash_block_tokens 8e2dca03c9 8e2dca03c9 8e2dca03c9 8e2dca03c9
core.extra_keys 99dc15c98e 99dc15c98e fa6bc5040a fa6bc5040a
hashing.sha256 7e489d2920 7e489d2920 7e489d2920 7e489d2920
hashing.sha256_cbor 13cf39b8e5 13cf39b8e5 13cf39b8e5 13cf39b8e5
hashing.xxhash 05af98f6fa 05af98f6fa 05af98f6fa 05af98f6fa
hashing.xxhash_cbor ec250c0868 ec250c0868 ec250c0868 ec250c0868
connector.init - c27f172b82 c402053a1d c402053a1d
"""
