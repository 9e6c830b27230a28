#!/usr/bin/env python3
"""Run vLLM's own tests of its Mooncake store connector with kvmask in place.

    python scripts/vllm_suite.py 0.32.0            # kvmask under the stock connector
    python scripts/vllm_suite.py 0.32.0 --stock    # vLLM as it is

It needs a Python with the CPU build of vLLM 0.32.0, pytest and kvmask. `make test-vllm` creates
one. The tests come from the release's source archive, from the package index that pip is configured
for. For another release, its Python sources are put before the installed build on the path. The
exit status is 0 if no test failed and as many tests passed as with stock.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_source import source

from kvmask.versions import VLLM_INSTALLED

# Tests that pass with stock vLLM, per file.
PASSING = {
    "0.24.0": {"coordinator": 26, "worker": 61, "hma_e2e": 3},
    "0.28.0": {"coordinator": 34, "worker": 111, "hma_e2e": 6},
    "0.32.0": {"coordinator": 38, "worker": 203, "layout": 9, "hma_e2e": 9},
    "0.33.0": {"coordinator": 40, "worker": 203, "layout": 9, "hma_e2e": 9},
}
PROJECT = Path(__file__).resolve().parent.parent
IN_PLACE = "import kvmask.vllm\n\nkvmask.vllm.install(lookup='exact')\n"


def run_file(name: str, unpacked: Path, work: Path, args: argparse.Namespace) -> tuple[int, int]:
    """Run the tests of one file. Return the number of passed and of failed tests."""
    overlay = [] if args.version == VLLM_INSTALLED else [str(unpacked)]
    paths = [str(work), str(PROJECT), *overlay]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    if not args.stock:
        command += ["-p", "kvmask_in_place"]
    if args.expression:
        command += ["-k", args.expression]
    command.append(f"tests/v1/kv_connector/unit/test_mooncake_store_{name}.py")
    done = subprocess.run(
        command,
        cwd=work,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    # Errors are not counted. In some releases the clean-up after each test raises if there is no
    # accelerator, also with stock. A test whose set-up fails is missing among the passed tests.
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed)", last)}
    failed = found.get("failed", 0)
    if failed or not found:
        print((done.stdout + done.stderr)[-3000:])
    return found.get("passed", 0), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", choices=sorted(PASSING))
    parser.add_argument("--stock", action="store_true", help="without kvmask")
    parser.add_argument("--sources", type=Path, default=PROJECT / "build" / "vllm-src")
    parser.add_argument("-k", dest="expression")
    args = parser.parse_args()
    unpacked = source(args.version, args.sources)
    total = bad = missing = 0
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "tests").symlink_to(unpacked / "tests")
        (work / "kvmask_in_place.py").write_text(IN_PLACE)
        for name, expected in PASSING[args.version].items():
            passed, failed = run_file(name, unpacked, work, args)
            total, bad = total + passed, bad + failed
            if not args.expression:
                missing += max(0, expected - passed)
            print(f"{args.version} {name}: {passed} passed, {failed} failed", flush=True)
    print(f"{total} passed, {bad} failed")
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
