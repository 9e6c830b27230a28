"""Time to first token of a whole vLLM engine whose prompts hit in the store: stock beside kvmask.

    python bench/ttft.py [--model gemma] [--tokens 32768] [--prompts 24]

Two engines with the CPU build of vLLM run beside each other, one with vLLM's connector and one with
kvmask's. They share one Mooncake store on loopback, and a third process holds its memory. The model
is tiny and has random weights, so that a long prefix can be computed on a CPU at all.

The first prompt fills the store. Each further prompt has the same long prefix and a short end of
its own, which is never stored. Both engines serve it, one after the other and with turns in who
begins. Before that they drop their own prefix caches, so that the prefix comes from the store. The
time is from the call of `generate` to its first and only token: hashes, lookup, load, and the
computation of the end.

The table also has the time of a prompt that is found nowhere. The exit status is 1 if the engines
give different tokens or hits, or if a prefix was not found.

It needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent / "scripts"),
]

import vllm_engine

from kvmask import mooncake

SIDES = ("stock", "kvmask")
BLOCK = 32  # tokens of a block
END = 15  # tokens of a prompt's own. They fill no block, so they are never stored
DEADLINE = 10_000
SHORT = [3, 4, 5]  # a prompt without a full block
SEGMENT_BYTES = 2 << 30


def prompt(tokens: int, number: int) -> list[int]:
    """A prefix that all prompts share, and an end of this one's own."""
    shared = [(i * 7919) % 1000 + 3 for i in range(tokens)]
    return shared + [(i * 104729 + number * 7907) % 1000 + 3 for i in range(END)]


def unknown(tokens: int) -> list[int]:
    """A prompt of the same length that is found nowhere."""
    return [(i * 6101) % 1000 + 3 for i in range(tokens + END)]


def make_engine(args: argparse.Namespace) -> Any:
    """Make the engine of one side."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    side = "stock" if args.side == "stock" else "staged"
    connector = vllm_engine.connector(side, Path("unused"))
    if side == "staged":
        # On a busy machine a lookup could miss its deadline. Its request would then be computed.
        connector["kv_connector_extra_config"] = {"lookup_deadline_ms": DEADLINE}
    return LLM(
        model=args.folder,
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=args.tokens + 1024,
        enforce_eager=True,
        block_size=BLOCK,
        max_num_batched_tokens=1024,
        kv_transfer_config=KVTransferConfig(**connector),
        enable_prefix_caching=True,
    )


def serve(args: argparse.Namespace) -> None:
    """Serve one prompt per line of stdin, and answer with a line of JSON."""
    from vllm import SamplingParams

    engine = make_engine(args)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        number = int(line)
        tokens = unknown(args.tokens) if number < 0 else prompt(args.tokens, number)
        while not engine.reset_prefix_cache():
            # The last save still holds its blocks. An engine sees the end of it when it serves.
            time.sleep(0.1)
            engine.generate([{"prompt_token_ids": SHORT}], sampling, use_tqdm=False)
        start = time.perf_counter()
        (out,) = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        row = {
            "seconds": seconds,
            "token": out.outputs[0].token_ids[0],
            "hit": out.num_cached_tokens,
        }
        print(json.dumps(row), flush=True)


def start(
    args: argparse.Namespace, side: str, folder: Path, settings: Path
) -> subprocess.Popen[str]:
    """Start the engine of one side in a process of its own."""
    return subprocess.Popen(
        [
            *(sys.executable, __file__, "--side", side, "--folder", str(folder)),
            *("--model", args.model, "--tokens", str(args.tokens)),
        ],
        env=os.environ | vllm_engine.SETTINGS | {"MOONCAKE_CONFIG_PATH": str(settings)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
    """The next line of an engine's output that is ours."""
    assert process.stdout is not None
    for line in process.stdout:
        if wanted(line):
            return line
    sys.exit("an engine ended early; its messages are above")


def ask(process: subprocess.Popen[str], number: int) -> dict[str, Any]:
    """Let an engine serve a prompt."""
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    row: dict[str, Any] = json.loads(line_of(process, lambda line: line.startswith("{")))
    return row


def measure(args: argparse.Namespace, engines: dict[str, subprocess.Popen[str]]) -> int:
    """Serve all prompts, print the table, return the exit status."""
    missed = ask(engines["stock"], -1)["seconds"]
    ask(engines["stock"], 0)
    time.sleep(3)  # the save of the prefix may still be running
    for side in SIDES:
        ask(engines[side], 1)  # an engine's first hit sets things up
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(2, args.prompts + 2):
        for side in SIDES if number % 2 else reversed(SIDES):
            rows[side].append(ask(engines[side], number))
            time.sleep(0.5)  # nobody's save runs in another's time
    wrong = 0
    for mine, theirs in zip(rows["stock"], rows["kvmask"], strict=True):
        same = mine["token"] == theirs["token"] and mine["hit"] == theirs["hit"]
        wrong += not same or not mine["hit"]
        print(f"{mine}  {theirs}", file=sys.stderr)
    hits = sorted({row["hit"] for side in SIDES for row in rows[side]})
    print(
        f"{args.model}, {args.tokens + END} tokens, {args.prompts} prompts, hits of {hits}; "
        f"{wrong} prompts with differing tokens or hits, or without a hit"
    )
    print(f"found nowhere    {missed * 1e3:9.1f} ms (once)")
    for side in SIDES:
        times = sorted(row["seconds"] * 1e3 for row in rows[side])
        print(
            f"{side:<16} {statistics.median(times):9.1f} ms median, "
            f"fastest {times[0]:.1f}, slowest {times[-1]:.1f}"
        )
    ratios = [
        mine["seconds"] / theirs["seconds"]
        for mine, theirs in zip(rows["stock"], rows["kvmask"], strict=True)
    ]
    print(f"stock / kvmask   {statistics.median(ratios):9.2f}x, the median of the prompts' ratios")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("gemma", "llama"), default="gemma")
    parser.add_argument("--tokens", type=int, default=32_768, help="length of the prefix")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args)
        return 0
    vllm_engine.COMMON["max_position_embeddings"] = args.tokens + 1024
    with tempfile.TemporaryDirectory() as scratch, mooncake.local_master() as master:
        folder, settings = Path(scratch) / "model", Path(scratch) / "mooncake.json"
        vllm_engine.checkpoint(folder, args.model)
        settings.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": master.address,
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": "0",
                    "local_buffer_size": "64MB",
                }
            )
        )
        store = mooncake.connect(master, segment_bytes=SEGMENT_BYTES)
        engines = {}
        try:
            for side in SIDES:
                engines[side] = start(args, side, folder, settings)
                line_of(engines[side], lambda line: line == "ready\n")
            return measure(args, engines)
        finally:
            for process in engines.values():
                process.kill()
                process.wait()
            store.close()


if __name__ == "__main__":
    sys.exit(main())
