#!/usr/bin/env python3
"""Print the digests of the seams between kvmask and vLLM, read from the sources of its releases.

    python scripts/vllm_digests.py > kvmask/vllm/digests.py

The sources come from the package index that pip is configured for. Nothing of vLLM is imported. A
digest stands where it changes: ``release:digest`` holds until the next release that is named, and
``-`` means that the seam is not there. Patch releases must not differ from each other.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from vllm_source import VERSIONS, source

from kvmask.engines.sources import Tree

PROJECT = Path(__file__).resolve().parent.parent
HEAD = '''"""The digests of vLLM's functions in every release, as far as kvmask rests on them.

Made by scripts/vllm_digests.py. A digest holds from the release named with it to the next one.
"""

DIGESTS = """
'''


def seams() -> tuple[dict[str, str], dict[str, str]]:
    """Paths of the seams and their aliases, without importing the package that needs vLLM."""
    found = runpy.run_path(str(PROJECT / "kvmask" / "vllm" / "seams.py"))
    return found["PATHS"], found["ALIASES"]


def digests(trees: Mapping[str, Tree]) -> dict[str, dict[str, str]]:
    """Seam to version to digest; empty where it is gone."""
    paths, aliases = seams()
    return {
        name: {version: tree.digest(path) for version, tree in trees.items()}
        for name, path in paths.items()
        if name not in aliases
    }


def trees_in(folder: Path) -> dict[str, Tree]:
    """Version to sources, of the releases that are unpacked in a folder."""
    found = {version: folder / f"vllm-{version}" for version in VERSIONS["VLLM"]}
    return {version: Tree(path) for version, path in found.items() if (path / "vllm").is_dir()}


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """The text of `kvmask.vllm.digests.DIGESTS`.

    Raises:
        SystemExit: A patch release differs.
    """
    lines = []
    for name, by_version in found.items():
        changes, now, releases = [], "-", {}
        for version, digest in by_version.items():
            release, shown = VERSIONS["release_of"](version), digest or "-"
            if releases.setdefault(release, shown) != shown:
                raise SystemExit(f"{name} of {version} is not that of {release}")
            if shown != now:
                changes.append(f"{release}:{shown}")
                now = shown
        if changes:
            lines += textwrap.wrap(" ".join((name, *changes)), 98, subsequent_indent=" ")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=Path, default=PROJECT / "build" / "vllm-src")
    args = parser.parse_args()
    versions = sorted(VERSIONS["VLLM"], key=lambda v: tuple(map(int, v.split("."))))
    trees = {version: Tree(source(version, args.sources)) for version in versions}
    print(HEAD + table(digests(trees)) + '"""')
    return 0


if __name__ == "__main__":
    sys.exit(main())
