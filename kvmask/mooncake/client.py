"""Connect to a store. Only this module imports the `mooncake` package, when a function needs it."""

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmask.checks import check_timeout
from kvmask.errors import ArgumentError, MissingDependencyError, StoreError
from kvmask.mooncake.address import advertised_address, check_hostname, masked
from kvmask.mooncake.codes import code_name
from kvmask.mooncake.config import MASTER_ENV, MIB, StoreConfig, parse_size
from kvmask.mooncake.forks import spare_in_forks
from kvmask.mooncake.hints import APT_HINT, PIP_HINT
from kvmask.mooncake.master import LocalMaster
from kvmask.mooncake.probe import check_servers

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
# Log level of the client. Its library reads the variable when it is loaded.
LOG_ENV = "MC_LOG_LEVEL"
# How often the client tries to set itself up, each time on another port. Its default is 20, and
# each try of one that cannot succeed takes a second or more.
RETRIES_ENV = "MC_STORE_CLIENT_SETUP_RETRIES"
HUGEPAGE_ENV = "MC_STORE_USE_HUGEPAGE"


def import_store() -> Any:
    """Import and return the `mooncake.store` module.

    The client logs its set-up to stderr. To avoid that, this sets $MC_LOG_LEVEL to ERROR if it is
    not set. It has no effect if this process has already loaded the client. It also sets
    $MC_STORE_CLIENT_SETUP_RETRIES to 3, if it is not set: the client's default is 20.

    Raises:
        MissingDependencyError: The package or one of its system libraries is missing. The message
            contains the loader's message and the command that installs what is missing.
    """
    os.environ.setdefault(LOG_ENV, "ERROR")
    os.environ.setdefault(RETRIES_ENV, "3")
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


def load_settings(source: Mapping[str, Any] | str | os.PathLike[str] | None) -> StoreConfig:
    """Return the settings of a mapping, of a file, or of the environment.

    Args:
        source: None takes the file that $MOONCAKE_CONFIG_PATH names. Without one it takes
            $MOONCAKE_MASTER and Mooncake's other variables.

    Raises:
        ArgumentError: A setting is invalid, or there are none.
    """
    if isinstance(source, Mapping):
        return StoreConfig.from_mapping(source)
    path = source or os.environ.get(CONFIG_ENV)
    if path:
        return StoreConfig.from_file(path)
    if os.environ.get(MASTER_ENV):
        return StoreConfig.from_environment()
    raise ArgumentError(
        f"`source` must be given when ${CONFIG_ENV} and ${MASTER_ENV} are not set, got {source!r}"
    )


def _resolve(source: object, segment_bytes: int | None, buffer_bytes: int | None) -> StoreConfig:
    """Return checked settings from any source that `connect` accepts."""
    if isinstance(source, LocalMaster):
        config = StoreConfig(
            metadata_server="P2PHANDSHAKE",
            master_server_address=source.address,
            protocol="tcp",
            global_segment_size=256 * MIB,
            local_buffer_size=64 * MIB,
            local_hostname="127.0.0.1",
        )
    elif isinstance(source, StoreConfig):
        config = source
    elif source is None or isinstance(source, Mapping | str | os.PathLike):
        config = load_settings(source)
    else:
        raise ArgumentError(
            "`source` must be a LocalMaster, a StoreConfig, a mapping or a path, "
            f"got {type(source).__name__}"
        )
    changes: dict[str, Any] = {}
    if buffer_bytes is not None:
        changes["local_buffer_size"] = parse_size(buffer_bytes, "buffer_bytes")
    if segment_bytes is not None:
        changes["global_segment_size"] = parse_size(segment_bytes, "segment_bytes")
        # In the file, "standalone-store" is the mode of a client that gives no memory to the pool.
        changes["mode"] = "embedded" if changes["global_segment_size"] else "standalone-store"
    return dataclasses.replace(config, **changes)


def _memory_hint() -> str:
    """Say what may be wrong when there is no memory for the sizes."""
    if HUGEPAGE_ENV not in os.environ:
        return ""
    pages = ""
    with contextlib.suppress(OSError):
        pages = Path("/proc/sys/vm/nr_hugepages").read_text(encoding="ascii").strip()
    return f"; ${HUGEPAGE_ENV} is set, and vm.nr_hugepages reserves {pages or 'an unknown number'}"


def connect(
    source: "LocalMaster | StoreConfig | Mapping[str, Any] | str | os.PathLike[str] | None" = None,
    *,
    segment_bytes: int | None = None,
    buffer_bytes: int | None = None,
    hostname: str | None = None,
    timeout: float = 10.0,
) -> Any:
    """Connect to a store and return a `mooncake.store.MooncakeDistributedStore` that is set up.

    The store belongs to this process. In a child that was forked, its calls can hang.

    Args:
        source: A running `local_master`, settings, or the path of vLLM's JSON file. None takes the
            path from $MOONCAKE_CONFIG_PATH, or without it Mooncake's own variables, such as
            $MOONCAKE_MASTER.
        segment_bytes: Memory that this client gives to the pool, or 0. Overrides the value of the
            source (256 MiB for a local master).
        buffer_bytes: Size of the client's own buffer. Overrides the value of the source (64 MiB for
            a local master).
        hostname: The name at which other clients reach this one. The default is that of vLLM:
            $MOONCAKE_REQUESTER_LOCAL_HOSTNAME, $VLLM_HOST_IP, or this machine's address. For a
            local master it is 127.0.0.1.
        timeout: Seconds to wait for the master and the metadata server, for both together.

    Raises:
        ArgumentError: A setting is invalid. The message names its key.
        MissingDependencyError: Mooncake or a system library that it needs is missing.
        StoreError: A server does not answer, or the store's `setup` failed; `code` is what it
            returned. There may be no memory for the two sizes.

    Warns:
        StoreConfigWarning: A setting was mended, or vLLM's reader takes it otherwise.
    """
    check_timeout(timeout)
    config = _resolve(source, segment_bytes, buffer_bytes)
    if hostname is not None:
        hostname = check_hostname(hostname, "hostname")
    elif isinstance(source, LocalMaster):
        hostname = config.local_hostname
    else:
        hostname = advertised_address(config.local_hostname)
    module = import_store()
    check_servers(config, min(timeout, 1e6))
    tenant = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
    sizes = (
        f"a segment (`global_segment_size`) of {config.global_segment_size} bytes and a buffer "
        f"(`local_buffer_size`) of {config.local_buffer_size} bytes"
    )
    store = module.MooncakeDistributedStore()
    try:
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
    except MemoryError as error:
        raise StoreError(
            f"the store must get memory for {sizes}, got {error!r}{_memory_hint()}"
        ) from error
    if code != 0:
        raise StoreError(
            f"the store's setup must return 0, got {code} ({code_name(code)}) for protocol "
            f"{config.protocol!r}, `master_server_address` {config.master_server_address}, "
            f"`metadata_server` {masked(config.metadata_server)}, {sizes}, at {hostname}"
            f"{_memory_hint()}",
            code,
        )
    spare_in_forks(store)
    return store
