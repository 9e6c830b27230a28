#!/usr/bin/env python3
"""Serve prompts with the real vLLM engine and a real Mooncake store, with and without kvmask.

    python scripts/vllm_engine.py llama
    python scripts/vllm_engine.py gemma   # or hybrid, eagle

The runs ("sides") differ in their connector:

    stock      vLLM's own
    staged     kvmask's, with "lookup": "staged"
    exact      kvmask's, with "lookup": "exact"
    local      kvmask's, with "local_aware"
    installed  vLLM's own after `kvmask.vllm.install()`, which also replaces the block hasher

The models are tiny and have random weights. Each side serves the prompts, which stores their
blocks. Then it drops the engine's own prefix cache and serves the prompts again. The script checks
that:

- all sides give the same tokens in both passes, and the same hits in the second pass,
- the log-probabilities of both passes agree within 1e-3. Wrong blocks would show there first,
- `kvmask why` finds the hits of the second pass, with the contract that the connector wrote.

It needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("stock", "staged", "exact", "local", "installed")
MOST_DRIFT = 1e-3
PROJECT = Path(__file__).resolve().parent.parent

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
    },
    "gemma": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 6,
        "rms_norm_eps": 1e-6,
        "sliding_window": 128,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "hybrid": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",  # its linear attention needs bfloat16 on CPUs
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}
MODELS["eagle"] = MODELS["llama"]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "GLOG_minloglevel": "2",
}


# What the log says where vLLM's own functions act although kvmask's were asked for.
GAVE_UP = ("kvmask failed in", "vLLM goes on without kvmask", "kvmask leaves")


def gave_up(log: str) -> str:
    """The line of the log of an engine that says that kvmask does not act, or not all of it."""
    lines = (line for line in log.splitlines() if any(said in line for said in GAVE_UP))
    return next(lines, "")


def checkpoint(folder: Path, model: str) -> None:
    """Save a model with random weights, so large that the output depends on every cached block."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = COMMON | MODELS[model]
    cls = getattr(transformers, config["architectures"][0])
    cls(cls.config_class(**config, initializer_range=0.2)).save_pretrained(folder)
    if model == "eagle":  # the drafter: one layer on top of the embedding and the hidden state
        head = cls(cls.config_class(**config | {"num_hidden_layers": 1}, initializer_range=0.2))
        weights = {
            name.removeprefix("model."): weight
            for name, weight in head.state_dict().items()
            if "layers." in name and "input_layernorm" not in name
        }
        weights["fc.weight"] = torch.randn(config["hidden_size"], 2 * config["hidden_size"]) * 0.2
        head.save_pretrained(folder / "eagle", state_dict=weights)


def connector(side: str, contract: Path) -> dict[str, Any]:
    if side in ("stock", "installed"):
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    return {
        "kv_connector": "KVMaskStoreConnector",
        "kv_connector_module_path": "kvmask.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **({"local_aware": True} if side == "local" else {"lookup": side}),
            "contract": str(contract),
        },
    }


