"""The environment variables that switch kvmask on in an engine, and what may hide its plugin.

Read by the plugin in every process of the engine, and by ``kvmask doctor``. Imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SWITCH = "KVMASK_VLLM"
ASCEND = "KVMASK_ASCEND"
LOOKUP = "KVMASK_LOOKUP"
#: The plugin's name, and vLLM's list of the plugins that it may load.
PLUGIN = "kvmask"
ALLOWED = "VLLM_PLUGINS"
#: Environment variables with one of these prefixes reach vLLM's Ray workers.
RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"

_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"", "0", "false", "no", "off"})


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool | None:
    """Whether a switch is on; None when its value says neither."""
    value = (os.environ if environ is None else environ).get(name, "").strip().lower()
    return True if value in _ON else False if value in _OFF else None


def allow_list(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The plugins that vLLM may load; None: all."""
    value = (os.environ if environ is None else environ).get(ALLOWED)
    return None if value is None else value.split(",")


def ray_prefixes(environ: Mapping[str, str] | None = None) -> str:
    """The prefixes of variables that vLLM's Ray workers get, kvmask's among them."""
    value = (os.environ if environ is None else environ).get(RAY_PREFIXES, "")
    return ",".join(sorted({part.strip() for part in value.split(",")} - {""} | {"KVMASK_"}))
