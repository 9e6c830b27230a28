"""The entries of ``kv_connector_extra_config``: whose they are, and those that nobody reads."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvmask.errors import ArgumentError

# kvmask's own. Their values are checked where they are used.
NAMES = (
    "lookup",
    "local_aware",
    "lookup_in",
    "lookup_deadline_ms",
    "hasher",
    "renew",
    "switch_file",
    "shadow",
    "on_unknown",
    "contract",
)
ON_UNKNOWN = ("stock", "refuse")

_MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"


def check_on_unknown(value: Any) -> str:
    """Refuse what is no answer to an unknown vLLM."""
    if value not in ON_UNKNOWN:
        raise ArgumentError(f"`on_unknown` must be one of {ON_UNKNOWN}, got {value!r}")
    return str(value)


def check_names(extra: Mapping[str, Any]) -> list[str]:
    """Find the entries that neither kvmask nor vLLM's Mooncake connectors read.

    Returns:
        Their names. vLLM, or what comes with it, may read them elsewhere.

    Raises:
        ArgumentError: One of them looks like an option of kvmask's with a typing error.
    """
    unread = unknown_names(extra)
    for name in unread:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8)
        if near:
            raise ArgumentError(
                f"`kv_connector_extra_config` has no entry {name!r}; did you mean {near[0]!r}?"
            )
    return unread


def said_of(unread: Iterable[str]) -> str:
    """What the log says of entries that nobody reads: what each may have been meant as, and all
    that there are.

    >>> said_of(["deadline"])[:81]
    "nobody reads 'deadline' (did you mean 'lookup_deadline_ms'?) of kv_connector_extra"
    """
    names = []
    for name in unread:
        near = " or ".join(repr(other) for other in _near(name))
        names.append(f"{name!r} (did you mean {near}?)" if near else repr(name))
    return (
        f"nobody reads {', '.join(names)} of kv_connector_extra_config; kvmask's own entries are "
        f"{', '.join(NAMES)}"
    )


def _near(name: str, most: int = 2) -> list[str]:
    """Options that a name is like, or shares a word with."""
    words = {word for word in re.split(r"[\W_]+", name.lower()) if len(word) > 3}
    shared = [other for other in NAMES if words & set(other.split("_"))]
    like = difflib.get_close_matches(name.lower(), NAMES, n=most, cutoff=0.5)
    return list(dict.fromkeys([*like, *shared]))[:most]


def unknown_names(extra: Mapping[str, Any]) -> list[str]:
    """Names that nobody is known to read."""
    rest = [str(name) for name in extra if name not in NAMES]
    if not rest:
        return []
    text = "\n".join(_sources())
    return [name for name in rest if not re.search(rf"[\"']{re.escape(name)}[\"']", text)]


def _sources() -> Iterable[str]:
    """The sources of vLLM's Mooncake connectors."""
    spec = importlib.util.find_spec(_MOONCAKE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).rglob("*.py")):
            yield path.read_text(encoding="utf-8", errors="replace")
