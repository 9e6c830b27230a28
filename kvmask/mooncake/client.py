"""Connect to a store. Only this module imports the `mooncake` package, when a function needs it."""

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

# `import kvmask` imports this module. So `socket` is imported only in the functions that use it.

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
# vLLM's variable for the host name that other machines use to reach this client.
HOSTNAME_ENV = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
# Log level of the client. Its library reads the variable when it is loaded.
LOG_ENV = "MC_LOG_LEVEL"


def import_store() -> Any:
    """Import and return the `mooncake.store` module.

    The client logs its set-up to stderr. To avoid that, this sets $MC_LOG_LEVEL to ERROR if it is
    not set. It has no effect if this process has already loaded the client.

    Raises:
        MissingDependencyError: The package or one of its system libraries is missing. The message
            contains the loader's message and the command that installs what is missing.
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
    """Return the address at which other machines reach this one. No packet is sent."""
    import socket

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 1))  # a documentation address: only the route is looked up
        return str(s.getsockname()[0])
    return "127.0.0.1"


def _wait_for_port(address: str, deadline: float) -> None:
    """Wait until something listens, or fail. Without this, `setup` fails after 90 s (0.3.13)."""
    import socket

    host, _, port = address.rpartition(":")
    if "://" in address or not (port.isascii() and port.isdigit()):
        return  # a high-availability address, which only Mooncake can resolve
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
    """Return checked settings from any source that `connect` accepts."""
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
        # In the file, "standalone-store" is the mode of a client that gives no memory to the pool.
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
    """Connect to a store and return a `mooncake.store.MooncakeDistributedStore` that is set up.

    Args:
        source: A running `local_master`, settings, or the path of vLLM's JSON file. None takes the
            path from $MOONCAKE_CONFIG_PATH.
        segment_bytes: Memory that this client gives to the pool, or 0. Overrides the value of the
            source (256 MiB for a local master).
        buffer_bytes: Size of the client's own buffer. Overrides the value of the source (64 MiB for
            a local master).
        hostname: The name at which other clients reach this one. The default is that of vLLM:
            $MOONCAKE_REQUESTER_LOCAL_HOSTNAME, or else this machine's address.
        timeout: Seconds to wait for the master to listen.

    Raises:
        ArgumentError: A setting is invalid. The message names its key.
        MissingDependencyError: Mooncake or a system library that it needs is missing.
        StoreError: No master answers, or the store's `setup` failed; `code` is what it returned.
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
