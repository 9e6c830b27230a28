#!/usr/bin/env python3
"""Run the real vLLM engine in the ways that it is deployed, with and without kvmask.

    python scripts/vllm_modes.py            # all modes
    python scripts/vllm_modes.py one outage

The modes:

    one      one process: salted caches, a small cache with preemptions, a request aborted while it
             loads
    apart    the engine core in a process of its own: the connector, the plugin, and the connector
             as a part of MultiConnector, with statistics
    parts    MultiConnector with the store and vLLM's ExampleConnector, which keeps blocks in files:
             hits of the one, and of the other once the store is empty
    share    engines one after another on one store: what stock wrote as a producer, stock and
             kvmask read as consumers, and the reverse
    fleet    stock, this kvmask and the last one take turns on one store, in every order of who
             saves and who loads; the last one is built from its commit
    workers  tensor parallelism over two worker processes
    outage   the master is killed between a hit and its load, and comes back; with both values of
             `kv_load_failure_policy`

Every engine has the same tiny model with random weights. In each mode all engines must give the
same tokens, and the hits of stock. It needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_engine import PROJECT, SETTINGS, said_by

Result = dict[str, Any]

CHILD = PROJECT / "scripts" / "vllm_deployed.py"
# What the last version of CHANGELOG.md is before this one, and its last commit. No tag names it:
# the next commit begins what became 0.2.
LAST, LAST_COMMIT = "0.1.0", "bf360aab969bf909fc6715dfbfacf24fcd5293a5"


class Skipped(Exception):
    """A mode cannot run here; the text says why."""


def run(spec: dict[str, Any], timeout: float = 600, tree: Path = PROJECT) -> Result:
    """One engine in a process of its own.

    Args:
        spec: What it is and does.
        timeout: Seconds.
        tree: Where its kvmask lies.
    """
    env = os.environ | SETTINGS
    env["PYTHONPATH"] = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(spec.get("apart", False)))
    if spec["kind"] == "plugin":
        env["KVMASK_VLLM"] = "1"
    if "workers" in spec:  # several workers share the cores of one NUMA node
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    result: Result = said_by([str(CHILD), json.dumps(spec)], env, timeout, str(spec))
    told = ("preempted", "loading", "seconds", "version")
    shown = {k: v for k, v in result.items() if "hits" in k or k in told}
    print(f"{spec['kind']} {spec['steps']} {time.monotonic() - begun:.0f} s {shown}", flush=True)
    return result


def plain(result: Result) -> Result:
    """What must be the same with and without kvmask."""
    return {k: v for k, v in result.items() if k not in ("counters", "seconds", "version")}


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


def parts() -> bool:
    """See the module."""
    spec = {"steps": ["parts"], "parts": True}
    stock, *own = [
        run(spec | more)
        for more in ({"kind": "stock"}, {"kind": "kvmask"}, {"kind": "kvmask", "apart": True})
    ]
    there = any(stock["hits"]) and any(stock["hits of the other part"]) and stock["parts same"]
    return there and all(plain(result) == plain(stock) and counted(result) for result in own)


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


@contextlib.contextmanager
def last_kvmask() -> Iterator[Path]:
    """A folder with the last kvmask, built from its commit.

    Raises:
        Skipped: This is no clone, or one without that commit.
    """
    git = ["git", "-C", str(PROJECT)]
    try:
        known = subprocess.run(
            [*git, "cat-file", "-e", LAST_COMMIT], capture_output=True, check=False
        )
    except FileNotFoundError:
        raise Skipped("there is no git here") from None
    if known.returncode:
        raise Skipped(f"this is no clone that has kvmask {LAST}, commit {LAST_COMMIT[:7]}")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        packed = subprocess.run([*git, "archive", LAST_COMMIT], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(tree, filter="data")
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, capture_output=True, check=True)
        yield tree


def fleet() -> bool:
    """See the module."""
    # Windows, too: there kvmask asks for less than stock, and in another way than before.
    spec = {"model": "gemma", "blocks": 512, "steps": ["turns"]}
    kinds = ("stock", "last", "kvmask")

    def turns(tree: Path, order: tuple[str, ...]) -> list[Result]:
        with store() as master:
            return [
                run(
                    spec
                    | {"kind": "stock" if kind == "stock" else "kvmask"}
                    | {"turn": turn, "master": master},
                    tree=tree if kind == "last" else PROJECT,
                )
                for turn, kind in enumerate(order)
            ]

    with last_kvmask() as tree:
        alone = turns(tree, ("stock",) * 3)
        good = all(all(result["hits"]) for result in alone)
        for first in range(3):
            order = kinds[first:] + kinds[:first]
            found = turns(tree, order)
            versions = {
                kind: result.get("version") for kind, result in zip(order, found, strict=True)
            }
            good = good and list(map(plain, found)) == list(map(plain, alone))
            good = good and versions["last"] == LAST != versions["kvmask"]
    return good


def workers() -> bool:
    """See the module."""
    spec = {"steps": ["passes"], "apart": True, "workers": 2}
    stock, own = run(spec | {"kind": "stock"}), run(spec | {"kind": "kvmask"})
    return plain(stock) == plain(own) and any(stock["hits"]) and counted(own)


def outages() -> bool:
    """See the module."""
    good = True
    for policy in ("recompute", "fail"):
        spec = {"steps": ["outage"], "policy": policy}
        stock, own = run(spec | {"kind": "stock"}, 900), run(spec | {"kind": "kvmask"}, 900)
        ended = own["right"] if policy == "recompute" else own["struck"] == "error"
        good = good and ended and bool(own["killed"]) and own["same"] and any(own["hits"])
        good = good and plain(own) == plain(stock)
    return good


MODES = {
    "one": one,
    "apart": apart,
    "parts": parts,
    "share": share,
    "fleet": fleet,
    "workers": workers,
    "outage": outages,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    # Argparse compares the empty list, too, when there are no modes.
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], help="all by default")
    args = parser.parse_args()
    bad = []
    for mode in args.modes or MODES:
        try:
            good = MODES[mode]()
        except Skipped as reason:
            print(f"{mode}: skipped: {reason}", flush=True)
            continue
        print(f"{mode}: {'the engines agree' if good else 'the engines differ'}", flush=True)
        if not good:
            bad.append(mode)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
