"""vllm-ascend's AscendStore without an NPU: its modules, and workers over a scripted store.

The package is imported from its unpacked source (`scripts/ascend_source.py`); the accelerator's own
modules are empty stand-ins. Everything that is compared is the package's own code over real vLLM.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import random
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

from kvmask.versions import ASCEND, VLLM_INSTALLED

ROOT = Path(__file__).parent.parent
PACKAGE = "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store."
#: The release under test; another one needs a process of its own.
VERSION = os.environ.get("KVMASK_ASCEND_VERSION", list(ASCEND)[-1])


def overlay() -> Path | None:
    """vLLM's Python sources that the release needs in place of the installed ones."""
    needed = ASCEND[VERSION]
    if needed == VLLM_INSTALLED:
        return None
    return ROOT / "build" / "vllm-src" / f"vllm-{needed}"


def source() -> Path:
    """Where the unpacked release is, whether it exists or not."""
    return ROOT / "build" / "ascend-src" / f"vllm_ascend-{VERSION}"


def available() -> bool:
    """Whether the modules can be imported here."""
    other = overlay()
    if other is not None and not other.is_dir():
        return False
    return source().is_dir() and importlib.util.find_spec("vllm") is not None


def wanted() -> bool:
    """Whether tests shall import them. They leave stand-ins of an accelerator in the process."""
    return "KVMASK_ASCEND_VERSION" in os.environ and available()


@functools.cache
def modules() -> Any:
    """The modules of AscendStore and of vLLM that tests use. The first call takes many seconds."""
    os.environ.setdefault("VLLM_PLUGINS", "")
    other = overlay()
    if other is not None:
        sys.path.insert(0, str(other))
        # What older releases need and the installed one does not bring.
        for name in ("gguf", "gguf.constants", "gguf.quants"):
            sys.modules.setdefault(name, mock.MagicMock())
    import torch

    for name in (
        "transformers",
        "vllm",
        "vllm.distributed",
        "vllm.forward_context",
        "vllm.v1.core.kv_cache_manager",
        "vllm.distributed.kv_transfer.kv_connector.factory",
    ):
        importlib.import_module(name)
    # Only now: the packages above look for an accelerator and would believe these.
    if not hasattr(torch, "npu"):
        torch.npu = mock.MagicMock()
    for name in ("torch_npu", "torch_npu._inductor"):
        sys.modules.setdefault(name, mock.MagicMock())
    sys.path.insert(0, str(source()))
    worker = importlib.import_module(PACKAGE + "pool_worker")
    coordinator = importlib.import_module(PACKAGE + "coordinator")
    data = sys.modules.get(PACKAGE + "metadata") or sys.modules[PACKAGE + "config_data"]
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    return types.SimpleNamespace(
        torch=torch, worker=worker, coordinator=coordinator, data=data, specs=specs
    )


@functools.lru_cache(10_000)
def spec(kind: str, block_size: int, span: int, tag: int, cacheable: bool) -> Any:
    """A cache spec of vLLM; groups with equal ones are merged."""
    m = modules()
    attention = {"num_kv_heads": 1, "head_size": 8 * (tag + 1), "dtype": m.torch.float16}
    if not cacheable and hasattr(m.specs, "CircularBufferSpec"):
        return m.specs.CircularBufferSpec(block_size=block_size, **attention)
    if kind == "full":
        return m.specs.FullAttentionSpec(block_size=block_size, **attention)
    if kind == "window":
        return m.specs.SlidingWindowSpec(block_size=block_size, sliding_window=span, **attention)
    return m.specs.MambaSpec(
        block_size=block_size,
        shapes=((1, tag + 1),),
        dtypes=(m.torch.float32,),
        mamba_cache_mode="align",
    )


class ScriptedStore:
    """A backend that answers from a set and keeps what it was asked.

    Args:
        keys: What is present.
        fails: The call that raises, counted from 0; None for none.
    """

    def __init__(self, keys: set[str], fails: int | None = None) -> None:
        self.keys = keys
        self.fails = fails
        self.calls: list[list[str]] = []

    def exists(self, keys: list[str]) -> list[int]:
        """1 for a key that is present."""
        self.calls.append(list(keys))
        if self.fails is not None and len(self.calls) > self.fails:
            raise ConnectionError("the store is gone")
        return [int(key in self.keys) for key in keys]

    @property
    def asked(self) -> list[str]:
        """All keys, in the order of the calls."""
        return [key for call in self.calls for key in call]


