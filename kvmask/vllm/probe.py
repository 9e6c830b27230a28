"""What fits the installed vLLM, printed as JSON: `kvmask doctor` runs this in a process of its own.

Importing vLLM takes seconds, and can fail in many ways that end a process.
"""

from __future__ import annotations

import json
from typing import Any

from kvmask.errors import KVMaskError
from kvmask.vllm.features import ABSENT
from kvmask.vllm.releases import fitting, version


def probe() -> dict[str, Any]:
    """The version, the release whose functions it has, and per feature whether it fits."""
    try:
        placed = fitting()
    except KVMaskError as error:
        return {"version": version(), "error": str(error)}
    return {
        "version": version(),
        "release": placed.release,
        "features": [feature.name for feature in placed.features],
        "stock": {name: list(changed) for name, changed in placed.stock.items()},
        "absent": {name: ABSENT.get(name, "") for name in placed.absent},
    }


def main(mark: str) -> None:
    """Print one line: the mark, then the JSON. vLLM prints others."""
    print(f"\n{mark}{json.dumps(probe())}", flush=True)
