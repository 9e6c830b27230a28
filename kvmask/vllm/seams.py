"""The seams between kvmask and vLLM: what is replaced or relied on, and whether it is as known.

A seam is a function of vLLM, named by module and path. Its digest is taken over its source without
comments, docstring and indentation. `check` compares all of them with what each known release has;
only when one release fits entirely may anything be put in place.

    python -m kvmask.vllm.seams        # prints the digests of the installed vLLM
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvmask.errors import UnsupportedReleaseError

_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store."
_CORE = "vllm.v1.core."
_MANAGERS = _CORE + "single_type_kv_cache_manager:"

# name -> module:path
PATHS: dict[str, str] = {
    # replaced
    "coordinator.store_mask": _STORE + "coordinator:MooncakeStoreCoordinator.store_mask",
    "coordinator.lookup_mask": _STORE + "coordinator:MooncakeStoreCoordinator.lookup_mask",
    "coordinator.load_mask": _STORE + "coordinator:MooncakeStoreCoordinator.load_mask",
    "coordinator.find_longest_cache_hit": _STORE
    + "coordinator:MooncakeStoreCoordinator.find_longest_cache_hit",
    "engine.block_hasher": "vllm.v1.engine.core:get_request_block_hasher",
    "worker.lookup": _STORE + "worker:MooncakeStoreWorker.lookup",
    "sending.handle_request": _STORE + "worker:KVCacheStoreSendingThread._handle_request",
    "receiving.handle_request": _STORE + "worker:KVCacheStoreRecvingThread._handle_request",
    "layout.prepare_values": _STORE + "data:RankLocalStoreLayout.prepare_values",
    "sharded_layout.prepare_values": _STORE + "data:TPShardedStoreLayout.prepare_values",
    "database.prepare_values": _STORE + "data:ChunkedTokenDatabase.prepare_values",
    # relied on: what the core computes instead of them, and what replaced code calls
    "core.block_hasher": _CORE + "kv_cache_utils:get_request_block_hasher",
    "core.hash_block_tokens": _CORE + "kv_cache_utils:hash_block_tokens",
    "core.extra_keys": _CORE + "kv_cache_utils:generate_block_hash_extra_keys",
    "hashing.sha256": "vllm.utils.hashing:sha256",
    "hashing.sha256_cbor": "vllm.utils.hashing:sha256_cbor",
    "hashing.xxhash": "vllm.utils.hashing:xxhash",
    "hashing.xxhash_cbor": "vllm.utils.hashing:xxhash_cbor",
    "coordinator.init": _STORE + "coordinator:MooncakeStoreCoordinator.__init__",
    "coordinator.split": _STORE
    + "coordinator:MooncakeStoreCoordinator._verify_and_split_kv_cache_groups",
    "coordinator.reachable_masks": _STORE + "coordinator:MooncakeStoreCoordinator._reachable_masks",
    "coordinator.find_hit_blocks": _STORE + "coordinator:MooncakeStoreCoordinator._find_hit_blocks",
    "coordinator.unwrap_spec": _STORE + "coordinator:_unwrap_spec",
    "coordinator.coverage_spec": _STORE + "coordinator:_coverage_spec",
    "pool.init": _STORE + "coordinator:ExternalCachedBlockPool.__init__",
    "pool.get_cached_block": _STORE + "coordinator:ExternalCachedBlockPool.get_cached_block",
    "manager.reachable_block_mask": _MANAGERS + "SingleTypeKVCacheManager.reachable_block_mask",
    "full.find": _MANAGERS + "FullAttentionManager.find_longest_cache_hit",
    "window.need": _MANAGERS + "SlidingWindowManager._contiguous_blocks_for_hit",
    "window.find": _MANAGERS + "SlidingWindowManager.find_longest_cache_hit",
    "window.mask": _MANAGERS + "SlidingWindowManager.reachable_block_mask",
    "chunked.find": _MANAGERS + "ChunkedLocalAttentionManager.find_longest_cache_hit",
    "state.find": _MANAGERS + "MambaManager.find_longest_cache_hit",
    "state.mask": _MANAGERS + "MambaManager.reachable_block_mask",
    "core.resolve_block_hashes": _CORE + "kv_cache_utils:resolve_block_hashes",
    "core.eagle_proof_margin": _CORE + "kv_cache_utils:eagle_proof_margin",
    "core.replay_boundaries": _CORE + "kv_cache_coordinator:replay_boundaries",
    "data.chunk_hashes": _STORE + "data:chunk_hashes_for_block_size",
    "data.blob_hashes": _STORE + "data:BlobBlockHashes",
    "data.build_prefix": _STORE + "data:PoolKey.build_prefix",
    "data.build_key": _STORE + "data:PoolKey.build_key_string",
    "database.process_tokens": _STORE + "data:ChunkedTokenDatabase.process_tokens",
    "database.init": _STORE + "data:ChunkedTokenDatabase.__init__",
    "layout.key_for": _STORE + "data:RankLocalStoreLayout.key_for",
    "sharded_layout.key_for": _STORE + "data:TPShardedStoreLayout.key_for",
    "sharded_layout.templates": _STORE + "data:TPShardedStoreLayout._set_segment_templates",
    "worker.tail_key_boundaries": _STORE + "worker:MooncakeStoreWorker._tail_key_boundaries",
    "worker.record": _STORE + "worker:MooncakeStoreWorker._record_kv_connector_operation",
    "worker.register": _STORE + "worker:MooncakeStoreWorker.register_kv_caches",
    "worker.prefixes": _STORE + "worker:MooncakeStoreWorker._init_lookup_key_prefixes",
    "worker.group_id": _STORE + "worker:_make_mooncake_group_id",
    "worker.staging": _STORE + "worker:_estimate_disk_offload_staging_bytes",
    "worker.split_batches": _STORE + "worker:_split_disk_offload_load_batches",
    "thread.init": _STORE + "worker:KVTransferThread.__init__",
    "thread.record": _STORE + "worker:KVTransferThread._record_operation",
    "sending.init": _STORE + "worker:KVCacheStoreSendingThread.__init__",
    "sending.boundaries": _STORE
    + "worker:KVCacheStoreSendingThread._maybe_offload_boundary_states",
    "sending.retry": _STORE + "worker:KVCacheStoreSendingThread._update_retry_token_ids",
    "sending.finish": _STORE + "worker:KVCacheStoreSendingThread.finish_store_job",
    "sending.saved": _STORE + "worker:KVCacheStoreSendingThread._record_saved",
    "receiving.init": _STORE + "worker:KVCacheStoreRecvingThread.__init__",
    "receiving.report": _STORE + "worker:KVCacheStoreRecvingThread._report_load_error",
    "connector.init": _STORE + "connector:MooncakeStoreConnector.__init__",
}


def _owner(name: str) -> tuple[Any, str] | None:
    """The object that holds a seam and the seam's attribute; None when it is gone."""
    module, _, path = PATHS[name].partition(":")
    *owners, attribute = path.split(".")
    try:
        holder: Any = importlib.import_module(module)
        for part in owners:
            holder = getattr(holder, part)
    except (ImportError, AttributeError):
        return None
    return (holder, attribute) if attribute in vars(holder) else None