def serve(model: str, side: str) -> dict[str, Any]:
    """Run both passes of one side and return their results."""
    from kvmask import mooncake

    with tempfile.TemporaryDirectory() as scratch, mooncake.local_master() as master:
        folder = Path(scratch) / "model"
        checkpoint(folder, model)
        contract = Path(scratch) / "contract.json"
        settings = Path(scratch) / "mooncake.json"
        settings.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": master.address,
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": "512MB",
                    "local_buffer_size": "64MB",
                }
            )
        )
        os.environ["MOONCAKE_CONFIG_PATH"] = str(settings)
        if side == "installed":
            import kvmask.vllm

            kvmask.vllm.install()
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        engine = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=(COMMON | MODELS[model])["torch_dtype"],
            seed=0,
            max_model_len=8192,
            enforce_eager=True,
            block_size=32,
            max_num_batched_tokens=1024,
            kv_transfer_config=KVTransferConfig(**connector(side, contract)),
            enable_prefix_caching=True,  # for hybrid models it is off by default
            speculative_config={
                "method": "eagle",
                "model": str(folder / "eagle"),
                "num_speculative_tokens": 2,
            }
            if model == "eagle"
            else None,
        )
        long = [(i * 7919) % 1000 + 3 for i in range(4100)]
        prompts = [long[:400], long, long[:2048] + long[100:900], long[:33], long[:31]]
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, logprobs=0)

        def answers() -> tuple[list[list[int]], list[float], list[int]]:
            tokens, scores, hits = [], [], []
            for prompt in prompts:
                (out,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
                tokens.append(list(out.outputs[0].token_ids))
                scores += [
                    step[t].logprob
                    for t, step in zip(tokens[-1], out.outputs[0].logprobs, strict=True)
                ]
                hits.append(out.num_cached_tokens)
            return tokens, scores, hits

        first, before, _ = answers()
        time.sleep(2)  # the last saves may still be running
        if not engine.reset_prefix_cache():
            sys.exit("the engine did not drop its prefix cache")
        why = explained(contract, prompts, master.address) if contract.exists() else None
        second, after, hits = answers()
        drift = max(abs(a - b) for a, b in zip(before, after, strict=True))
    return {"first": first, "second": second, "hits": hits, "drift": drift, "why": why}


def explained(path: Path, prompts: list[list[int]], master: str) -> list[int]:
    """The hits that `kvmask why` finds for prompts with the contract that the engine wrote."""
    from kvmask import Contract
    from kvmask.cli.quiet import connect_to_ask
    from kvmask.why import diagnose

    contract, store = Contract.read(path), connect_to_ask(master=master)
    try:
        return [diagnose(contract.request(prompt), store).length for prompt in prompts]
    finally:
        store.close()


def said_by(command: list[str], env: dict[str, str], timeout: float, what: str) -> dict[str, Any]:
    """The JSON in the last line of a process.

    Args:
        command: What it runs.
        env: Its environment.
        timeout: Seconds.
        what: What it is called in an error.

    Raises:
        SystemExit: It failed, or kvmask gave up in it.
    """
    done = subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    why = gave_up(done.stdout + done.stderr)
    if done.returncode or not lines or why:
        sys.exit(f"{what} failed:\n{why or done.stdout[-1500:] + done.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def of_side(script: str, what: str, side: str, timeout: float) -> dict[str, Any]:
    """What a script says of one side, which it runs in a process of its own; see `said_by`.

    Args:
        script: The script.
        what: What it runs.
        side: The side.
        timeout: Seconds.
    """
    paths = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    command = [script, what, "--side", side]
    return said_by(command, os.environ | {"PYTHONPATH": paths}, timeout, f"{what} {side}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--side", choices=SIDES, help="one side alone, as JSON")
    args = parser.parse_args()
    if args.side:
        os.environ.update(SETTINGS)
        print(json.dumps(serve(args.model, args.side)))
        return 0
    from kvmask.cli.terminal import Progress

    seen = {}
    progress = Progress(args.model)
    for side in SIDES:
        progress.step(side)
        try:
            seen[side] = of_side(__file__, args.model, side, 1200)
        except SystemExit:
            progress.close()
            raise
        hits, drift = seen[side]["hits"], seen[side]["drift"]
        progress.say(f"{args.model} {side} hits {hits} drift {drift}")
    progress.close()
    stock = seen["stock"]
    good = any(stock["hits"])
    for side, result in seen.items():
        # What the store has; the engine's own cache may reach further into a prompt.
        wrote = side not in ("stock", "installed")
        good = good and (result["why"] == result["hits"] if wrote else result["why"] is None)
        good = good and result["first"] == result["second"] == stock["first"]
        good = good and result["hits"] == stock["hits"] and result["drift"] < MOST_DRIFT
    print("the sides agree" if good else "the sides differ")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
