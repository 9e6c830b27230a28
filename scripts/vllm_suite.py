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
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_source import VERSIONS, source

from kvmask.cli.terminal import Progress

PROJECT = Path(__file__).resolve().parent.parent
TESTS = "tests/v1/kv_connector/unit"
FILES = ("coordinator", "worker", "layout", "prepare_values", "hma_e2e", "scheduler", "connector")
WAYS = ("exact", "default", "connector")
# The model whose configuration the tests ask for. They compute nothing with it.
MODEL = "facebook/opt-125m"
CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}

ONE_LIST = (
    "its mock answers existence with one fixed list, by the position of stock's keys in one call; "
    "a staged lookup asks for fewer keys, or in several calls"
)
# Tests whose outcome is another one with kvmask: (way, name) to the reason. A way of "*" is any.
DIFFERS: dict[tuple[str, str], str] = {
    ("default", f"test_mooncake_store_worker::test_lookup_{name}"): ONE_LIST
    for name in (
        "checks_all_potential_swa_hit_boundaries",
        "full_hit_reuses_existing_boundary",
        "full_hit_swa_degrades_when_no_stored_boundary_is_usable",
        "partial_prefix_returns_first_hit_length",
        "partial_tail_uses_hash_alignment",
        "requires_all_dcp_rank_namespaces",
        "swa_single_group_returns_full_when_tail_window_present",
    )
}

# Run in the process of a way, before the tests import anything by name.
INSTALL = """
import kvmask.vllm
from kvmask.vllm import seams

kvmask.vllm.install(lookup={lookup!r})
in_place = seams.placed()
"""
# The tests import vLLM's classes by name, and find those that the connector would give them.
CLASSES = """
import importlib

import kvmask.vllm
from kvmask.vllm import connector, lookup

lookup.set_default("exact")
in_place = connector.classes()
for part in ("coordinator", "data", "worker", "scheduler", "connector"):
    module = importlib.import_module(
        f"vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.{part}"
    )
    for name, own in in_place.items():
        if hasattr(module, name):
            setattr(module, name, own)
"""
CODE = {
    "stock": "in_place = ['vLLM']",
    "exact": INSTALL.format(lookup="exact"),
    "default": INSTALL.format(lookup="staged"),
    "connector": CLASSES,
}


class NoCleanup:
    """Leaves out what vLLM does after each test: it takes longer than the test, and raises where
    there is no accelerator."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            item.add_marker("skip_global_cleanup")


class StillActing:
    """Fails a test in which an internal error of kvmask put vLLM's own functions back: the rest
    would compare vLLM with itself. The next test has kvmask again."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        try:
            return (yield)
        finally:
            acting = sys.modules.get("kvmask.vllm.acting")
            if acting is not None and acting.ACTING.failed:
                acting.ACTING.reset()
                pytest.fail("an internal error of kvmask put vLLM's own functions back")


def serve(ways: list[str], arguments: list[str]) -> None:
    """Run the tests once per way, each in a fork of one process that has imported vLLM."""
    import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    for way in ways:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                found: dict[str, Any] = {}
                exec(compile(CODE[way], way, "exec"), found)
                if not found["in_place"]:
                    raise SystemExit(f"nothing of kvmask is in place for {way!r}")
                plugins = [NoCleanup(), StillActing()]
                status = int(pytest.main([*arguments, f"--junitxml={way}.xml"], plugins))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.waitpid(child, 0)


def model_cache(folder: Path) -> str:
    """A cache of models as the hub's client makes it, with the one that the tests name."""
    model = folder / f"models--{MODEL.replace('/', '--')}"
    for name, text in (("refs/main", "0"), ("snapshots/0/config.json", json.dumps(CONFIG))):
        path = model / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return str(folder)


def outcomes(unpacked: Path, ways: list[str], args: Any) -> dict[str, dict[str, str]]:
    """Per way the outcome of every test."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "tests").symlink_to(unpacked / "tests")
        overlay = [] if args.version == VERSIONS["VLLM_INSTALLED"] else [str(unpacked)]
        arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
        arguments += ["-k", args.expression] if args.expression else []
        files = (f"{TESTS}/test_mooncake_store_{name}.py" for name in args.files)
        arguments += [f for f in files if (unpacked / f).is_file()]
        code = f"import vllm_suite; vllm_suite.serve({ways!r}, {arguments!r})"
        folders = [str(work), str(PROJECT), str(PROJECT / "scripts"), *overlay]
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=work,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(folders)}
            | {"VLLM_PLUGINS": "", "KVMASK_VLLM": "0"}
            | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": model_cache(work / "hub")},
            capture_output=not args.verbose,
            text=True,
            timeout=args.timeout,
            check=False,
        )
        missing = [way for way in ways if not (work / f"{way}.xml").is_file()]
        if missing:
            shown = ((done.stdout or "") + (done.stderr or ""))[-4000:]
            raise SystemExit(f"{shown}\nno tests were run for {missing}")
        return {way: read(work / f"{way}.xml") for way in ways}


def read(report: Path) -> dict[str, str]:
    """The outcome of every test of a report."""
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        what = next((c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed")
        name = f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"
        if found.get(name, "passed") == "passed":  # a failing clean-up comes as a second case
            found[name] = what
    return found


def compare(version: str, way: str, stock: dict[str, str], mine: dict[str, str]) -> int:
    """Print how a way did; the number of tests whose outcome is wrong."""
    wrong = 0
    declared: dict[str, list[str]] = {}
    for name in sorted({*stock, *mine}):
        if stock.get(name) == mine.get(name):
            continue
        test = name.partition("[")[0]
        reason = DIFFERS.get((way, test)) or DIFFERS.get(("*", test))
        if reason is None:
            wrong += 1
            print(f"  {name}: {stock.get(name)} with stock, {mine.get(name)} with kvmask")
        else:
            declared.setdefault(reason, []).append(name)
    for reason, names in declared.items():
        print("  ", ", ".join(names), f": {reason}", sep="")
    count = sum(map(len, declared.values()))
    shown = f"{counted(mine)}; {count} declared and {wrong} other differences"
    print(f"{version} {way}: {shown}", flush=True)
    return wrong + ("passed" not in mine.values())


def counted(found: dict[str, str]) -> str:
    """How many tests had which outcome."""
    return ", ".join(f"{n} {what}" for what, n in Counter(found.values()).most_common())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=VERSIONS["VLLM"])
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one; repeatable")
    parser.add_argument("--files", nargs="+", choices=FILES, default=FILES, help="only these tests")
    parser.add_argument("--sources", type=Path, default=PROJECT / "build" / "vllm-src")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for all ways together")
    parser.add_argument("-k", dest="expression")
    parser.add_argument("-v", dest="verbose", action="store_true", help="show what pytest says")
    args = parser.parse_args()
    unpacked = source(args.version, args.sources)
    ways = list(dict.fromkeys(args.way or WAYS))
    with Progress(f"vLLM {args.version}") as progress:
        progress.step(f"its tests with {', '.join(['stock', *ways])}")
        found = outcomes(unpacked, ["stock", *ways], args)
    print(f"{args.version} stock: {counted(found['stock'])}", flush=True)
    wrong = [compare(args.version, way, found["stock"], found[way]) for way in ways]
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