def make_worker(
    groups: list[dict[str, Any]],
    *,
    hash_block_size: int | None = None,
    families: list[str] | None = None,
    retention: int | None = None,
    eagle: bool = False,
    tp_size: int = 1,
    pp_size: int = 1,
    dcp_size: int = 1,
    kv_heads: int = 8,
    mla: bool = False,
    max_model_len: int = 1 << 20,
    hybrid: bool = True,
    model: str = "org/DeepSeek-V4",
) -> Any:
    """A real KVPoolWorker of rank 0 over a store that is to be set.

    Args:
        groups: Per cache group kind, block_size, span, tag, cacheable and eagle.
        hash_block_size: Tokens per digest, of one context-parallel rank.
        families: Cache family per group; the worker's own by default.
        retention: vLLM's retention interval.
        eagle: Whether a drafter runs.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline-parallel size.
        dcp_size: Decode-context-parallel size.
        kv_heads: KV heads of the model.
        mla: The model has multi-head latent attention.
        max_model_len: Tokens.
        hybrid: Several kinds of groups are managed together.
        model: Its name.
    """
    m = modules()
    made = [
        m.specs.KVCacheGroupSpec(
            [f"model.layers.{i}.attn"],
            spec(
                g["kind"],
                g["block_size"],
                g.get("span", 0),
                g.get("tag", 0),
                g.get("cacheable", True),
            ),
            is_eagle_group=g.get("eagle", False),
        )
        for i, g in enumerate(groups)
    ]
    space = types.SimpleNamespace
    text = space()
    config = space(
        model_config=space(
            model=model,
            max_model_len=max_model_len,
            use_mla=mla,
            hf_text_config=text,
            hf_config=text,
            get_num_layers=lambda parallel: len(groups),
            get_num_layers_by_block_type=lambda *args: len(groups),
            get_total_num_kv_heads=lambda: kv_heads,
        ),
        parallel_config=space(
            data_parallel_rank=0,
            rank=0,
            pipeline_parallel_size=pp_size,
            tensor_parallel_size=tp_size,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=dcp_size,
        ),
        kv_transfer_config=space(
            kv_role="kv_both", kv_connector_extra_config={"backend": "mooncake"}
        ),
        scheduler_config=space(disable_hybrid_kv_cache_manager=not hybrid),
        cache_config=space(
            block_size=groups[0]["block_size"],
            prefix_match_unit=hash_block_size,
            hash_block_size=hash_block_size,
        ),
        speculative_config=space(use_eagle=lambda: True) if eagle else None,
        kv_events_config=None,
        additional_config={},
    )
    cache_config = space(kv_cache_groups=made, num_blocks=64)
    w = m.worker
    one = space(rank_in_group=0, world_size=1)
    patches: dict[str, Any] = {
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: tp_size,
        "get_pp_group": lambda: one,
        "get_pcp_group": lambda: one,
        "get_decode_context_model_parallel_world_size": lambda: dcp_size,
        "get_decode_context_model_parallel_rank": lambda: 0,
        "importlib": mock.MagicMock(),
        "envs": space(LOCAL_RANK=0, VLLM_PREFIX_CACHE_RETENTION_INTERVAL=retention),
    }
    if families is not None:
        patches["infer_group_cache_families"] = lambda *args: list(families)
    patches["KVPPConfig"] = space(from_vllm_config=lambda config: space(size=1))
    patches = {name: thing for name, thing in patches.items() if hasattr(w, name)}
    with mock.patch.multiple(w, **patches):
        worker = w.KVPoolWorker(config, False, cache_config)
    worker.token_database.set_group_buffers(
        {},
        {},
        group_cache_families=dict(enumerate(worker.kv_cache_group_families)),
    )
    return worker


def fill_store(
    worker: Any, rng: random.Random, hashes: list[Any], share: Any, lost: float = 0.01
) -> set[str]:
    """Keys of a store that holds blocks of a request, every rank for itself.

    Args:
        worker: Whose keys these are.
        rng: Chooses what is lost.
        hashes: Digests of the request.
        share: Per group a function of the block's index: whether it was stored at all.
        lost: How many of the stored blocks lack some ranks.
    """
    db = worker.token_database
    keys: set[str] = set()
    unit = db.hash_block_size
    for group in range(worker.num_kv_cache_groups):
        size = block_tokens(worker, group)
        if size % unit:
            continue
        prefix = db._get_key_prefix(group)
        names = rank_names(worker, group, prefix)
        for i in range(len(hashes) * unit // size):
            digest = hashes[(i + 1) * size // unit - 1]
            text = digest if isinstance(digest, str) else digest.hex()
            if share[group](i):
                gaps = rng.random() < lost
                keys.update(n + text for n in names if not (gaps and rng.random() < 0.5))
    return keys


def block_tokens(worker: Any, group: int) -> int:
    """Tokens of the request that one block of a group covers."""
    coord = worker.cache_coordinator
    if coord is not None:
        return int(coord.group_effective_block_sizes[group])
    return int(worker.token_database.get_block_size(group))


def rank_names(worker: Any, group: int, prefix: str) -> list[str]:
    """A key's text up to the digest for every rank that holds a part of the block."""
    if worker.cache_coordinator is not None:
        return list(worker._expand_lookup_key_variants(prefix, group, True))
    heads, pps = worker.get_group_tp_size(group), worker.pp_size
    if hasattr(worker, "_expand_lookup_keys_by_rank"):
        return list(worker._expand_lookup_keys_by_rank([prefix], group))
    return [
        prefix.replace("@head_or_tp_rank:0", f"@head_or_tp_rank:{t}", 1).replace(
            "@pp_rank:0", f"@pp_rank:{p}", 1
        )
        for p in range(pps)
        for t in range(heads)
    ]
