#!/usr/bin/env python3
"""Run the real vLLM engine in the ways that it is deployed, with and without kvmask.

    python scripts/vllm_modes.py            # all modes
    python scripts/vllm_modes.py one outage

The modes:

    one      one process: salted caches, a small cache with preemptions, a request aborted while it
             loads
    apart    the engine core in a process of its own: the connector, the plugin, and the connector
             as a part of MultiConnector, with statistics
    share    engines one after another on one store: what stock wrote as a producer, stock and
             kvmask read as consumers, and the reverse
    workers  tensor parallelism over two worker processes
    outage   the master is killed between a hit and its load, and comes back; with both values of
             `kv_load_failure_policy`

Every engine has the same tiny model with random weights. In each mode all engines must give the
same tokens, and the hits of stock. It needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_engine import PROJECT, SETTINGS, checkpoint

Result = dict[str, Any]

LONG = [(i * 7919) % 1000 + 3 for i in range(1400)]
PROMPTS = [LONG[:400], LONG[:1100], LONG[:640] + LONG[100:500], LONG[:33], LONG[:31]]
# So few blocks that four requests of `CROWD` do not fit.
BLOCKS, BLOCK = 64, 32
CROWD = [LONG[i * 50 : i * 50 + 450] for i in range(4)]


def connector(kind: str, role: str, extra: dict[str, Any]) -> dict[str, Any]:
    """One side's entry of the configuration."""
    stock = {"kv_connector": "MooncakeStoreConnector", "kv_role": role}
    if kind in ("stock", "plugin"):
        return stock
    own = {
        "kv_connector": "KVMaskStoreConnector",
        "kv_connector_module_path": "kvmask.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"lookup": "exact" if kind == "exact" else "staged"},
    }
    if kind != "multi":
        return own | extra
    parts = {"connectors": [own]}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": parts,
        **extra,
    }


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

        checkpoint(folder / "model", "llama")
        extra = {}
        if "policy" in spec:
            extra["kv_load_failure_policy"] = spec["policy"]
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
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=512,
            tensor_parallel_size=spec.get("workers", 1),
            distributed_executor_backend="mp" if spec.get("workers", 1) > 1 else None,
            kv_transfer_config=KVTransferConfig(
                **connector(spec["kind"], spec.get("role", "kv_both"), extra)
            ),
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

    def drop(self) -> None:
        """Drop the engine's own prefix cache, once the saves are done."""
        deadline = time.monotonic() + 60
        time.sleep(2)
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                sys.exit("the engine did not drop its prefix cache")
            time.sleep(0.5)

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


STEPS: dict[str, Callable[[Engine], Result]] = {
    "passes": passes,
    "salted": salted,
    "crowded": crowded,
    "aborted": aborted,
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
    (out,) = engine.llm.generate(
        [{"prompt_token_ids": PROMPTS[1]}], engine.sampling, use_tqdm=False
    )
    asked.get_num_new_matched_tokens = own
    struck, reason = list(out.outputs[0].token_ids), out.outputs[0].finish_reason
    while_gone, _ = engine.serve()
    again = subprocess.Popen(
        master.process.args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
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


def run(spec: dict[str, Any], timeout: float = 600) -> Result:
    """One engine in a process of its own."""
    env = os.environ | SETTINGS
    env["PYTHONPATH"] = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(spec.get("apart", False)))
    if spec["kind"] == "plugin":
        env["KVMASK_VLLM"] = "1"
    if "workers" in spec:  # several workers share the cores of one NUMA node
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(spec)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.exit(f"{spec} failed:\n{done.stdout[-1500:]}\n{done.stderr[-6000:]}")
    result: Result = json.loads(lines[-1])
    shown = {k: v for k, v in result.items() if "hits" in k or k in ("preempted", "loading")}
    print(f"{spec['kind']} {spec['steps']} {time.monotonic() - begun:.0f} s {shown}", flush=True)
    return result


def plain(result: Result) -> Result:
    """What must be the same with and without kvmask."""
    return {k: v for k, v in result.items() if k != "counters"}


def counted(result: Result) -> bool:
    """Whether kvmask's counters say that it found the hits."""
    return bool(result["counters"].get("vllm:kvmask_hit_tokens", 0))


def one() -> bool:
    """See the module."""
    steps = ["passes", "salted", "aborted", "crowded"]
    stock, own = run({"kind": "stock", "steps": steps}), run({"kind": "kvmask", "steps": steps})
    took_place = stock["preempted"] and stock["loading"] and any(stock["hits"])
    right = stock["passes same"] and stock["salted same"] and not any(stock["other salt"])
    return took_place and right and plain(stock) == plain(own) and counted(own)


def apart() -> bool:
    """See the module."""
    seen = {
        kind: run({"kind": kind, "steps": ["passes"], "apart": True})
        for kind in ("stock", "kvmask", "plugin", "multi")
    }
    stock = seen["stock"]
    same = all(plain(result) == plain(stock) for result in seen.values())
    return same and any(stock["hits"]) and all(counted(r) for k, r in seen.items() if k != "stock")


@contextlib.contextmanager
def store() -> Iterator[str]:
    """A master, and a client that holds the store's memory while engines come and go."""
    from kvmask import mooncake

    with mooncake.local_master() as master:
        client = mooncake.connect(
            mooncake.StoreConfig.from_mapping(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": master.address,
                    "protocol": "tcp",
                    "global_segment_size": "512MB",
                    "local_buffer_size": "16MB",
                }
            )
        )
        try:
            yield master.address
        finally:
            client.close()


def share() -> bool:
    """See the module."""
    seen = []
    for writer, readers in (("stock", ("stock", "kvmask")), ("kvmask", ("stock", "exact"))):
        with store() as master:
            run({"kind": writer, "role": "kv_producer", "steps": ["write"], "master": master})
            for reader in readers:
                spec = {"kind": reader, "role": "kv_consumer", "steps": ["read"]}
                seen.append(run(spec | {"master": master}))
    return any(seen[0]["hits"]) and all(result == seen[0] for result in seen)


def workers() -> bool:
    """See the module."""
    spec = {"steps": ["passes"], "apart": True, "workers": 2}
    stock, own = run(spec | {"kind": "stock"}), run(spec | {"kind": "kvmask"})
    return plain(stock) == plain(own) and any(stock["hits"]) and counted(own)


def outages() -> bool:
    """See the module."""
    good = True
    for policy in ("recompute", "fail"):
        result = run({"kind": "kvmask", "steps": ["outage"], "policy": policy}, 900)
        ended = result["right"] if policy == "recompute" else result["struck"] == "error"
        good = good and ended and bool(result["killed"]) and result["same"] and any(result["hits"])
    return good


MODES = {"one": one, "apart": apart, "share": share, "workers": workers, "outage": outages}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    # Argparse compares the empty list, too, when there are no modes.
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], help="all by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(json.loads(args.child))))
        return 0
    bad = []
    for mode in args.modes or MODES:
        good = MODES[mode]()
        print(f"{mode}: {'the engines agree' if good else 'the engines differ'}", flush=True)
        if not good:
            bad.append(mode)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
