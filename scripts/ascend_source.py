#!/usr/bin/env python3
"""Unpack the source archive of a vllm-ascend release, with its tests.

    scripts/ascend_source.py VERSION [FOLDER]      prints FOLDER/vllm_ascend-VERSION

FOLDER is build/ascend-src by default, where the tests look. A release that was made for another
vLLM than the installed one also gets that one's sources, in build/vllm-src. The archives come from
the index that pip is configured for. Nothing is built or installed.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from pathlib import Path

from vllm_source import VERSIONS, download
from vllm_source import source as vllm_source

BUILD = Path(__file__).resolve().parent.parent / "build"
# Its build writes this file, and its modules import it.
BUILD_INFO = '__device_type__ = "A2"\n'


def source(version: str, folder: Path) -> Path:
    """Return the folder of the unpacked release. Downloads it if it is not there."""
    target = folder / f"vllm_ascend-{version}"
    if not (target / "vllm_ascend" / "_build_info.py").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            with tarfile.open(download(version, work, "vllm-ascend")) as archive:
                archive.extractall(work, filter="data")
            made = Path(work) / target.name
            (made / "vllm_ascend" / "_build_info.py").write_text(BUILD_INFO)
            made.rename(target)
    needed = VERSIONS["ASCEND"].get(version, VERSIONS["VLLM_INSTALLED"])
    if needed != VERSIONS["VLLM_INSTALLED"]:
        vllm_source(needed, BUILD / "vllm-src")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=VERSIONS["ASCEND"])
    parser.add_argument("folder", type=Path, nargs="?", default=BUILD / "ascend-src")
    args = parser.parse_args()
    print(source(args.version, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
