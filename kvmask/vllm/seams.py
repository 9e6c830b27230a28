"""The seams between kvmask and vLLM: what is replaced or relied on, by name.

See `kvmask.engines.seams`. Which feature touches which seam stands in `kvmask.vllm.features`, their
digests in every release in `kvmask.vllm.digests`.

    python -m kvmask.vllm.seams        # prints the digests of the installed vLLM
"""

from __future__ import annotations

from kvmask.engines import Seams

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
_STORE = _V1 + "mooncake.store."
_CORE = "vllm.v1.core."
_MANAGERS = _CORE + "single_type_kv_cache_manager:"
_COORDINATOR = _STORE + "coordinator:MooncakeStoreCoordinator."
_POOL = _STORE + "coordinator:ExternalCachedBlockPool."
_WORKER = _STORE + "worker:MooncakeStoreWorker."
_THREAD = _STORE + "worker:KVTransferThread."
_SENDING = _STORE + "worker:KVCacheStoreSendingThread."
_RECEIVING = _STORE + "worker:KVCacheStoreRecvingThread."
_LOCAL = _STORE + "data:RankLocalStoreLayout."
_SHARDED = _STORE + "data:TPShardedStoreLayout."
_DATABASE = _STORE + "data:ChunkedTokenDatabase."
_CONNECTOR = _STORE + "connector:MooncakeStoreConnector."
_SCHEDULER = _STORE + "scheduler:MooncakeStoreScheduler."


def _words(prefix: str, path: str, words: str) -> dict[str, str]:
    """Seams of attributes that a function sets or a class has: the lines that name them."""
    return {f"{prefix}.{word.strip('_')}": f"{path}#{word}" for word in words.split()}


