"""vLLM's plugin entry points. They import nothing of an engine, and act once it does."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from kvmask import switch

CONNECTOR = "KVMaskStoreConnector"
_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def vllm() -> None:
    """Put kvmask under vLLM's MooncakeStoreConnector when ``KVMASK_VLLM=1``.

    It is done when vLLM imports that connector, so a process without it is left as it is.
    ``KVMASK_LOOKUP`` chooses the lookup strategy. Whatever does not fit, or cannot be read, keeps
    vLLM's own functions, and the log says what and why. In any case the name of kvmask's own
    connector is made known to vLLM.
    """
    from kvmask.engines import after_import

    after_import(_FACTORY, _register)
    if _is_on(switch.SWITCH, "vLLM"):
        # Ray workers are started before the connector is imported.
        os.environ[switch.RAY_PREFIXES] = switch.ray_prefixes()
        after_import(_STORE, _install_vllm)


def _log() -> logging.Logger:
    return logging.getLogger("vllm.kvmask")


def _is_on(name: str, engine: str) -> bool:
    """Whether a switch is on. A value that says neither is logged, and is off."""
    on = switch.is_on(name)
    if on is None:
        _log().error(
            "%s goes on without kvmask: %s must be 1 or 0, got %r", engine, name, os.environ[name]
        )
    return bool(on)


def register(factory: Any) -> None:
    """Make kvmask's own connector known to vLLM's factory by its name.

    Inside MultiConnector the statistics of a part are looked up by name, whatever the module was
    that it came from.
    """
    if CONNECTOR not in factory._registry:
        factory.register_connector(CONNECTOR, "kvmask.vllm", CONNECTOR)


def _register() -> None:
    try:
        register(sys.modules[_FACTORY].KVConnectorFactory)
    except Exception as e:  # the import that this is part of is vLLM's
        _log().error("%s has no name in vLLM: %s: %s", CONNECTOR, type(e).__name__, e)


def _install_vllm() -> None:
    try:
        # The package itself may be at its first line: it imports the connector, too.
        from kvmask.vllm.placing import install

        install(os.environ.get(switch.LOOKUP, "staged"))
    except Exception as e:  # the import that this is part of is vLLM's
        _log().error("vLLM goes on without kvmask: %s: %s", type(e).__name__, e)


def ascend() -> None:
    """Put kvmask under vllm-ascend's AscendStore when ``KVMASK_ASCEND=1``.

    ``KVMASK_LOOKUP`` chooses the lookup strategy. It is done when vllm-ascend imports its worker,
    so an engine without AscendStore is left as it is. One line of the log says what is in place; a
    vllm-ascend that kvmask does not know keeps its own functions, and the log says what changed.
    """
    if not _is_on(switch.ASCEND, "AscendStore"):
        return
    from kvmask.engines import after_import

    after_import(
        "vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.pool_worker", _install_ascend
    )


def _install_ascend() -> None:
    try:
        from kvmask.ascend import install

        install(os.environ.get("KVMASK_LOOKUP", "staged"))
    except Exception as e:  # the import that this is part of is vllm-ascend's
        _log().error("AscendStore goes on without kvmask: %s: %s", type(e).__name__, e)
