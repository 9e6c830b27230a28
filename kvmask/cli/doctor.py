"""`kvmask doctor`: checks of this machine, one line each.

Two of them move bytes. `pool` asks the pool of the configuration and gives it no memory. `round
trip` uses a master of its own, so it may give memory and take it away again. Both let a second
process get what a first one put; see `trip`. What concerns vLLM is left out where there is none.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from kvmask import mooncake, switch
from kvmask.cli import engines, trip
from kvmask.errors import ArgumentError, KVMaskError, StoreError

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "libcurl.so.4")
DISTRIBUTIONS = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)

Check = tuple[str, bool, str]


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}, {sys.executable}"


def _extension() -> str:
    import kvmask

    coord = kvmask.Coordinator(
        [kvmask.FullAttention(64), kvmask.SlidingWindow(16, window=32)], hash_block_size=16
    )
    mask = coord.store_mask(128)[1]
    if mask is None or mask.indices() != [2, 3, 6, 7]:
        raise KVMaskError(f"the core's mask must be 2-3,6-7, got {mask!r}")
    return f"kvmask {kvmask.__version__}, {kvmask._core.__file__}"


def _libraries() -> str:
    missing = []
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            missing.append(str(error))
    if missing:
        raise KVMaskError(f"{'; '.join(missing)}; {mooncake.APT_HINT}")
    return ", ".join(LIBRARIES)


def _package() -> str:
    mooncake.import_store()
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(found) > 1:  # they install the same files, so one overwrites the other
        raise KVMaskError(f"only one build of Mooncake may be installed, got {', '.join(found)}")
    return found[0] if found else "imported, from no installed distribution"


def _program() -> str:
    path = mooncake.find_master()
    if path is None:
        raise KVMaskError(f"no mooncake_master program found; {mooncake.PIP_HINT}")
    return str(path)


def _key() -> str:
    return f"kvmask-doctor/{uuid.uuid4().hex}"


def _two_processes(
    settings: mooncake.StoreConfig, hostname: str | None, limit: float
) -> tuple[str, bool]:
    """Let one process put an object and another get it.

    Returns:
        The address from which the second one got it, and whether rdma fell back to TCP.

    Raises:
        StoreError: One of them failed. Its code is that of the call, if there was one.
    """
    task = {
        "settings": vars(settings),
        "hostname": hostname,
        "timeout": min(limit / 2, 10.0),
        "key": _key(),
        "data": os.urandom(trip.SIZE).hex(),
    }
    with ExitStack() as stack:
        first = trip.Child({**task, "role": "put"}, limit)
        stack.callback(first.stop)
        endpoint = first.result().get("endpoint", "")
        second = trip.Child({**task, "role": "get"}, limit)
        stack.callback(second.stop)
        try:
            second.result()
        except StoreError as error:
            raise StoreError(
                f"a second process must get what the first put at {endpoint}: {error}", error.code
            ) from error
        fell_back = settings.protocol == "rdma" and trip.TCP_LINE in first.text()
        return endpoint, fell_back


def _loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    return host.startswith("127.") or host in ("::1", "localhost")


def _without_memory(settings: mooncake.StoreConfig) -> mooncake.StoreConfig:
    """Return the settings of a client that gives the pool nothing and takes little itself."""
    if settings.protocol == "rpc_only":
        return settings
    return dataclasses.replace(
        settings,
        mode="standalone-store",
        global_segment_size=0,
        local_buffer_size=min(settings.local_buffer_size, 16 * mooncake.MIB),
    )


def _ask_pool(settings: mooncake.StoreConfig, limit: float) -> str:
    """Put an object into the pool of the configuration, without giving the pool memory.

    Memory that is given is used at once, also by others, and what they put there is lost when this
    program ends. So this gives none, not even to a pool that seems to have none yet.
    """
    try:
        endpoint, _ = _two_processes(_without_memory(settings), None, limit)
    except StoreError as error:
        if error.code != mooncake.Code.NO_AVAILABLE_HANDLE or settings.mode != "embedded":
            raise
        return "the master answers; nothing was put, for the pool has no memory yet or is full"
    if not endpoint:
        return "the master answers; a client for calls only moves no bytes"
    return f"{trip.SIZE} bytes put, found and got by a second process, from {endpoint}"


def _own_trip(settings: mooncake.StoreConfig | None, limit: float) -> str:
    """Let this machine give memory to a pool of its own, and others get what lies there.

    It has everything of the configuration but the master: protocol, devices, metadata server, and
    the address that this machine gives to others.
    """
    if settings is not None and settings.protocol == "rpc_only":
        return "not made: protocol 'rpc_only' moves no bytes"
    with mooncake.local_master() as own:
        hostname = None
        if settings is None:
            hostname = None if _named() else "127.0.0.1"
            settings = mooncake.StoreConfig("P2PHANDSHAKE", own.address, "tcp")
        mine = dataclasses.replace(
            settings,
            master_server_address=own.address,
            mode="embedded",
            global_segment_size=mooncake.MIN_SEGMENT,
            local_buffer_size=16 * mooncake.MIB,
            tenant_id="default",
        )
        endpoint, fell_back = _two_processes(mine, hostname, limit)
    text = f"{trip.SIZE} bytes put, found and got back, by a second process too, from {endpoint}"
    if fell_back:
        text += "; rdma fell back to TCP, because the client found no device"
    # With a metadata server this is only a name, and that server knows the address.
    handshake = mine.metadata_server == "P2PHANDSHAKE"
    if handshake and _loopback(endpoint) and hostname is None:
        text += "; only this machine reaches that address"
    return text


def _named() -> bool:
    names = (mooncake.HOSTNAME_ENV, mooncake.HOST_IP_ENV)
    return any(os.environ.get(name, "").strip() for name in names)


def switched_on() -> bool:
    """Whether the environment says that kvmask is to act in an engine."""
    return switch.is_on(switch.SWITCH) is not False


def run(config: str | None = None, limit: float = 60.0) -> Iterator[Check]:
    """Run all checks in order. A check runs even if earlier ones failed.

    Args:
        config: Path of the store's configuration. None takes the path from $MOONCAKE_CONFIG_PATH,
            or Mooncake's own variables. If there are none, only a local master is used.
        limit: Seconds that each process of a round trip may take.

    Yields:
        The name of the check, whether it passed, and what was found or is wrong.
    """
    path = config or os.environ.get(mooncake.CONFIG_ENV) or None
    given = path is not None or bool(os.environ.get(mooncake.MASTER_ENV))
    settings: mooncake.StoreConfig | None = None

    def configuration() -> str:
        nonlocal settings
        if not given:
            return (
                f"${mooncake.CONFIG_ENV} and ${mooncake.MASTER_ENV} are not set: "
                "a local master is used"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                settings = mooncake.load_settings(path)
            except KVMaskError as error:
                # A misspelt key is often why another one is missing.
                notes = [f"note: {warning.message}" for warning in caught]
                raise ArgumentError("; ".join([str(error), *notes])) from error
        source = path or f"${mooncake.MASTER_ENV}"
        text = f"{source}: master {settings.master_server_address}, {settings.protocol}"
        return "; ".join([text, *(f"note: {warning.message}" for warning in caught)])

    def read() -> mooncake.StoreConfig | None:
        if given and settings is None:
            raise KVMaskError("the configuration is wrong, see above")
        return settings

    def pool() -> str:
        known = read()
        assert known is not None  # this check is left out when no pool is named
        return _ask_pool(known, limit)

    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("extension", _extension),
        ("libraries", _libraries),
        ("mooncake", _package),
        ("master", _program),
        ("vllm", lambda: engines.check_vllm(limit)),
        ("plugin", engines.check_plugin),
        ("config", configuration),
        ("pool", pool),
        ("round trip", lambda: _own_trip(read(), limit)),
    ]
    left_out = set() if given else {"pool"}
    if engines.vllm_version() is None and not switched_on():
        left_out |= {"vllm", "plugin"}  # this machine serves no engine
    checks = [check for check in checks if check[0] not in left_out]
    for name, check in checks:
        try:
            yield name, True, check()
        except (KVMaskError, OSError) as error:
            yield name, False, str(error)
