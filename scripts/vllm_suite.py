#!/usr/bin/env python3
"""Run vLLM's own tests of its Mooncake store connector with and without kvmask, test by test.

    python scripts/vllm_suite.py 0.32.0                # three ways, each compared with stock
    python scripts/vllm_suite.py 0.32.0 --way exact    # one of them

| way | what is in place |
| --- | --- |
| exact | `kvmask.vllm.install(lookup="exact")` |
| default | `kvmask.vllm.install()` |
| connector | the classes that `KVMaskStoreConnector` gives to vLLM's objects, with `exact` |

It needs a Python with the CPU build of vLLM, pytest and kvmask. `make test-vllm` creates one. The
tests come from the release's source archive, from the package index that pip is configured for. For
a release that is not installed, its Python sources are put before the installed build on the path.
The exit status is 0 if every test has the outcome that it has with stock, or stands in `DIFFERS`
with the reason, and some passed.
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
from typing import Any

from vllm_source import VERSIONS, source

PROJECT = Path(__file__).resolve().parent.parent
TESTS = "tests/v1/kv_connector/unit"
FILES = ("coordinator", "worker", "layout", "prepare_values", "hma_e2e", "scheduler", "connector")
WAYS = ("exact", "default", "connector")

# Tests whose outcome is another one with kvmask: (way, name) to the reason. A way of "*" is any.
DIFFERS: dict[tuple[str, str], str] = {}

INSTALL = """
import kvmask.vllm
from kvmask.vllm import seams

kvmask.vllm.install(lookup={lookup!r})


def in_place():
    return sorted(seams.placed())
"""
# The tests import vLLM's classes by name, and find those that the connector would give them.
CLASSES = """
import importlib

import kvmask.vllm
from kvmask.vllm import connector, lookup

lookup.set_default("exact")
STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store."
OWN = connector.classes()
for part in ("coordinator", "data", "worker", "scheduler", "connector"):
    module = importlib.import_module(STORE + part)
    for name, own in OWN.items():
        if hasattr(module, name):
            setattr(module, name, own)


def in_place():
    return sorted(OWN)
"""
REPORT = """

def pytest_sessionfinish():
    with open({report!r}, "w") as file:
        print(*in_place(), file=file)
"""


def outcomes(unpacked: Path, version: str, way: str | None, args: Any) -> dict[str, str]:
    """The outcome of every test; way None is stock."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "tests").symlink_to(unpacked / "tests")
        report, placed = work / "report.xml", work / "placed.txt"
        overlay = [] if version == VERSIONS["VLLM_INSTALLED"] else [str(unpacked)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        if way is not None:
            text = CLASSES if way == "connector" else INSTALL
            text = text.replace("{lookup!r}", repr("staged" if way == "default" else "exact"))
            (work / "kvmask_in_place.py").write_text(text + REPORT.format(report=str(placed)))
            command += ["-p", "kvmask_in_place"]
        if args.expression:
            command += ["-k", args.expression]
        files = (f"{TESTS}/test_mooncake_store_{name}.py" for name in FILES)
        command += [f"--junitxml={report}", *(f for f in files if (unpacked / f).is_file())]
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(work), str(PROJECT), *overlay])}
            | {"VLLM_PLUGINS": "", "KVMASK_VLLM": "0"},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        if not report.is_file():
            raise SystemExit((done.stdout + done.stderr)[-3000:])
        if args.verbose:
            print(done.stdout)
        if way is not None and not placed.read_text().split():
            raise SystemExit(f"nothing of kvmask is in place in {version}")
        found: dict[str, str] = {}
        for case in ET.parse(report).iter("testcase"):
            # In some releases the clean-up after each test raises where there is no accelerator,
            # also with stock. It comes as a second case of the same name.
            what = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
            name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
            if found.get(name, "passed") == "passed" or what == "failure":
                found[name] = what
        return found


def compare(version: str, way: str, stock: dict[str, str], mine: dict[str, str]) -> int:
    """Print how a way did; the number of tests whose outcome is wrong."""
    wrong = declared = 0
    for name in sorted({*stock, *mine}):
        if stock.get(name) == mine.get(name):
            continue
        test = name.partition("[")[0]
        reason = DIFFERS.get((way, test)) or DIFFERS.get(("*", test))
        declared += reason is not None
        wrong += reason is None
        print(f"  {name}: {stock.get(name)} with stock, {mine.get(name)} with kvmask; {reason}")
    counts = Counter(mine.values())
    shown = ", ".join(f"{n} {what}" for what, n in counts.most_common())
    print(
        f"{version} {way}: {shown}; {declared} declared and {wrong} other differences", flush=True
    )
    return wrong + (not counts["passed"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=VERSIONS["VLLM"])
    parser.add_argument("--way", choices=WAYS, help="only this one")
    parser.add_argument("--stock", action="store_true", help="without kvmask only")
    parser.add_argument("--sources", type=Path, default=PROJECT / "build" / "vllm-src")
    parser.add_argument("-k", dest="expression")
    parser.add_argument("-v", dest="verbose", action="store_true")
    args = parser.parse_args()
    unpacked = source(args.version, args.sources)
    stock = outcomes(unpacked, args.version, None, args)
    counts = Counter(stock.values())
    print(
        f"{args.version} stock: {', '.join(f'{n} {w}' for w, n in counts.most_common())}",
        flush=True,
    )
    if args.stock:
        return 0
    ways = [args.way] if args.way else WAYS
    wrong = [
        compare(args.version, way, stock, outcomes(unpacked, args.version, way, args))
        for way in ways
    ]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
