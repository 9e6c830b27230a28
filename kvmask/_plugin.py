"""vLLM's plugin entry points. They import nothing unless they are asked to act."""

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


def ascend() -> None:
    """Put kvmask under vllm-ascend's AscendStore when ``KVMASK_ASCEND=1``.

    ``KVMASK_LOOKUP`` chooses the lookup strategy. It is done when vllm-ascend imports its worker,
    so an engine without AscendStore is left as it is. One line of the log says what is in place; a
    vllm-ascend that kvmask does not know keeps its own functions, and the log says what changed.
    """
    if os.environ.get("KVMASK_ASCEND") != "1":
        return
    from kvmask.engines import after_import

    after_import(
        "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.pool_worker", _install_ascend
    )


def _install_ascend() -> None:
    log = logging.getLogger("vllm.kvmask")
    try:
        from kvmask.ascend import install

        install(os.environ.get("KVMASK_LOOKUP", "staged"))
    except Exception as e:  # the import that this is part of is vllm-ascend's
        log.error("AscendStore goes on without kvmask: %s: %s", type(e).__name__, e)