# name -> module:path, or module:path#attribute
PATHS: dict[str, str] = {
    # replaced
    "coordinator.store_mask": _COORDINATOR + "store_mask",
    "coordinator.lookup_mask": _COORDINATOR + "lookup_mask",
    "coordinator.load_mask": _COORDINATOR + "load_mask",
    "coordinator.find_longest_cache_hit": _COORDINATOR + "find_longest_cache_hit",
    "engine.block_hasher": "vllm.v1.engine.core:get_request_block_hasher",
    "worker.lookup": _WORKER + "lookup",
    "sending.handle_request": _SENDING + "_handle_request",
    "receiving.handle_request": _RECEIVING + "_handle_request",
    "layout.prepare_values": _LOCAL + "prepare_values",
    "sharded_layout.prepare_values": _SHARDED + "prepare_values",
    "database.prepare_values": _DATABASE + "prepare_values",
    "connector.stats": _CONNECTOR + "get_kv_connector_stats",
    "connector.build_stats": _CONNECTOR + "build_kv_connector_stats",
    "connector.build_metrics": _CONNECTOR + "build_prom_metrics",
    # hashes
    "core.block_hasher": _CORE + "kv_cache_utils:get_request_block_hasher",
    "core.hash_block_tokens": _CORE + "kv_cache_utils:hash_block_tokens",
    "core.extra_keys": _CORE + "kv_cache_utils:generate_block_hash_extra_keys",
    "core.init_none_hash": _CORE + "kv_cache_utils:init_none_hash",
    "hashing.sha256": "vllm.utils.hashing:sha256",
    "hashing.sha256_cbor": "vllm.utils.hashing:sha256_cbor",
    "hashing.xxhash": "vllm.utils.hashing:xxhash",
    "hashing.xxhash_cbor": "vllm.utils.hashing:xxhash_cbor",
    "hashing.xxhash_digest": "vllm.utils.hashing:_xxhash_digest",
    **_words(
        "request",
        "vllm.v1.request:Request",
        "_all_token_ids block_hashes num_tokens mm_features prompt_embeds cache_salt lora_request",
    ),
    # the coordinator's rules
    "coordinator.init": _COORDINATOR + "__init__",
    "coordinator.from_config": _COORDINATOR + "from_kv_cache_config",
    "coordinator.split": _COORDINATOR + "_verify_and_split_kv_cache_groups",
    "coordinator.align_lookup_length": _COORDINATOR + "align_lookup_length",
    "coordinator.hashes_for_spec": _COORDINATOR + "block_hashes_for_spec",
    "coordinator.reachable_masks": _COORDINATOR + "_reachable_masks",
    "coordinator.find_hit_blocks": _COORDINATOR + "_find_hit_blocks",
    "coordinator.unwrap_spec": _STORE + "coordinator:_unwrap_spec",
    "coordinator.coverage_spec": _STORE + "coordinator:_coverage_spec",
    "coordinator.partial_hits": _STORE + "coordinator:partial_hash_hits_enabled",
    "coordinator.spec_group": _STORE + "coordinator:StoreSpecGroup",
    "core.spec_group": _CORE + "kv_cache_coordinator:SpecGroup",
    "pool.init": _POOL + "__init__",
    "pool.get_cached_block": _POOL + "get_cached_block",
    "pool.contains": _POOL + "contains",
    "manager.reachable_block_mask": _MANAGERS + "SingleTypeKVCacheManager.reachable_block_mask",
    "full.find": _MANAGERS + "FullAttentionManager.find_longest_cache_hit",
    "window.need": _MANAGERS + "SlidingWindowManager._contiguous_blocks_for_hit",
    "window.find": _MANAGERS + "SlidingWindowManager.find_longest_cache_hit",
    "window.mask": _MANAGERS + "SlidingWindowManager.reachable_block_mask",
    "chunked.find": _MANAGERS + "ChunkedLocalAttentionManager.find_longest_cache_hit",
    "state.find": _MANAGERS + "MambaManager.find_longest_cache_hit",
    "state.mask": _MANAGERS + "MambaManager.reachable_block_mask",
    "core.resolve_block_hashes": _CORE + "kv_cache_utils:resolve_block_hashes",
    "core.hash_list": _CORE + "kv_cache_utils:BlockHashListWithBlockSize",
    "core.eagle_proof_margin": _CORE + "kv_cache_utils:eagle_proof_margin",
    "core.replay_boundaries": _CORE + "kv_cache_coordinator:replay_boundaries",
    "spec.prefix_cacheable": "vllm.v1.kv_cache_interface:KVCacheSpec#prefix_cacheable",
    # digests and keys
    "data.chunk_hashes": _STORE + "data:chunk_hashes_for_block_size",
    "data.compact_hashes": _STORE + "data:_CompactChunkHashList",
    "data.blob_hashes": _STORE + "data:BlobBlockHashes",
    "data.key_metadata": _STORE + "data:KeyMetadata",
    "data.build_prefix": _STORE + "data:PoolKey.build_prefix",
    "data.build_key": _STORE + "data:PoolKey.build_key_string",
    "data.key_text": _STORE + "data:PoolKey.to_string",
    "data.lookup_result": _STORE + "data:MooncakeLookupResult",
    "data.tail_boundary": _STORE + "data:TailKeyBoundary",
    # the way of a lookup
    "worker.tail_key_boundaries": _WORKER + "_tail_key_boundaries",
    "worker.record": _WORKER + "_record_kv_connector_operation",
    "worker.prefixes": _WORKER + "_init_lookup_key_prefixes",
    "worker.databases": _WORKER + "_build_token_databases",
    **_words(
        "worker",
        _WORKER + "__init__",
        "_capacity_only hash_block_size _kv_cache_groups coord store token_dbs num_kv_head",
    ),
    "client.init": _STORE + "worker:LookupKeyClient.__init__",
    "client.path": _STORE + "worker:get_zmq_rpc_path_lookup",
    "client.lookup": _STORE + "worker:LookupKeyClient.lookup",
    "client.send": _STORE + "worker:LookupKeyClient._lookup",
    "client.discard": _STORE + "worker:LookupKeyClient.discard",
    "client.reset": _STORE + "worker:LookupKeyClient.reset",
    "client.close": _STORE + "worker:LookupKeyClient.close",
    "server.init": _STORE + "worker:LookupKeyServer.__init__",
    "server.close": _STORE + "worker:LookupKeyServer.close",
    "protocol.lookup": _STORE + "protocol:LOOKUP_MSG",
    "protocol.encode": _STORE + "protocol:encode_lookup_response",
    "protocol.decode": _STORE + "protocol:decode_lookup_response",
    "scheduler.reset": _SCHEDULER + "reset_store",
    "scheduler.matched_tokens": _SCHEDULER + "get_num_new_matched_tokens",
    **_words("scheduler", _SCHEDULER + "__init__", "client _block_size _store_coord"),
    # blocks in memory
    "database.init": _DATABASE + "__init__",
    "database.process_tokens": _DATABASE + "process_tokens",
    "database.key_for": _DATABASE + "key_for",
    "database.value_for_block": _DATABASE + "prepare_value_for_block",
    "database.set_addresses": _DATABASE + "set_kv_caches_base_addr",
    "database.set_lengths": _DATABASE + "set_block_len",
    "layout.base": _STORE + "data:StoreLayout.__init__",
    "layout.init": _LOCAL + "__init__",
    "layout.key_for": _LOCAL + "key_for",
    "layout.shard_ids": _LOCAL + "local_shard_ids",
    "layout.prefixes": _LOCAL + "lookup_key_prefixes",
    "layout.register": _LOCAL + "register_kv_caches",
    "sharded_layout.init": _SHARDED + "__init__",
    "sharded_layout.key_for": _SHARDED + "key_for",
    "sharded_layout.shard_ids": _SHARDED + "local_shard_ids",
    "sharded_layout.prefixes": _SHARDED + "lookup_key_prefixes",
    "sharded_layout.register": _SHARDED + "register_kv_caches",
    "sharded_layout.templates": _SHARDED + "_set_segment_templates",
    # the transfer threads
    "thread.init": _THREAD + "__init__",
    "thread.run": _THREAD + "run",
    "thread.record": _THREAD + "_record_operation",
    "thread.add_request": _THREAD + "add_request",
    "thread.set_finished": _THREAD + "set_finished_request",
    "thread.update_events": _THREAD + "update_kv_event",
    "sending.init": _SENDING + "__init__",
    "sending.add_request": _SENDING + "add_request",
    "sending.is_live": _SENDING + "is_live_store_job",
    "sending.finish": _SENDING + "finish_store_job",
    "sending.saved": _SENDING + "_record_saved",
    "sending.get_retry": _SENDING + "_get_retry_token_ids",
    "sending.retry": _SENDING + "_update_retry_token_ids",
    "sending.should_skip": _SENDING + "_should_skip_request",
    "sending.mark_skipped": _SENDING + "_mark_request_skipped_for_pressure",
    "sending.clear_pressure": _SENDING + "_clear_store_pressure",
    "sending.boundaries": _SENDING + "_maybe_offload_boundary_states",
    "receiving.init": _RECEIVING + "__init__",
    "receiving.report": _RECEIVING + "_report_load_error",
    "receiving.add_errors": _RECEIVING + "_add_load_error_block_ids",
    "worker.register": _WORKER + "register_kv_caches",
    "worker.start_load": _WORKER + "start_load_kv",
    "worker.wait_for_save": _WORKER + "wait_for_save",
    "worker.group_id": _STORE + "worker:_make_mooncake_group_id",
    "worker.no_handle": _STORE + "worker:MOONCAKE_NO_AVAILABLE_HANDLE",
    "worker.rotate": _STORE + "worker:_rotate_list",
    "worker.usable_budget": _STORE + "worker:_get_usable_disk_offload_buffer_budget_bytes",
    "worker.staging": _STORE + "worker:_estimate_disk_offload_staging_bytes",
    "worker.split_batches": _STORE + "worker:_split_disk_offload_load_batches",
    "worker.replica_tiers": _STORE + "worker:_get_replica_tiers_by_key",
    "worker.log_tiers": _STORE + "worker:_log_mooncake_load_tier_summary",
    "data.req_meta": _STORE + "data:ReqMeta",
    "data.from_request_tracker": _STORE + "data:ReqMeta.from_request_tracker",
    "data.load_spec": _STORE + "data:LoadSpec",
    "core.convert_block_hash": _CORE + "kv_cache_utils:maybe_convert_block_hash",
    "core.null_block": "vllm.v1.attention.backends.utils:NULL_BLOCK_ID",
    "events.block_stored": "vllm.distributed.kv_events:BlockStored",
    # the connector
    "connector.init": _CONNECTOR + "__init__",
    "connector.matched_tokens": _CONNECTOR + "get_num_new_matched_tokens",
    "connector.register": _CONNECTOR + "register_kv_caches",
    "connector.reset": _CONNECTOR + "reset_cache",
    "connector.shutdown": _CONNECTOR + "shutdown",
    # statistics
    "metrics.stats": _STORE + "metrics:MooncakeStoreConnectorStats",
    "metrics.prometheus": _STORE + "metrics:MooncakeStorePromMetrics",
    "metrics.base": _V1 + "metrics:KVConnectorPromMetrics.__init__",
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
