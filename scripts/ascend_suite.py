#!/usr/bin/env python3
"""Run vllm-ascend's own tests of AscendStore with and without kvmask, and compare test by test.

    python scripts/ascend_suite.py 0.30.0rc2

It needs a Python with the CPU build of vLLM, pytest and kvmask; `make test-ascend` creates one. No
accelerator is needed: the tests bring stand-ins, and those that cannot run here fail or end in an
error both times. kvmask is put in place as its plugin does it. The exit status is 0 if every test
has the same outcome both times and some passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from ascend_source import BUILD, VERSIONS, source

from kvmask.cli.terminal import Progress

PROJECT = Path(__file__).resolve().parent.parent
TESTS = "tests/ut/distributed/ascend_store"
# The stand-ins of the tests replace what is not there yet: the real vLLM must come first.
PRELOAD = """
import sys
from unittest import mock

for name in {missing}:
    sys.modules.setdefault(name, mock.MagicMock())
import zmq.asyncio, torch, transformers
import vllm.distributed, vllm.forward_context, vllm.v1.serial_utils, vllm.v1.core.sched.output
import vllm.v1.core.kv_cache_manager, vllm.v1.core.single_type_kv_cache_manager
import vllm.distributed.kv_transfer.kv_connector.factory
import kvmask._plugin

kvmask._plugin.ascend()


def pytest_sessionfinish():
    found = sys.modules.get("kvmask.ascend.releases")
    with open({report!r}, "w") as file:
        print(*sorted(found.seams.placed() if found else ()), file=file)
"""


def outcomes(unpacked: Path, version: str, switch: str, timeout: int) -> dict[str, str]:
    """The outcome of every test, with kvmask switched on or off."""
    needed = VERSIONS["ASCEND"][version]
    other = needed != VERSIONS["VLLM_INSTALLED"]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        missing = ["gguf", "gguf.constants", "gguf.quants"] if other else []
        report, placed = work / "report.xml", work / "placed.txt"
        preload = PRELOAD.format(missing=missing, report=str(placed))
        (work / "kvmask_preload.py").write_text(preload)
        paths = [str(work), str(unpacked), str(PROJECT)]
        if other:
            paths.insert(0, str(BUILD / "vllm-src" / f"vllm-{needed}"))
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-W", "ignore"]
        command += ["-p", "no:cacheprovider", "-p", "kvmask_preload"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}", TESTS]
        done = subprocess.run(
            command,
            cwd=unpacked,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "", "KVMASK_ASCEND": switch},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if not report.is_file():
            raise SystemExit((done.stdout + done.stderr)[-3000:])
        seams = placed.read_text().split()
        if bool(seams) != (switch == "1"):
            raise SystemExit(f"kvmask must be in place if switched on, got {switch} and {seams}")
        found: dict[str, str] = {}
        for case in ET.parse(report).iter("testcase"):
            what = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
            name = f"{case.get('classname')}::{case.get('name')}"
            found[name] = what if found.get(name) in (None, "passed") else found[name]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=VERSIONS["ASCEND"])
    parser.add_argument("--sources", type=Path, default=BUILD / "ascend-src")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one of the two runs")
    args = parser.parse_args()
    unpacked = source(args.version, args.sources)
    with Progress(f"vllm-ascend {args.version}") as progress:
        progress.step("its tests without kvmask")
        stock = outcomes(unpacked, args.version, "0", args.timeout)
        progress.step("its tests with kvmask")
        mine = outcomes(unpacked, args.version, "1", args.timeout)
    differ = [name for name in sorted({*stock, *mine}) if stock.get(name) != mine.get(name)]
    for name in differ:
        print(f"{name}: {stock.get(name)} without kvmask, {mine.get(name)} with it")
    counts = Counter(mine.values())
    shown = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    print(f"{args.version}: {shown}; {len(differ)} outcomes differ from stock's")
    return 1 if differ or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
