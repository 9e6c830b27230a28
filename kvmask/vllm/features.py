"""Which feature of the adapter touches which seams of vLLM, and which releases have it.

A feature is put in place where all its seams are as in a known release (`kvmask.engines.features`).
It relies on what kvmask calls, on what it computes instead of vLLM, and on what made the objects
that it reads. Tests record what is called and read, and compare it with this table
(tests/test_vllm_seams.py).

| feature | what it is | releases |
| --- | --- | --- |
| connector | kvmask's own connector, which gives vLLM's objects kvmask's methods | all |
| masks | the coordinator's masks and hit search | 0.27 and newer |
| lookup | the worker's lookup; before 0.27 only its keys | all |
| asking | lookups in the scheduler, with a deadline | 0.27 and newer |
| local | lookups that know what the GPU holds | 0.29 and newer |
| layouts | addresses and sizes of blocks | 0.27 and newer |
| saving | the sending thread's job | 0.29 and newer |
| loading | the receiving thread's job | 0.27 and newer |
| hasher | block hashes of a request | all |
| metrics | kvmask's counters among vLLM's | all |
"""

from __future__ import annotations

from kvmask.engines import Feature, Table
from kvmask.versions import VLLM, release_of
from kvmask.vllm.digests import DIGESTS

# Oldest first. Patch releases differ in nothing that matters here.
RELEASES = tuple(sorted({release_of(v) for v in VLLM}, key=lambda r: tuple(map(int, r.split(".")))))

_SPLIT = (
    "coordinator.init",
    "coordinator.from_config",
    "coordinator.split",
    "coordinator.unwrap_spec",
    "coordinator.coverage_spec",
    "coordinator.partial_hits",
    "coordinator.spec_group",
    "core.spec_group",
    "spec.prefix_cacheable",
)
_RULES = (
    *_SPLIT,
    "coordinator.align_lookup_length",
    "coordinator.hashes_for_spec",
    "coordinator.reachable_masks",
    "coordinator.find_hit_blocks",
    "pool.init",
    "pool.get_cached_block",
    "manager.reachable_block_mask",
    "full.find",
    "window.need",
    "window.find",
    "window.mask",
    "chunked.find",
    "state.find",
    "state.mask",
    "core.resolve_block_hashes",
    "core.hash_list",
    "core.eagle_proof_margin",
    "core.replay_boundaries",
    "data.chunk_hashes",
    "data.compact_hashes",
    "data.blob_hashes",
)
_KEYS = (
    "data.key_metadata",
    "data.build_prefix",
    "data.build_key",
    "data.key_text",
    "database.key_for",
    "layout.key_for",
    "sharded_layout.key_for",
)
_ADDRESSES = (
    "database.init",
    "database.set_addresses",
    "database.set_lengths",
    "layout.base",
    "layout.init",
    "layout.shard_ids",
    "layout.register",
    "sharded_layout.init",
    "sharded_layout.shard_ids",
    "sharded_layout.register",
    "sharded_layout.templates",
)
_THREAD = (
    *_KEYS,
    *_ADDRESSES,
    "thread.init",
    "thread.run",
    "thread.record",
    "thread.add_request",
    "database.process_tokens",
    "data.blob_hashes",
    "data.req_meta",
    "data.from_request_tracker",
    "core.null_block",
    "coordinator.init",
    "worker.register",
    "worker.group_id",
)

