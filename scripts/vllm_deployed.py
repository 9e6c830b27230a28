"""One engine of vLLM's in one of the ways that scripts/vllm_modes.py runs them.

It runs in a process of its own, with the kvmask that is first on its path. So nothing of kvmask is
used here but `kvmask.mooncake.local_master`, and that only where the engine has a master to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_engine import checkpoint

Result = dict[str, Any]

LONG = [(i * 7919) % 1000 + 3 for i in range(1400)]
PROMPTS = [LONG[:400], LONG[:1100], LONG[:640] + LONG[100:500], LONG[:33], LONG[:31]]
# So few blocks that four requests of `CROWD` do not fit.
BLOCKS, BLOCK = 64, 32
CROWD = [LONG[i * 50 : i * 50 + 450] for i in range(4)]
# What engines that follow one another bring: each serves what those before it have brought, too.
TURNS = [PROMPTS[:1], PROMPTS[1:3], [LONG[300:1000], LONG[:1100] + LONG[:200]]]


def connector(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The engine's entry of the configuration."""
    kind, role = spec["kind"], spec.get("role", "kv_both")
    one: dict[str, Any] = {"kv_connector": "MooncakeStoreConnector", "kv_role": role}
    if kind not in ("stock", "plugin"):
        one |= {
            "kv_connector": "KVMaskStoreConnector",
            "kv_connector_module_path": "kvmask.vllm",
            "kv_connector_extra_config": {"lookup": "exact" if kind == "exact" else "staged"},
        }
    outer = {"kv_load_failure_policy": spec["policy"]} if "policy" in spec else {}
    if kind != "multi" and not spec.get("parts"):
        return one | outer
    parts = [one]
    if spec.get("parts"):
        shared = {"shared_storage_path": str(folder / "shared")}
        parts.append(
            {
                "kv_connector": "ExampleConnector",
                "kv_role": role,
                "kv_connector_extra_config": shared,
            }
        )
    extra = {"connectors": parts}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    } | outer


def settings(folder: Path, master: str, segment: str) -> Path:
    """Write the file that names the store."""
    path = folder / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "protocol": "tcp",
                "device_name": "",
                "mode": "embedded" if segment != "0" else "standalone-store",
                "global_segment_size": segment,
                "local_buffer_size": "64MB",
            }
        )
    )
    return path


class Engine:
    """One engine of vLLM's.

    Args:
        spec: What the parent process chose.
        folder: For its files.
    """

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        checkpoint(folder / "model", spec.get("model", "llama"))
        blocks = spec.get("blocks", BLOCKS)
        self.sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
        self.longer = SamplingParams(
            max_tokens=160, temperature=0, detokenize=False, ignore_eos=True
        )
        self.llm = LLM(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=(BLOCKS - 1) * BLOCK,  # one block stays empty
            enforce_eager=True,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            # The other part of `parts` saves what the first step computes, and no more.
            max_num_batched_tokens=2048 if spec.get("parts") else 512,
            tensor_parallel_size=spec.get("workers", 1),
            distributed_executor_backend="mp" if spec.get("workers", 1) > 1 else None,
            kv_transfer_config=KVTransferConfig(**connector(spec, folder)),
            enable_prefix_caching=True,
            disable_log_stats=False,
        )

    @property
    def scheduler(self) -> Any:
        """The scheduler, of an engine in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def serve(
        self, prompts: list[list[int]] = PROMPTS, salt: str | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Tokens and hits of prompts, one after another."""
        tokens, hits = [], []
        for prompt in prompts:
            asked: Any = {"prompt_token_ids": prompt}
            if salt is not None:
                asked["cache_salt"] = salt
            (out,) = self.llm.generate([asked], self.sampling, use_tqdm=False)
            tokens.append(list(out.outputs[0].token_ids))
            hits.append(out.num_cached_tokens)
        return tokens, hits

    def close(self) -> None:
        """Shut the engine down, while the master still answers it."""
        self.llm.llm_engine.engine_core.shutdown()

    def drop(self, *, stores: bool = False) -> None:
        """Drop the engine's own prefix cache, once the saves are done.

        Args:
            stores: Reset the connector, too: the store is emptied.
        """
        deadline = time.monotonic() + 60
        time.sleep(2)
        while not self.llm.reset_prefix_cache(reset_connector=stores):
            if time.monotonic() > deadline:
                sys.exit("the engine did not drop its prefix cache")
            time.sleep(0.5)
            # An engine hears only in a step that a save is over, and that its blocks are free.
            self.llm.generate([{"prompt_token_ids": [3]}], self.sampling, use_tqdm=False)

    def counters(self) -> dict[str, float]:
        """kvmask's counters in vLLM's metrics."""
        return {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvmask")
        }


def passes(engine: Engine) -> Result:
    """Serve twice, the second time from the store."""
    first, _ = engine.serve()
    engine.drop()
    second, hits = engine.serve()
    return {"tokens": second, "hits": hits, "same": first == second}


def salted(engine: Engine) -> Result:
    """A salt's blocks hit under that salt alone."""
    first, _ = engine.serve(PROMPTS[:2], "one")
    engine.drop()
    second, hits = engine.serve(PROMPTS[:2], "one")
    engine.drop()
    third, none = engine.serve(PROMPTS[:2], "two")
    return {"salted": second, "salted hits": hits, "other salt": none[:1], "same": first == third}