def _plain(function: Any) -> Any:
    return function.__func__ if isinstance(function, (staticmethod, classmethod)) else function


_stock: dict[str, Any] = {}


# The name that another module imported a seam by. Its module is heavy, and is only looked at when
# something is put in place.
ALIASES = {"engine.block_hasher": "core.block_hasher"}


def _capture() -> None:
    for name in PATHS:
        if name in ALIASES:
            continue
        place = _owner(name)
        if place is not None:
            _stock.setdefault(name, vars(place[0])[place[1]])


_capture()


def stock(name: str) -> Callable[..., Any]:
    """vLLM's own function behind a seam, whatever is in its place now."""
    function: Callable[..., Any] = _stock[name]
    return function


def digest(name: str) -> str:
    """Digest of a seam's source; empty when the seam is gone or has no source."""
    found = _stock.get(name)
    if found is None:
        return ""
    try:
        source = textwrap.dedent(inspect.getsource(_plain(found)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ""
    drop: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            text = node.body[0]
            drop.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = (line.strip() for i, line in enumerate(source.splitlines(), 1) if i not in drop)
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:10]


def differences(known: Mapping[str, str]) -> list[str]:
    """Seams that are not as known, each with what is the matter."""
    out = []
    for name, expected in known.items():
        found = digest(name)
        if found != expected:
            path = PATHS[name].replace(_STORE, "").replace(":", ".")
            out.append(f"{path} {'has changed' if found else 'is gone'}")
    return out


_lock = threading.Lock()
_placed: dict[str, Any] = {}


def place(replacements: Mapping[str, Any]) -> None:
    """Put functions in place of vLLM's, all or none.

    Raises:
        UnsupportedReleaseError: Somebody else has replaced one of them already.
    """
    with _lock:
        for name in replacements:
            where = _owner(name)
            if where is None:
                raise UnsupportedReleaseError(f"{PATHS[name]} is gone")
            now = vars(where[0])[where[1]]
            _stock.setdefault(name, _stock.get(ALIASES.get(name, name)))
            if now is not _stock[name] and now is not _placed.get(name):
                raise UnsupportedReleaseError(f"{PATHS[name]} was replaced by somebody else")
        done: list[str] = []
        try:
            for name, function in replacements.items():
                _put(name, function)
                done.append(name)
        except BaseException:
            for name in done:
                _put(name, _placed.get(name, _stock[name]))
            raise
        _placed.update(replacements)


def _put(name: str, function: Any) -> None:
    where = _owner(name)
    if where is not None:
        setattr(where[0], where[1], function)


def restore() -> None:
    """Put vLLM's functions back where kvmask's still are."""
    with _lock:
        for name, function in list(_placed.items()):
            where = _owner(name)
            if where is not None and vars(where[0])[where[1]] is function:
                _put(name, _stock[name])
            del _placed[name]


def placed() -> bool:
    """Whether kvmask's functions are in place."""
    return bool(_placed)


if __name__ == "__main__":
    for seam in PATHS:
        print(f"{seam} {digest(seam) or '-'}")
