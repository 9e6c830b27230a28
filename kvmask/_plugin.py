"""vLLM's plugin entry point. It imports nothing unless it is asked to act."""

from __future__ import annotations

import logging
import os


def vllm() -> None:
    """Put kvmask under vLLM's MooncakeStoreConnector when ``KVMASK_VLLM=1``.

    ``KVMASK_LOOKUP`` chooses the lookup strategy. A vLLM that kvmask does not know keeps its own
    functions, and the log says what changed in it.
    """
    if os.environ.get("KVMASK_VLLM") != "1":
        return
    from kvmask.errors import UnsupportedReleaseError
    from kvmask.vllm import install

    try:
        install(os.environ.get("KVMASK_LOOKUP", "staged"))
    except UnsupportedReleaseError as e:
        logging.getLogger("vllm.kvmask").error("vLLM goes on without kvmask: %s", e)
