"""vLLM's own store worker and saving thread for a shape, created without an engine.

Their code is vLLM's, unchanged. They call the store that they are given. A process with GPUs would
compute specs, namespaces and token databases first. Here these are created with vLLM's own classes.
vLLM is imported only when something is created.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shapes import DIGEST_BYTES, MODEL, Shape

sys.path.append(str(Path(__file__).parent.parent / "tests"))

Lookup = Callable[[int, bytes], int]


def available() -> bool:
    """True when vLLM is installed. Does not import it."""
    return importlib.util.find_spec("vllm") is not None


def engine() -> Any:
    """Return vLLM's modules. The first call takes many seconds."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm_oracle

    return vllm_oracle.engine()


def version() -> str:
    """Return vLLM's version, or "none"."""
    if not available():
        return "none"
    import vllm

    return str(vllm.__version__)


def coordinator(shape: Shape) -> Any:
    """Create vLLM's store coordinator for a shape."""
    e = engine()
    import vllm_oracle

    groups = [
        e.specs.KVCacheGroupSpec(
            layer_names=[f"l{i}"], kv_cache_spec=vllm_oracle.engine_spec(g), is_eagle_group=False
        )
        for i, g in enumerate(shape.groups)
    ]
    return e.coordinator.MooncakeStoreCoordinator(
        groups, scheduler_block_size=shape.alignment, hash_block_size=shape.hash_block
    )


def databases(shape: Shape) -> list[Any]:
    """Create one token database per group, with one region per block."""
    data = engine().data
    out = []
    for i, group in enumerate(shape.groups):
        db = data.ChunkedTokenDatabase(
            data.KeyMetadata(MODEL, 0, 0, 0, 0, i), group.block_size, shape.hash_block
        )
        db.set_kv_caches_base_addr([1 << 40])
        db.set_block_len([64])
        out.append(db)
    return out


def worker(shape: Shape, store: Any) -> Any:
    """Create vLLM's store worker with a store."""
    e = engine()
    w = object.__new__(e.worker.MooncakeStoreWorker)
    w._capacity_only = False
    w.coord = coordinator(shape)
    w.hash_block_size = shape.hash_block
    w._kv_cache_groups = w.coord.kv_cache_groups
    w._kv_connector_stats_lock = threading.Lock()
    w.kv_connector_stats = e.worker.MooncakeStoreConnectorStats()
    w.token_dbs = databases(shape)
    w.tp_size = w.pcp_size = w.dcp_size = w.pp_size = 1
    w._group_tp_replication_factors = (1,) * len(shape.groups)
    w._init_lookup_key_prefixes()
    w.store = store
    return w


def lookup(shape: Shape, store: Any) -> Lookup:
    """Return the worker's lookup, called as its server does: the digests are read in place."""
    w = worker(shape, store)
    view = engine().data.BlobBlockHashes

    def call(num_tokens: int, buffer: bytes) -> int:
        hit: int = w.lookup(num_tokens, view(memoryview(buffer), DIGEST_BYTES)).hit_length
        return hit

    return call


def hash_list(buffer: bytes) -> list[bytes]:
    """Return the digests as a list, as in a request of vLLM."""
    return [buffer[i : i + DIGEST_BYTES] for i in range(0, len(buffer), DIGEST_BYTES)]


def plan_save(shape: Shape) -> Callable[[int, list[bytes]], list[str]]:
    """Return a function that makes masks, chunks and keys of a save as vLLM's thread does."""
    coord, dbs = coordinator(shape), databases(shape)

    def call(num_tokens: int, hashes: list[bytes]) -> list[str]:
        masks = coord.store_mask(num_tokens, 0, num_prompt_tokens=num_tokens)
        keys = []
        for db, mask in zip(dbs, masks, strict=True):
            keys += [
                db.store_layout.key_for(shard, digest)
                for _, _, digest in db.process_tokens(num_tokens, hashes, chunk_mask=mask)
                for shard in db.store_layout.local_shard_ids
            ]
        return keys

    return call


def save(shape: Shape, store: Any) -> Callable[[int, list[bytes], Sequence[list[int]]], None]:
    """Return a function that saves one request with the saving thread's code, in this thread."""
    e = engine()
    thread = e.worker.KVCacheStoreSendingThread(
        store,
        coordinator(shape),
        databases(shape),
        shape.alignment,
        0,
        [1] * len(shape.groups),
        "kv_both",
        threading.Event(),
        replicate_config=types.SimpleNamespace(),
    )

    def call(num_tokens: int, hashes: list[bytes], block_ids: Sequence[list[int]]) -> None:
        request = e.data.ReqMeta(
            req_id="r",
            token_len_chunk=num_tokens,
            block_ids=tuple(block_ids),
            block_hashes=hashes,
            can_save=True,
            store_job_id=1,
        )
        thread.add_request(request)
        thread._handle_request(thread.request_queue.get())
        thread.delete_finished_stored_request("r")
        thread.take_completed_saves()

    return call
