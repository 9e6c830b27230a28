#!/usr/bin/env python3
"""Unpack the source archive of a vLLM release, with its tests.

    scripts/vllm_source.py VERSION FOLDER      prints FOLDER/vllm-VERSION

The archive comes from the index that pip is configured for, and pip's own finder locates it. `pip
download` cannot be used: it would also build the package's metadata, which needs a compiler and
takes minutes. This script builds and installs nothing. If the folder is already complete, it does
nothing.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tarfile
import tempfile
from pathlib import Path

# Read as a file: kvmask itself may not be built here.
VERSIONS = runpy.run_path(str(Path(__file__).resolve().parent.parent / "kvmask" / "versions.py"))


def download(version: str, folder: str, project: str = "vllm") -> Path:
    """Fetch the source archive of one release into a folder."""
    from pip._internal.commands import create_command
    from pip._internal.models.target_python import TargetPython
    from pip._internal.network.download import Downloader

    pip = create_command("download")
    options, _ = pip.parse_args(["--no-binary", ":all:", "--no-deps", f"{project}=={version}"])
    with pip.main_context():
        session = pip.get_default_session(options)
        finder = pip._build_package_finder(
            options=options, session=session, target_python=TargetPython()
        )
        candidates = finder.find_all_candidates(project)
        links = [c.link for c in candidates if str(c.version) == version and not c.link.is_wheel]
        if not links:
            raise SystemExit(f"the configured index has no source archive of {project} {version}")
        # Newer versions of pip need the number of retries as an argument.
        try:
            downloader = Downloader(session, "off", options.resume_retries)
        except (AttributeError, TypeError):
            downloader = Downloader(session, "off")
        archive, _ = downloader(links[0], folder)
    return Path(archive)


def source(version: str, folder: Path) -> Path:
    """Return the folder of the unpacked release. Downloads it if it is not there."""
    target = folder / f"vllm-{version}"
    if (target / "tests").is_dir() and (target / "vllm").is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Unpack into another folder and then rename it, so that an interrupted run leaves no half
    # target.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        with tarfile.open(download(version, work)) as archive:
            archive.extractall(work, filter="data")
        (Path(work) / target.name).rename(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=VERSIONS["VLLM"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(source(args.version, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
