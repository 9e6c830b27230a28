"""The seams between kvmask and vLLM: what is replaced or relied on.

See `kvmask.engines.seams`. Only when one release fits entirely may anything be put in place.

    python -m kvmask.vllm.seams        # prints the digests of the installed vLLM
"""

from __future__ import annotations

from kvmask.engines import Seams

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

# The name that another module imported a seam by. Its module is heavy, and is only looked at when
# something is put in place.
ALIASES = {"engine.block_hasher": "core.block_hasher"}

SEAMS = Seams(PATHS, ALIASES, _STORE)
stock = SEAMS.stock
digest = SEAMS.digest
differences = SEAMS.differences
place = SEAMS.place
restore = SEAMS.restore
placed = SEAMS.placed

if __name__ == "__main__":
    print(SEAMS.report())
