"""Random cases: AscendStore's worker with and without kvmask. `ascend_oracle.py` runs many more."""

import ascend_world
import pytest

if not ascend_world.wanted():
    pytest.skip("needs KVMASK_ASCEND_VERSION and its source", allow_module_level=True)

import ascend_oracle

pytestmark = pytest.mark.vllm


def test_random_cases() -> None:
    assert ascend_oracle.run(400, seed=11) == []
    seen = ascend_oracle.counts
    assert seen["cases"] == 400
    assert min(seen[name] for name in ("lookups", "hits", "masks", "keys", "descriptors")) > 20
