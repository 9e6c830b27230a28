"""Instructions per call of the vLLM adapter's hot paths, counted by valgrind.

    python bench/instructions_vllm.py [--only NAME] [--against FILE] [--tolerance 0.0] [--save FILE]

The shape is DeepSeek-V4's at 131,072 tokens, over the stand-ins of `bench_vllm.py`. One process
under valgrind imports vLLM (minutes) and counts every case: n calls and 2n calls, the difference is
the cost of n. `--save` writes the counts as JSON, `--against` compares them with such a file and
ends with exit status 1 when one grew by more than the tolerance.
Without valgrind, its header, a C compiler or vLLM there is nothing to do: exit status 0 and a line
that says so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

SHAPE, TOKENS, CALLS = "dsv4", 131_072, 4
WARM_UP = 24  # calls: Python's interpreter specialises code that has run some times
HEADER = "/usr/include/valgrind/callgrind.h"
SWITCH = f"""
#include <{HEADER.removeprefix("/usr/include/")}>
void start(void) {{ CALLGRIND_START_INSTRUMENTATION; }}
void stop(void) {{ CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS; }}
"""


def lookup_new(strategy: str) -> Callable[[], Any]:
    """Lookups of requests that were never seen: no earlier hit tells where to ask."""
    import bench_vllm

    data = bench_vllm._modules()[1]
    worker = bench_vllm.lookup_worker(SHAPE, strategy, bench_vllm.ReadyStore(1))
    num_bytes = TOKENS // bench_vllm.SHAPES[SHAPE][0] * 32
    blobs = iter([random.Random(i).randbytes(num_bytes) for i in range(WARM_UP + 3 * CALLS)])
    return lambda: worker.lookup(TOKENS, data.BlobBlockHashes(memoryview(next(blobs)), 32))


def present(regions: int) -> Callable[[], Any]:
    """A save of which the store has everything."""
    import bench_vllm

    bench = bench_vllm.save(SHAPE, TOKENS, "exact", regions)
    bench.store.present = 1
    return bench.run


def operation(name: str, side: str = "exact") -> Callable[[], Any]:
    import bench_vllm

    return bench_vllm.OPERATIONS[name](SHAPE, TOKENS, side).run


CASES: dict[str, Callable[[], Callable[[], Any]]] = {
    "lookup exact": lambda: operation("lookup"),
    "lookup staged": lambda: operation("lookup", "staged"),
    "lookup staged, new request": lambda: lookup_new("staged"),
    "save, 1 region": lambda: operation("save1"),
    "save, 61 regions": lambda: operation("save61"),
    "save, all present": lambda: present(1),
    "load, 1 region": lambda: operation("load1"),
    "load, 61 regions": lambda: operation("load61"),
}


def work(names: list[str], switch: str) -> None:
    """The child's side: every case is set up, warmed up, then counted over n and 2n calls."""
    library = ctypes.CDLL(switch)
    for name in names:
        call = CASES[name]()
        for _ in range(WARM_UP):
            call()
        for times in (CALLS, 2 * CALLS):
            library.start()
            for _ in range(times):
                call()
            library.stop()


def count(names: list[str]) -> dict[str, int]:
    """Instructions of one call of every case."""
    with tempfile.TemporaryDirectory() as scratch:
        source, switch = Path(scratch, "switch.c"), Path(scratch, "switch.so")
        source.write_text(SWITCH)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", switch, source], check=True, timeout=60)
        done = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--instr-atstart=no",
                f"--callgrind-out-file={scratch}/counts",
                sys.executable,
                __file__,
                "--work",
                str(switch),
                *(part for name in names for part in ("--only", name)),
            ],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "PYTHONMALLOC": "pymalloc",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
            timeout=3000,
            check=False,
        )
        totals = []
        for path in sorted(Path(scratch).glob("counts.*"), key=lambda p: int(p.suffix[1:])):
            totals += [int(n) for n in re.findall(r"^totals: (\d+)", path.read_text(), re.M)]
    if done.returncode or len(totals) < 2 * len(names):
        raise SystemExit(f"valgrind failed: {done.stderr[-1500:]}")
    pairs = zip(totals[0::2], totals[1::2], strict=False)
    return {
        name: (twice - once) // CALLS for name, (once, twice) in zip(names, pairs, strict=False)
    }


def missing() -> str | None:
    """What the counting needs and this machine lacks."""
    for tool in ("valgrind", "gcc"):
        if shutil.which(tool) is None:
            return tool
    if not Path(HEADER).exists():
        return HEADER
    return None if importlib.util.find_spec("vllm") else "vLLM"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=CASES)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or list(CASES)
    if args.work:
        work(names, args.work)
        return 0
    if lacking := missing():
        print(f"{lacking} is not installed: nothing counted")
        return 0
    counts = count(names)
    if args.save:
        args.save.write_text(json.dumps(counts, indent=1) + "\n")
    before = json.loads(args.against.read_text()) if args.against else {}
    worse = 0
    for name, found in counts.items():
        note = ""
        if name in before:
            change = found / before[name] - 1
            grew = change > args.tolerance
            worse += grew
            note = f"{before[name]:>12,}  {change:+.1%}" + (", GREW" if grew else "")
        print(f"{name:28} {found:>12,}  {note}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
