"""A connector's two sides as vLLM makes them, over a real master and vLLM's own ZMQ connection.

Scheduler and worker are vLLM's real classes. Only the configuration is written by hand, and the
process groups stand for one rank among `tp`. KV caches are small CPU tensors, or none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import zmq
from vllm_oracle import engine, engine_spec

STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store."
_ports = itertools.count(os.getpid() % 10_000 * 100)


def store_settings(address: str, folder: Path, segment: str = "256MB") -> Path:
    """Write the file that names a master; returns its path."""
    path = folder / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": address,
                "protocol": "tcp",
                "global_segment_size": segment,
                "local_buffer_size": "16MB",
            }
        )
    )
    return path


def vllm_config(
    groups: Sequence[Any],
    hash_block: int,
    extra: dict[str, Any] | None = None,
    name: str = "KVMaskStoreConnector",
    tp: int = 1,
    role: str = "kv_both",
) -> Any:
    """What the connector reads of vLLM's configuration. Every one has a connection of its own."""
    from vllm.config import KVTransferConfig

    extra = dict(extra or {})
    if name == "KVMaskStoreConnector":
        # On a busy machine a lookup takes long, and past its deadline it would be a miss.
        extra.setdefault("lookup_deadline_ms", 20_000)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            get_num_layers=lambda _: len(groups),
            get_total_num_kv_heads=lambda: tp,
            enable_sleep_mode=False,
            enable_cumem_allocator=False,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            rank=0,
            world_size=tp,
        ),
        cache_config=SimpleNamespace(
            block_size=groups[0].block_size,
            prefix_match_unit=hash_block if len(groups) > 1 else None,
            enable_prefix_caching=True,
            num_gpu_blocks=None,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=name,
            kv_role=role,
            kv_connector_extra_config={"lookup_rpc_port": next(_ports), **(extra or {})},
        ),
        kv_events_config=None,
        speculative_config=None,
    )


def cache_config(
    groups: Sequence[Any], num_blocks: int = 8, *, partial: int | None = None, retention: Any = None
) -> Any:
    """vLLM's cache configuration of groups of kvmask's kinds."""
    specs = engine().specs
    made = [
        specs.KVCacheGroupSpec([f"l{i}"], engine_spec(g), is_eagle_group=g.eagle)
        for i, g in enumerate(groups)
    ]
    return specs.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=made,
        prefix_cache_retention_interval=retention,
        cache_hit_alignment_tokens=partial,
    )


# Where a test sets it, workers make their store clients with it, and set nothing up.
STORE_CLASS: dict[str, Any] = {"": None}


@contextlib.contextmanager
def stores_of(cls: Any) -> Iterator[None]:
    """Let workers take a store client of this class, which is set up already."""
    STORE_CLASS[""] = cls
    try:
        yield
    finally:
        STORE_CLASS[""] = None


@contextlib.contextmanager
def one_rank(tp: int = 1) -> Iterator[None]:
    """Process groups as the worker of rank 0 sees them."""
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    with contextlib.ExitStack() as stack:
        if STORE_CLASS[""] is not None:
            stack.enter_context(
                mock.patch("mooncake.store.MooncakeDistributedStore", STORE_CLASS[""])
            )
            stack.enter_context(mock.patch(STORE + "worker.setup_mooncake_store"))
        stack.enter_context(rank_zero(tp, alone))
        yield


@contextlib.contextmanager
def rank_zero(tp: int, alone: Any) -> Iterator[None]:
    """What vLLM's worker asks of the process groups."""
    with (
        mock.patch(STORE + "worker.get_tensor_model_parallel_rank", return_value=0),
        mock.patch(STORE + "worker.get_tensor_model_parallel_world_size", return_value=tp),
        mock.patch(STORE + "worker.get_pcp_group", return_value=alone),
        mock.patch(STORE + "worker.get_dcp_group", return_value=alone),
        mock.patch(STORE + "worker.get_ip", return_value="127.0.0.1"),
    ):
        yield


class Pair:
    """Both sides of one connector.

    Args:
        config: vLLM's configuration.
        caches: vLLM's cache configuration.
        apart: The scheduler does not find the worker in its process, as if it were in another one.
        handshake: vLLM passes on what the worker tells the scheduler.
    """

    def __init__(
        self, config: Any, caches: Any, *, apart: bool = False, handshake: bool = True, tp: int = 1
    ) -> None:
        from vllm.distributed import kv_transfer
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        import kvmask.vllm
        from kvmask.vllm import places
        from kvmask.vllm.releases import StockConnector

        names = {
            "KVMaskStoreConnector": kvmask.vllm.KVMaskStoreConnector,
            "MooncakeStoreConnector": StockConnector,
        }
        cls = names[config.kv_transfer_config.kv_connector]
        with one_rank(tp):
            self.worker_side = cls(config, KVConnectorRole.WORKER, caches)
        self.worker = self.worker_side.connector_worker
        if apart:
            places._workers.clear()
        self.scheduler_side = cls(config, KVConnectorRole.SCHEDULER, caches)
        self.scheduler = self.scheduler_side.connector_scheduler
        if handshake:
            module = kv_transfer.kv_transfer_state
            with mock.patch.object(module, "_KV_CONNECTOR_AGENT", self.worker_side):
                told = self.worker_side.get_handshake_metadata()
            if told is not None:
                self.scheduler_side.set_xfer_handshake_metadata_pp_aware({(0, 0): told})

    @property
    def asking(self) -> Any:
        """What took the place of the scheduler's lookup client."""
        return self.scheduler.client

    def hit(self, request: Any, computed: int = 0) -> Any:
        """What the scheduler is told of a request: hit tokens beyond the computed ones."""
        found, _ = self.scheduler_side.get_num_new_matched_tokens(request, computed)
        return found

    def close(self) -> None:
        """Close both sides, and what vLLM leaves open."""
        client = getattr(self.asking, "client", self.asking)
        self.scheduler_side.shutdown()
        if not client.socket.closed and hasattr(client, "ctx"):
            client.close()
        client.ctx.destroy(linger=0)
        server = self.worker.lookup_server
        if server is not None and server.thread.is_alive():
            server.running = False
            with server.ctx.socket(zmq.REQ) as last:
                last.setsockopt(zmq.LINGER, 0)
                last.connect("ipc://" + server._ipc_path)
                last.send(b"the end")
                if last.poll(10_000):
                    last.recv()
                    server.thread.join(10)
                    server.close()
            if not server.thread.is_alive():
                server.ctx.destroy(linger=0)
        self.worker_side.shutdown()


_ids = itertools.count()


def request(num_tokens: int, block_hashes: list[bytes]) -> Any:
    """What lookups read of vLLM's request."""
    return SimpleNamespace(
        request_id=f"r{next(_ids)}", num_tokens=num_tokens, block_hashes=block_hashes
    )


def keys_of(worker: Any, group: int, digest: bytes) -> list[str]:
    """The keys under which a worker's lookup finds one block."""
    return [f"{prefix}@{digest.hex()}" for prefix in worker._lookup_key_prefixes[group]]
