"""Connecting to a store. The `mooncake` package is imported here, and only when asked for."""

import contextlib
import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from kvmask.errors import ArgumentError, MissingDependencyError, StoreError
from kvmask.mooncake.codes import Code, code_name
from kvmask.mooncake.config import MIB, StoreConfig, parse_size
from kvmask.mooncake.hints import APT_HINT, PIP_HINT
from kvmask.mooncake.master import LocalMaster

# What opens sockets is imported by the functions that do: `import kvmask` brings this module in.

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
# vLLM's override of the name under which other machines reach this client.
HOSTNAME_ENV = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
# The client's own log level, read when its library is loaded.
LOG_ENV = "MC_LOG_LEVEL"


def import_store() -> Any:
    """Import and return the `mooncake.store` module.

    The client logs each line of its set-up to stderr. Unless $MC_LOG_LEVEL is set, it is set to
    ERROR here, which works where this process has not loaded the client before.

    Raises:
        MissingDependencyError: The package or one of its system libraries is missing. The text
            and the cause are the loader's own; the command that installs it is named.
    """
    os.environ.setdefault(LOG_ENV, "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("mooncake"):
            hint = PIP_HINT
        elif re.search(r"libcuda(rt)?\.so", str(error)):
            hint = f"this build of Mooncake needs CUDA; without it {PIP_HINT}"
        elif re.search(r"lib(ibverbs|rdmacm|numa)\.so", str(error)):
            hint = APT_HINT
        else:
            hint = f"{PIP_HINT}; {APT_HINT}"
        raise MissingDependencyError(f"{error}; {hint}") from error


def _local_ip() -> str:
    """Return the address other machines reach this one at; no packet is sent."""
    import socket

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 1))  # a documentation address: only the route is looked up
        return str(s.getsockname()[0])
    return "127.0.0.1"


def _wait_for_port(address: str, deadline: float) -> None:
    """Fail early when nothing listens: the store's own set-up takes 90 s to say so (0.3.13)."""
    import socket

    host, _, port = address.rpartition(":")
    if "://" in address or not (port.isascii() and port.isdigit()):
        return  # a high-availability address: only Mooncake knows how to resolve it
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ArgumentError(
            f"`master_server_address` must have a port from 1 to 65535, got {address!r}"
        )
    host = host.strip("[]")
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, int(port)), max(0.05, min(left, 2.0))).close()
            return
        except UnicodeError as error:
            raise ArgumentError(
                f"`master_server_address` must name a host, got {address!r}: {error}"
            ) from error
        except OSError as error:
            if time.monotonic() + 0.05 >= deadline:
                raise StoreError(
                    f"no Mooncake master answers at `master_server_address` {address}: {error}",
                    int(Code.RPC_FAIL),
                ) from error
            time.sleep(0.05)


def _resolve(source: object, segment_bytes: int | None, buffer_bytes: int | None) -> StoreConfig:
    """Turn any source that `connect` takes into checked settings."""
    values: dict[str, Any]
    if isinstance(source, LocalMaster):
        values = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": source.address,
            "protocol": "tcp",
            "global_segment_size": 256 * MIB,
            "local_buffer_size": 64 * MIB,
        }
    elif isinstance(source, StoreConfig):
        values = dict(vars(source))
    elif isinstance(source, Mapping):
        values = dict(source)
    elif source is None or isinstance(source, str | os.PathLike):
        path = source or os.environ.get(CONFIG_ENV)
        if not path:
            raise ArgumentError(
                f"`source` must be given when ${CONFIG_ENV} is not set, got {source!r}"
            )
        values = dict(vars(StoreConfig.from_file(path)))
    else:
        raise ArgumentError(
            "`source` must be a LocalMaster, a StoreConfig, a mapping or a path, "
            f"got {type(source).__name__}"
        )
    if buffer_bytes is not None:
        values["local_buffer_size"] = parse_size(buffer_bytes, "buffer_bytes")
    if segment_bytes is not None:
        values["global_segment_size"] = parse_size(segment_bytes, "segment_bytes")
        # A client that gives no memory is what the file calls standalone-store.
        values["mode"] = "embedded" if values["global_segment_size"] else "standalone-store"
    return StoreConfig.from_mapping(values)


def connect(
    source: "LocalMaster | StoreConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
    *,
    segment_bytes: int | None = None,
    buffer_bytes: int | None = None,
    hostname: str | None = None,
    timeout: float = 10.0,
) -> Any:
    """Connect to a store and return a `mooncake.store.MooncakeDistributedStore`, set up.

    Args:
        source: A running `local_master`, settings, a path to vLLM's JSON file, or None for the
            path in $MOONCAKE_CONFIG_PATH.
        segment_bytes: Memory this client gives to the pool; 0 gives none. Overrides the source
            (256 MiB for a local master).
        buffer_bytes: The client's own buffer. Overrides the source (64 MiB for a local master).
        hostname: The name other clients reach this one at; by default as vLLM has it,
            $MOONCAKE_REQUESTER_LOCAL_HOSTNAME or this machine's address.
        timeout: Seconds to wait for a master that does not listen yet.

    Raises:
        ArgumentError: The settings break a rule; the message names the key.
        MissingDependencyError: Mooncake or a system library it needs is missing.
        StoreError: No master answers, or the store refused to be set up, with its `code`.
    """
    config = _resolve(source, segment_bytes, buffer_bytes)
    module = import_store()
    _wait_for_port(config.master_server_address, time.monotonic() + timeout)
    if hostname is None:
        local = isinstance(source, LocalMaster)
        hostname = "127.0.0.1" if local else os.environ.get(HOSTNAME_ENV, "").strip() or _local_ip()
    tenant = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
    store = module.MooncakeDistributedStore()
    code = store.setup(
        hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name,
        config.master_server_address,
        **tenant,
    )
    if code != 0:
        raise StoreError(
            f"the store's setup must return 0, got {code} ({code_name(code)}) for protocol "
            f"{config.protocol!r}, master {config.master_server_address}, segment "
            f"{config.global_segment_size} and buffer {config.local_buffer_size} bytes",
            code,
        )
    return store
