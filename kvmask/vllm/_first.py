"""Imports vLLM's connector, and nothing of kvmask.

The package does this before anything else: the plugin puts kvmask in place as soon as that
connector has been imported, and by then needs the rest of the package whole or not yet begun.
"""

import importlib
import importlib.util

_STORE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"
if importlib.util.find_spec(_STORE) is not None:
    importlib.import_module(_STORE + ".connector")
