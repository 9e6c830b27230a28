"""Instructions per call, counted by valgrind. A busy machine does not change these figures.

    python bench/instructions.py [--update] [--tolerance 0.05] [--only NAME]

Each case runs in two processes. One makes n calls, the other 2n. The difference is the cost of n
calls without start-up. The counts are compared with `instructions.json`, which holds the counts of
one toolchain. If a count grew by more than the tolerance, the exit status is 1. With another
Python, compiler or architecture the counts are only printed.
Without valgrind, nothing is counted: the script prints a line and ends with status 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from shapes import SHAPES, Always, block_hashes, digests

from kvmask import Bitset, Hit, KVTransfer, LookupPlan, PlanTools, VllmKeys

BASELINE = Path(__file__).with_name("instructions.json")
DSV4 = SHAPES["dsv4"]
TOKENS = 131_072


def mask() -> tuple[Callable[[], object], int, int]:
    coord = DSV4.coordinator()
    return lambda: coord.store_mask(TOKENS), sum(DSV4.blocks(TOKENS)), 200


def search() -> tuple[Callable[[], object], int, int]:
    coord = DSV4.coordinator()
    present = [Bitset.ones(n) for n in DSV4.blocks(TOKENS)]
    return lambda: coord.find_hit(present, TOKENS), sum(DSV4.blocks(TOKENS)), 200


def search_empty() -> tuple[Callable[[], object], int, int]:
    shape = SHAPES["gemma"]
    coord = shape.coordinator()
    present = [Bitset.ones(n) for n in shape.blocks(TOKENS)]
    present[1:] = [Bitset.zeros(n) for n in shape.blocks(TOKENS)[1:]]
    return lambda: coord.find_hit(present, TOKENS), sum(shape.blocks(TOKENS)), 200


def keys() -> tuple[Callable[[], object], int, int]:
    hashes = block_hashes(digests(SHAPES["full16"], TOKENS))
    schema = VllmKeys("DeepSeek-V4")
    return lambda: schema.keys(hashes), len(hashes), 5


def plan(strategy: str) -> tuple[Callable[[], object], int, int]:
    # The plan alone: an engine's counters are part of the case of a transfer.
    contract, tools = DSV4.contract(), PlanTools(stats=False)
    hashes = block_hashes(digests(DSV4, TOKENS))
    store = Always(1)

    def run() -> LookupPlan:
        lookup = LookupPlan(contract, hashes, TOKENS, strategy=strategy, tools=tools)
        while (call := lookup.next_call()) is not None:
            lookup.feed(call.run(store))
        return lookup

    if run().result.length != TOKENS - DSV4.alignment:
        raise SystemExit("the lookup found a wrong hit")
    return run, run().asked, 5


def transfer() -> tuple[Callable[[], object], int, int]:
    contract = DSV4.contract()
    hashes = block_hashes(digests(DSV4, TOKENS))
    kv = KVTransfer(Always(1), contract, hints=None)

    def run() -> Hit:
        return kv.lookup(contract.request(hashes=hashes, num_tokens=TOKENS))

    if run().length != TOKENS - DSV4.alignment:
        raise SystemExit("the lookup found a wrong hit")
    return run, run().asked, 5


# Per name a function that returns: what to call, the units of one call, and the number of calls.
CASES: dict[str, Callable[[], tuple[Callable[[], object], int, int]]] = {
    "mask, per block": mask,
    "search all present, per block": search,
    "search full present and windows empty, per block": search_empty,
    "keys, per key": keys,
    "lookup exact, per key": lambda: plan("exact"),
    "lookup staged, per key": lambda: plan("staged"),
    "lookup staged by a transfer, per key": transfer,
}


def work(name: str, times: int) -> int:
    """Set up a case and make its calls, in the child process. Return the units of one round."""
    call, units, n = CASES[name]()
    call()
    for _ in range(n * times):
        call()
    return units * n


def count(name: str, times: int) -> tuple[int, int]:
    """Return the instructions of a child process, and the units of one round of calls."""
    done = subprocess.run(
        [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            sys.executable,
            __file__,
            "--work",
            name,
            "--times",
            str(times),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "pymalloc"},
        timeout=300,
        check=False,
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        raise SystemExit(f"valgrind failed on {name!r}: {done.stderr[-800:]}")
    return int(found[1]), int(done.stdout)


def toolchain() -> str:
    """Return the versions and the architecture that the counts depend on."""
    try:
        gcc = subprocess.run(
            ["gcc", "-dumpfullversion"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        gcc = "unknown"
    return f"{platform.machine()}, Python {platform.python_version()}, gcc {gcc}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="write the counts as baseline")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(work(args.work, args.times))
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: nothing counted")
        return 0
    kept = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    same = kept.get("toolchain") == toolchain()
    if not same and not args.update:
        print(f"not compared: the baseline is of {kept.get('toolchain')}, this is {toolchain()}")
    counts, worse = {}, 0
    for name in [args.only] if args.only else CASES:
        once, units = count(name, 1)
        twice, _ = count(name, 2)
        counts[name] = round((twice - once) / units, 2)
        note = ""
        before = kept.get("counts", {}).get(name)
        if before and same:
            change = counts[name] / before - 1
            grew = change > args.tolerance
            worse += grew
            note = f"{change:+.1%}" + (", GREW" if grew else "")
        print(f"{name:50} {counts[name]:>10.2f}  {note}", flush=True)
    if args.update:
        both = {**(kept.get("counts", {}) if same else {}), **counts}
        BASELINE.write_text(json.dumps({"toolchain": toolchain(), "counts": both}, indent=1) + "\n")
    return 1 if worse and not args.update else 0


if __name__ == "__main__":
    sys.exit(main())
