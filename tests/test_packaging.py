"""What is handed on: the source archive, the metadata, and the flags of the build."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import kvmask

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvmask.__file__).parent
if not (ROOT / "setup.py").exists():
    pytest.skip("the build is not beside the tests", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("kvmask", "tests", "bench", "docs", "examples", "scripts")
# What a build or a run leaves behind.
LEFT = {".so", ".pyc"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The unpacked source archive, made from a copy of the sources."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools", minversion="77.0.3")
    folder = tmp_path_factory.mktemp("sdist")
    skip = shutil.ignore_patterns("__pycache__", "*.so", ".*", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, folder / "copy", ignore=skip)
    for hidden in (".ci", ".clang-format"):
        if (ROOT / hidden).is_dir():
            shutil.copytree(ROOT / hidden, folder / "copy" / hidden)
        elif (ROOT / hidden).exists():
            shutil.copy(ROOT / hidden, folder / "copy" / hidden)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(folder)],
        cwd=folder / "copy",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as made:
        made.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def test_the_archive_has_what_its_tests_need(archive):
    there = {p.relative_to(archive) for p in archive.rglob("*") if p.is_file()}
    here = {
        p.relative_to(ROOT)
        for folder in FOLDERS
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and p.suffix not in LEFT and p.name not in ("_core.c", "_core.html")
    }
    assert here - there == set()
    names = {str(p) for p in there}
    assert {"Makefile", "pyproject.toml", "setup.py", "LICENSE", "README.md"} <= names


def test_what_is_generated_is_not_in_the_archive(archive):
    made = [p for p in archive.rglob("*") if p.suffix in LEFT or p.name == "_core.c"]
    assert made == []


def test_the_description_has_no_link_that_an_index_cannot_follow(archive):
    text = (archive / "PKG-INFO").read_text(encoding="utf-8")
    assert "MooncakeStoreConnector" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    assert [t for t in targets if not t.startswith(("https://", "#"))] == []


def test_the_ranges_of_the_build_hold_what_is_installed():
    from_pip = pytest.importorskip("packaging.requirements")
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    for text in PROJECT["build-system"]["requires"]:
        wanted = from_pip.Requirement(text)
        assert pinned[wanted.name] in wanted.specifier


def test_wheels_hold_no_sources_of_the_core():
    assert PROJECT["tool"]["setuptools"]["package-data"] == {"kvmask": ["py.typed", "*.pyi"]}
    assert PROJECT["tool"]["setuptools"]["include-package-data"] is False


def pythons():
    """The versions of CPython that the metadata name, as in 311."""
    named = re.findall(r"Python :: (\d)\.(\d+)", " ".join(PROJECT["project"]["classifiers"]))
    return [major + minor for major, minor in named]


def test_wheels_are_built_for_the_versions_that_the_metadata_name():
    config = PROJECT["tool"]["cibuildwheel"]
    assert config["build"].split() == [f"cp{version}-*" for version in pythons()]
    assert set(config["test-groups"]) <= PROJECT["dependency-groups"].keys()


def test_wheels_are_built_by_the_cibuildwheel_that_read_the_configuration():
    workflow = ROOT / ".github" / "workflows" / "wheels.yml"
    if not workflow.exists():
        pytest.skip("the archive has no workflows")
    (used,) = re.findall(r"cibuildwheel@v(\S+)", workflow.read_text(encoding="utf-8"))
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    assert f"cibuildwheel=={used}" in pinned


def test_cibuildwheel_takes_its_configuration():
    """It checks the names and values of all options before it says what it would build."""
    pytest.importorskip("cibuildwheel")
    words = ["--platform", "linux", "--archs", "x86_64,aarch64", "--print-build-identifiers"]
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", *words, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [
        f"cp{version}-manylinux_{arch}" for arch in ("x86_64", "aarch64") for version in pythons()
    ]


def test_what_starts_processes_tests_an_installed_kvmask(archive, tmp_path):
    """As the wheel's tests do: the sources beside the tests are not built, and not meant."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "kvmask", ignore=shutil.ignore_patterns("*.c", "__pycache__"))
    command = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert command.startswith("pytest {project}/tests ")
    chosen = " ".join(
        f"{archive}/tests/{name}.py"
        for name in ("test_docs", "test_examples", "test_exit", "test_figures", "test_process")
    )
    line = command.replace("pytest {project}/tests", f'"{sys.executable}" -m pytest {chosen}')
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_core_compiles_without_a_warning(compiler):
    source, program = PACKAGE / "_core.c", shutil.which(compiler)
    if program is None or not source.exists():
        pytest.skip("no such compiler, or no generated source")
    import sysconfig

    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    flags = sorted(set(re.findall(r'"(-(?:W(?!l,)|std|f)[\w=-]+)"', text)) - {"-Werror"})
    flags = [flag for flag in flags if not flag.startswith(("-fsanitize", "-fno-"))]
    assert "-Wall" in flags
    done = subprocess.run(
        [
            *(program, "-fsyntax-only", "-Werror", *flags, f"-I{PACKAGE / 'csrc'}"),
            *(f"-I{sysconfig.get_path('include')}", str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_clone_that_is_not_built_says_what_to_do(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "kvmask", ignore=shutil.ignore_patterns("*.so", "_core.c"))
    for module in ("kvmask", "kvmask.errors"):
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import {module}"],  # without what is installed
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("ImportError: kvmask must be built for this Python")
        assert f"got no compiled core in {tmp_path}: run `python setup.py build_ext" in last
