#!/usr/bin/env python3
"""How long lookups hold a whole vLLM engine whose store's master is dead.

    python scripts/vllm_outage.py windows   # a model of sliding windows alone
    python scripts/vllm_outage.py full      # full attention, and a cache of few blocks

Five prompts, one after another, with vLLM's connector and with kvmask's. The models are tiny and
have random weights. It needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_deployed import settings

SIDES = ("stock", "staged")
KINDS: dict[str, dict[str, Any]] = {
    "windows": {"model": "windows", "tokens": 200, "blocks": None},
    "full": {"model": "llama", "tokens": 1000, "blocks": 64},
}
vllm_engine.MODELS["windows"] = vllm_engine.MODELS["gemma"] | {
    "layer_types": ["sliding_attention"] * 6
}


def serve(kind: str, side: str) -> dict[str, Any]:
    """Seconds that the prompts took, and that the scheduler spent in lookups."""
    from kvmask import mooncake

    model, tokens, blocks = KINDS[kind].values()
    with tempfile.TemporaryDirectory() as scratch, mooncake.local_master() as master:
        folder = Path(scratch)
        vllm_engine.checkpoint(folder / "model", model)
        os.environ["MOONCAKE_CONFIG_PATH"] = str(settings(folder, master.address, "512MB"))
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        connector = vllm_engine.connector(side, folder / "contract.json")
        engine = LLM(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=2016,
            enforce_eager=True,
            block_size=32,
            num_gpu_blocks_override=blocks,
            max_num_batched_tokens=1024,
            kv_transfer_config=KVTransferConfig(**connector),
            enable_prefix_caching=True,
        )
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)

        def answer(salt: int, length: int) -> None:
            prompt = [(i * 7919 + 31 * salt) % 1000 + 3 + salt for i in range(length)]
            engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)

        answer(6, 40)
        master.process.kill()
        master.process.wait()
        asked = engine.llm_engine.engine_core.engine_core.scheduler.connector
        own, held = asked.get_num_new_matched_tokens, []

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            try:
                return own(*args, **kwargs)
            finally:
                held.append(time.monotonic() - begun)

        asked.get_num_new_matched_tokens = timed
        begun = time.monotonic()
        for salt in range(5):
            answer(salt, tokens)
        took = time.monotonic() - begun
        print(json.dumps({"took": took, "held": sum(held), "lookups": len(held)}), flush=True)
        os._exit(0)  # the engine's end would wait for the dead master, too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--side", choices=SIDES, help="one side alone, as JSON")
    args = parser.parse_args()
    if args.side:
        os.environ.update(vllm_engine.SETTINGS)
        serve(args.kind, args.side)
    for side in SIDES:
        found = vllm_engine.of_side(__file__, args.kind, side, 600)
        print(
            f"{args.kind} {side}: {found['lookups']} lookups held the engine for "
            f"{found['held']:.2f} s of {found['took']:.2f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