FEATURES = (
    Feature(
        "connector",
        (),
        (
            "connector.init",
            "connector.matched_tokens",
            "connector.register",
            "scheduler.client",
            "scheduler.store_coord",
            "scheduler.block_size",
            "worker.coord",
            "worker.token_dbs",
            "worker.register",
        ),
    ),
    Feature(
        "masks",
        (
            "coordinator.store_mask",
            "coordinator.lookup_mask",
            "coordinator.load_mask",
            "coordinator.find_longest_cache_hit",
        ),
        _RULES,
    ),
    Feature(
        "lookup",
        ("worker.lookup",),
        (
            *_RULES,
            *_KEYS,
            "coordinator.lookup_mask",
            "coordinator.find_longest_cache_hit",
            "pool.contains",
            "data.lookup_result",
            "data.tail_boundary",
            "worker.tail_key_boundaries",
            "worker.record",
            "worker.prefixes",
            "worker.databases",
            "worker.capacity_only",
            "worker.hash_block_size",
            "worker.kv_cache_groups",
            "worker.coord",
            "worker.store",
            "worker.token_dbs",
            "worker.num_kv_head",
            "database.init",
            "layout.prefixes",
            "sharded_layout.prefixes",
            "client.lookup",
            "client.send",
            "server.init",
            "protocol.lookup",
            "protocol.encode",
            "protocol.decode",
        ),
    ),
    Feature(
        "asking",
        (),
        (
            "client.init",
            "client.path",
            "client.lookup",
            "client.send",
            "client.discard",
            "client.reset",
            "client.close",
            "server.init",
            "server.close",
            "protocol.lookup",
            "protocol.encode",
            "protocol.decode",
            "data.lookup_result",
            "scheduler.matched_tokens",
            "scheduler.client",
            "scheduler.block_size",
            "connector.matched_tokens",
            "connector.reset",
            "connector.shutdown",
            "scheduler.reset",
        ),
        needs=("connector", "lookup", "masks"),
    ),
    Feature(
        "local",
        (),
        ("client.send", "protocol.encode", "protocol.decode", "data.lookup_result"),
        needs=("connector", "lookup", "asking"),
    ),
    Feature(
        "layouts",
        ("layout.prepare_values", "sharded_layout.prepare_values", "database.prepare_values"),
        (*_ADDRESSES, "database.value_for_block"),
    ),
    Feature(
        "saving",
        ("sending.handle_request",),
        (
            *_THREAD,
            "coordinator.store_mask",
            "sending.init",
            "sending.add_request",
            "sending.is_live",
            "sending.finish",
            "sending.saved",
            "sending.get_retry",
            "sending.retry",
            "sending.should_skip",
            "sending.mark_skipped",
            "sending.clear_pressure",
            "sending.boundaries",
            "thread.update_events",
            "worker.wait_for_save",
            "worker.no_handle",
            "core.convert_block_hash",
            "events.block_stored",
        ),
        needs=("layouts",),
    ),
    Feature(
        "loading",
        ("receiving.handle_request",),
        (
            *_THREAD,
            "coordinator.load_mask",
            "coordinator.find_longest_cache_hit",
            "receiving.init",
            "receiving.report",
            "receiving.add_errors",
            "thread.set_finished",
            "data.load_spec",
            "data.tail_boundary",
            "worker.start_load",
            "worker.rotate",
            "worker.usable_budget",
            "worker.staging",
            "worker.split_batches",
            "worker.replica_tiers",
            "worker.log_tiers",
        ),
        needs=("layouts",),
    ),
    Feature(
        "hasher",
        ("engine.block_hasher",),
        (
            "core.block_hasher",
            "core.hash_block_tokens",
            "core.extra_keys",
            "core.init_none_hash",
            "hashing.sha256",
            "hashing.sha256_cbor",
            "hashing.xxhash",
            "hashing.xxhash_cbor",
            "hashing.xxhash_digest",
            "request.all_token_ids",
            "request.block_hashes",
            "request.num_tokens",
            "request.mm_features",
            "request.prompt_embeds",
            "request.cache_salt",
            "request.lora_request",
        ),
    ),
    Feature(
        "metrics",
        ("connector.stats", "connector.build_stats", "connector.build_metrics"),
        ("metrics.stats", "metrics.prometheus", "metrics.base"),
        needs=("lookup",),
    ),
)

# Why a release does not have a feature.
ABSENT = {
    "masks": "its groups are searched at other alignments",
    "asking": "its lookups are the worker's alone",
    "local": "its lookups answer with a length alone",
    "layouts": "it places one block at a time",
    "saving": "its sending thread keeps other records and chains events through its own writes",
    "loading": "its receiving thread names the last block by its position",
}
_FIRST = {
    "connector": "0.24",
    "masks": "0.27",
    "lookup": "0.24",
    "asking": "0.27",
    "local": "0.29",
    "layouts": "0.27",
    "saving": "0.29",
    "loading": "0.27",
    "hasher": "0.24",
    "metrics": "0.24",
}
OFFERS = {
    release: frozenset(f for f, first in _FIRST.items() if RELEASES.index(first) <= i)
    for i, release in enumerate(RELEASES)
}

TABLE = Table(RELEASES, DIGESTS, FEATURES, OFFERS)
