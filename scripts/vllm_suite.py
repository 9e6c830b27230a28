#!/usr/bin/env python3
"""Run vLLM's own unit tests of its Mooncake store connector, stock or with kvmask under it.

    PYTHON scripts/vllm_suite.py VERSION [--kvmask] [--sources FOLDER] [--files NAME ...] [-k EXPR]

PYTHON is the interpreter of scripts/vllm_env.sh. The installed release runs its tests against the
installed build; any other release has its Python source laid over that build. With --kvmask the
connector is patched by `kvmask.vllm.install(lookup="exact")` before a test module is imported.

Prints a line per file and a last line `N passed, N failed`. The exit status is 0 only when nothing
failed and at least as many tests passed as pass with stock vLLM: tests that vanish (skipped or not
collected) are failures.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_source import pinned, source

TESTS = "tests/v1/kv_connector/unit/test_mooncake_store_{}.py"

# Passing tests per release and file with stock vLLM in the environment of vllm_env.sh.
STOCK = {
    "0.24.0": {"coordinator": 26, "worker": 61, "hma_e2e": 3},
    "0.28.0": {"coordinator": 34, "worker": 111, "hma_e2e": 6},
    "0.32.0": {"coordinator": 38, "worker": 203, "layout": 9, "hma_e2e": 9},
    "0.33.0": {"coordinator": 40, "worker": 203, "layout": 9, "hma_e2e": 9},
}

PLUGIN = """\
import kvmask.vllm

kvmask.vllm.install(lookup="exact")
"""


@dataclass
class Outcome:
    passed: int
    failed: int
    report: str

    @property
    def ran(self) -> bool:
        return self.passed + self.failed > 0


def run_file(work: Path, env: dict[str, str], name: str, args: argparse.Namespace) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["--timeout", "120"]
    if args.kvmask:
        command += ["-p", "kvmask_under_the_connector"]
    if args.expr:
        command += ["-k", args.expr]
    command.append(TESTS.format(name))
    done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    # Errors in fixtures or at collection are failures too.
    counts = {"passed": 0, "failed": 0, "error": 0, "errors": 0}
    if lines:
        for number, word in re.findall(r"(\d+) (passed|failed|errors?)", lines[-1]):
            counts[word] = int(number)
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    report = "\n".join(bad)[:4000] or (done.stdout + done.stderr)[-2000:]
    return Outcome(counts["passed"], counts["failed"] + counts["error"] + counts["errors"], report)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=sorted(STOCK))
    parser.add_argument("--kvmask", action="store_true")
    parser.add_argument(
        "--sources", type=Path, default=Path(tempfile.gettempdir()) / "kvmask-vllm-sources"
    )
    parser.add_argument("--files", nargs="*", help="only these, by the short names of the table")
    parser.add_argument("-k", dest="expr", help="pytest's -k; the counts are then not compared")
    args = parser.parse_args()
    expected = STOCK[args.version]
    unknown = set(args.files or ()) - set(expected)
    if unknown:
        parser.error(f"release {args.version} has no test file {', '.join(sorted(unknown))}")

    tree = source(args.version, args.sources)
    passed = failed = 0
    good = True
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # The tests run from here, not from the source tree: that would shadow the installed build.
        (work / "tests").symlink_to(tree / "tests")
        (work / "kvmask_under_the_connector.py").write_text(PLUGIN)
        path = [folder]
        if args.version != pinned()["VLLM_INSTALLED"]:
            path.append(str(tree))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        for name in args.files or expected:
            outcome = run_file(work, env, name, args)
            passed, failed = passed + outcome.passed, failed + outcome.failed
            short = not args.expr and outcome.passed < expected[name]
            good &= outcome.ran and not outcome.failed and not short
            print(
                f"{args.version} {name}: {outcome.passed} passed, {outcome.failed} failed "
                f"(stock: {expected[name]})"
            )
            if outcome.failed or not outcome.ran or short:
                print(outcome.report)
    print(f"{passed} passed, {failed} failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