def crowded(engine: Engine) -> Result:
    """More requests at once than the cache holds."""
    scheduler, preempted = engine.scheduler, []
    own = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return own(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    outs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in CROWD], engine.longer, use_tqdm=False
    )
    scheduler._preempt_request = own
    return {
        "crowd": [list(out.outputs[0].token_ids) for out in outs],
        "preempted": bool(preempted),
    }


def aborted(engine: Engine) -> Result:
    """A request that ends while its blocks are loaded; the next one gets whole blocks."""
    from vllm.v1.request import RequestStatus

    engine.drop()
    llm, scheduler = engine.llm.llm_engine, engine.scheduler
    llm.add_request("gone", {"prompt_token_ids": PROMPTS[1]}, engine.sampling)
    llm.step()
    loading = any(
        r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in scheduler.requests.values()
    )
    llm.abort_request(["gone"])
    tokens, hits = engine.serve(PROMPTS[1:3])
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return {
        "after abort": tokens,
        "hits after abort": hits,
        "loading": loading,
        "free blocks": free,
    }


def parts(engine: Engine) -> Result:
    """Three passes: computed, from the store, and from the other part once the store is empty."""
    prompts = PROMPTS[:3]
    first, _ = engine.serve(prompts)
    engine.drop()
    second, hits = engine.serve(prompts)
    engine.drop(stores=True)
    third, others = engine.serve(prompts)
    return {
        "tokens": first,
        "hits": hits,
        "hits of the other part": others,
        "same": first == second == third,
    }


def turns(engine: Engine, turn: int) -> Result:
    """What engines before this one have brought, then something new."""
    before = [prompt for brought in TURNS[:turn] for prompt in brought]
    tokens, hits = engine.serve(before)
    new, _ = engine.serve(TURNS[turn])
    time.sleep(3)  # the last saves
    return {"tokens": tokens + new, "hits": hits}


STEPS: dict[str, Callable[[Engine], Result]] = {
    "passes": passes,
    "salted": salted,
    "crowded": crowded,
    "aborted": aborted,
    "parts": parts,
}


def outage(engine: Engine, master: Any) -> Result:
    """The master is killed after a hit, before its load; later it is back."""
    first, _ = engine.serve()
    engine.drop()
    asked, killed = engine.scheduler.connector, []
    own = asked.get_num_new_matched_tokens

    def kill_after_hit(request: Any, computed: int) -> Any:
        found = own(request, computed)
        if found[0] and not killed:
            killed.append(found[0])
            master.process.kill()
            master.process.wait()
        return found

    asked.get_num_new_matched_tokens = kill_after_hit
    begun = time.monotonic()
    (out,) = engine.llm.generate(
        [{"prompt_token_ids": PROMPTS[1]}], engine.sampling, use_tqdm=False
    )
    asked.get_num_new_matched_tokens = own
    struck, reason = list(out.outputs[0].token_ids), out.outputs[0].finish_reason
    times = {"struck": time.monotonic() - begun}
    begun = time.monotonic()
    while_gone, _ = engine.serve()
    times["gone"] = time.monotonic() - begun
    again = subprocess.Popen(
        master.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        begun = time.monotonic()
        hits: list[int] = []
        after: list[list[int]] = []
        for _ in range(6):  # the client of the store connects again in its own time
            time.sleep(10)
            engine.drop()
            engine.serve()
            engine.drop()
            after, hits = engine.serve()
            if any(hits):
                break
        times["back"] = time.monotonic() - begun
    finally:
        again.kill()
        again.wait()
    return {
        "killed": killed,
        "struck": struck if reason != "error" else "error",
        "right": struck == first[1],
        "tokens": while_gone,
        "same": first == while_gone == after,
        "hits": hits,
        "seconds": {name: round(seconds, 1) for name, seconds in times.items()},
    }


def child(spec: dict[str, Any]) -> Result:
    """What one engine does."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder, master = Path(scratch), spec.get("master")
        own = None
        if master is None:
            from kvmask import mooncake

            own = stack.enter_context(mooncake.local_master())
            master = own.address
        segment = "512MB" if own is not None else "0"
        os.environ["MOONCAKE_CONFIG_PATH"] = str(settings(folder, master, segment))
        engine = Engine(spec, folder)
        stack.callback(engine.close)
        if spec["steps"] == ["outage"]:
            return outage(engine, own) | {"counters": engine.counters()}
        if spec["steps"] == ["turns"]:
            made = turns(engine, spec["turn"])
            if spec["kind"] != "stock":
                import kvmask

                made["version"] = kvmask.__version__
            return made
        if spec["steps"] == ["write"]:
            engine.serve()
            time.sleep(3)  # the last saves
            return {}
        if spec["steps"] == ["read"]:
            tokens, hits = engine.serve()
            return {"tokens": tokens, "hits": hits}
        result: Result = {}
        for step in spec["steps"]:
            made = STEPS[step](engine)
            result |= made | {f"{step} same": made.pop("same", True)}
        result.pop("same", None)
        return result | {"counters": engine.counters()}


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))
