#!/usr/bin/env python3
"""Serve prompts twice with the real vLLM engine on the CPU, through a real Mooncake store.

    PYTHON scripts/vllm_engine.py {full,hybrid} {stock,kvmask} [--lookup {staged,exact}]

PYTHON is the interpreter of scripts/vllm_env.sh. The models are tiny, with random weights: `full`
attends to everything, `hybrid` has five sliding-window layers to one full one. The first pass
stores the KV of every prompt; then the engine forgets its own prefix cache, and the second pass can
reuse the store's alone.

Prints one line of JSON: the tokens of both passes, the largest difference between their
log-probabilities (where foreign KV shows first), and the prompt tokens that the second pass did not
compute. `stock` is vLLM's MooncakeStoreConnector, `kvmask` is kvmask's; both must print the same
tokens and the same hits. Exit status 1 when the passes differ or nothing was reused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

from kvmask.mooncake import local_master

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaForCausalLM", {"num_hidden_layers": 2, "hidden_act": "silu"}),
    "hybrid": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
            "rope_local_base_freq": 10000.0,
        },
    ),
}
MAX_DRIFT = 1e-3  # of log-probabilities: reused KV may be computed in other batches


def write_model(folder: Path, kind: str) -> None:
    """A random checkpoint; weights this large make the output depend on every cached block."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, own = MODELS[kind]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**SHAPE, **own, initializer_range=0.2)
    model_class(config).to(torch.float32).save_pretrained(folder)


def write_store_config(path: Path, master: str) -> None:
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "protocol": "tcp",
                "device_name": "",
                "global_segment_size": "512MB",
                "local_buffer_size": "64MB",
            }
        )
    )


def make_engine(model: Path, connector: str, lookup: str) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if connector == "stock":
        transfer = KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both")
    else:
        transfer = KVTransferConfig(
            kv_connector="KVMaskStoreConnector",
            kv_connector_module_path="kvmask.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"lookup": lookup},
        )
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=8192,
        max_num_batched_tokens=1024,  # long prompts are computed, and saved, in several steps
        block_size=32,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )


def prompts() -> list[list[int]]:
    """Lengths above, at and below a block; two share a prefix."""
    tokens = [(i * 7919) % 1000 + 3 for i in range(4100)]
    return [tokens[:400], tokens, tokens[:2048] + tokens[100:900], tokens[:33], tokens[:31]]


def serve(engine: Any) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Tokens, their log-probabilities, and prompt tokens not computed, per prompt, one by one."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False, logprobs=0)
    tokens, logprobs, hits = [], [], []
    for prompt in prompts():
        done = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        out = done.outputs[0]
        tokens.append(list(out.token_ids))
        steps = zip(out.token_ids, out.logprobs, strict=True)
        logprobs.append([step[token].logprob for token, step in steps])
        hits.append(done.num_cached_tokens)
    return tokens, logprobs, hits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("connector", choices=["stock", "kvmask"])
    parser.add_argument("--lookup", choices=["staged", "exact"], default="staged")
    args = parser.parse_args()
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        GLOG_minloglevel="2",
        PYTHONHASHSEED="0",  # block hashes start from it
    )
    with tempfile.TemporaryDirectory() as folder, local_master() as master:
        write_model(Path(folder) / "model", args.model)
        write_store_config(Path(folder) / "mooncake.json", master.address)
        os.environ["MOONCAKE_CONFIG_PATH"] = str(Path(folder) / "mooncake.json")
        engine = make_engine(Path(folder) / "model", args.connector, args.lookup)
        first, first_logprobs, _ = serve(engine)
        time.sleep(2)  # saves run behind the answers
        if not engine.reset_prefix_cache():
            print("the engine kept its prefix cache", file=sys.stderr)
            return 1
        second, second_logprobs, hits = serve(engine)
        engine.llm_engine.engine_core.shutdown()  # before its master is gone
    pairs = zip(chain(*first_logprobs), chain(*second_logprobs), strict=False)
    drift = max(abs(a - b) for a, b in pairs)
    result = {
        "model": args.model,
        "connector": args.connector,
        "first": first,
        "second": second,
        "hits": hits,
        "same_tokens": first == second,
        "max_logprob_drift": round(drift, 6),
    }
    print(json.dumps(result))
    return 0 if first == second and drift < MAX_DRIFT and any(hits) else 1


if __name__ == "__main__":
    sys.exit(main())
