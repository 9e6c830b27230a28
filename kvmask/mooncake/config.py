"""Settings of one client: the JSON file that vLLM's Mooncake connectors read, or the environment.

The rules are those of vLLM 0.32's Mooncake store settings. All keys are optional, except the
master's address:

    metadata_server        text; with "P2PHANDSHAKE" no extra server is needed
    master_server_address  "host:port", or "etcd://host:port;..." for masters that follow each other
    protocol               "rdma" by default; "tcp" works everywhere
    device_name            RDMA device names, "" by default
    mode                   "embedded" (this process gives memory to the pool) or "standalone-store"
    global_segment_size    bytes given to the pool: 4 GiB by default, 0 in standalone-store mode
    local_buffer_size      bytes of the client's own buffer, 4 GiB by default
    enable_offload         true if the pool has a disk tier
    tenant_id              text, "default" by default
    local_hostname         the address for others; a file's is not used, because vLLM ignores it

A size is a number of bytes, or text such as "4GB", "512 MB", "1.5kb" or "4g". Units are powers of
1024. What cannot work is refused here, before a client exists. What has one possible meaning is
mended, with a `StoreConfigWarning`.
"""

import operator
import os
import re
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmask._core import check_integer
from kvmask.errors import ArgumentError, StoreConfigWarning
from kvmask.mooncake.address import (
    HANDSHAKE,
    check_hostname,
    masked,
    master_endpoints,
    metadata_endpoints,
    shown,
)

MAX_SIZE = (1 << 63) - 1
GIB = 1 << 30
MIB = 1 << 20
# The store's allocator knows no smaller segment.
MIN_SEGMENT = 16 * MIB
# Names the master in a configuration without a file.
MASTER_ENV = "MOONCAKE_MASTER"
# All that the client of Mooncake 0.3.13 knows, whatever its build supports.
PROTOCOLS = frozenset(
    (
        *("ascend", "barex", "cxi", "cxl", "efa", "hip", "maca", "musa", "nvlink", "nvlink_intra"),
        *("nvmeof", "rdma", "rpc_only", "sunrise_link", "tcp", "ub", "ubshmem"),
    )
)

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]b?|b)?", re.ASCII)
_VLLM_UNITS = re.compile(r"[\d.]+\s*([kmg]?b)?", re.ASCII)
_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_TEXTS = (
    "metadata_server",
    "master_server_address",
    "protocol",
    "device_name",
    "mode",
    "local_hostname",
)
_SIZES = ("global_segment_size", "local_buffer_size")
# What Mooncake's own `setup` calls two of the keys.
_ALIASES = {"master_server_addr": "master_server_address", "rdma_devices": "device_name"}
# Keys of Mooncake's own reader that are like a key of vLLM's and mean something else.
_OTHER_NAMES = frozenset({"enable_ssd_offload"})
# Variables of Mooncake's own reader, and its defaults, which differ from those of vLLM's file.
_ENVIRONMENT = {
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER", HANDSHAKE),
    "master_server_address": (MASTER_ENV, ""),
    "protocol": ("MOONCAKE_PROTOCOL", "tcp"),
    "device_name": ("MOONCAKE_DEVICE", ""),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3355443200"),
    "local_buffer_size": ("MOONCAKE_LOCAL_BUFFER_SIZE", "1073741824"),
    "tenant_id": ("MOONCAKE_TENANT_ID", ""),
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME", ""),
}


def _warn(text: str) -> None:
    warnings.warn(text, StoreConfigWarning, stacklevel=2)


def _warn_of_misspelt(values: Mapping[str, Any]) -> None:
    """A key that nobody reads would silently leave the default in place."""
    import difflib  # `import kvmask` does not need it

    known = StoreConfig.__dataclass_fields__.keys() | _ALIASES | _OTHER_NAMES
    given = {_ALIASES.get(key, key) for key in values}
    missing = [name for name in StoreConfig.__dataclass_fields__ if name not in given]
    for key in values:
        if not isinstance(key, str) or key in known:
            continue
        if like := difflib.get_close_matches(key.lower(), missing, n=1, cutoff=0.85):
            _warn(f"{shown(key)} is not read: `{like[0]}` may be meant")


def parse_size(value: object, name: str = "size") -> int:
    """Return a size in bytes, written as vLLM's or Mooncake's configuration files write it.

    Args:
        value: A number of bytes, or text with an optional unit TB, GB, MB, KB, T, G, M, K or B
            (powers of 1024).
        name: The name for error messages.

    Raises:
        ArgumentError: The value is not such a size, or it is negative.

    >>> parse_size("4GB"), parse_size("1.5 kb"), parse_size("64m"), parse_size(4096)
    (4294967296, 1536, 67108864, 4096)
    """
    size: float | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match:
            unit = 1 << _SHIFTS[(match[2] or "b")[0]]
            size = float(match[1]) * unit if "." in match[1] else None
            if size is None and len(match[1]) <= 20:
                size = int(match[1]) * unit
    elif isinstance(value, float):
        size = value
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        size = operator.index(value)
    # This comparison is False for NaN. For integers of any length it is exact.
    if size is None or not 0 <= size <= MAX_SIZE:
        raise ArgumentError(
            f"`{name}` must be a number of bytes or text such as '4GB', got {reprlib.repr(value)}"
        )
    return int(size)


@dataclass(frozen=True)
class StoreConfig:
    """Settings of one client, with the names, defaults and rules of vLLM's configuration file.

    Args:
        metadata_server: Where clients find each other: "P2PHANDSHAKE", or the URL of a server.
        master_server_address: The master, as "host:port".
        protocol: "tcp", "rdma", "rpc_only" or another transport of Mooncake.
        device_name: Devices of the transport, joined by commas; "" lets Mooncake choose.
        mode: "embedded", or "standalone-store": then the client gives no memory to the pool.
        global_segment_size: Bytes of memory that this client gives to the pool.
        local_buffer_size: Bytes of this client's own buffer.
        enable_offload: The pool has a disk tier.
        tenant_id: Whose objects these are.
        local_hostname: The address that other clients reach this one by; "" finds one.

    Raises:
        ArgumentError: A value is invalid. The message names its key.

    Warns:
        StoreConfigWarning: A value was mended: blanks around it, a protocol in capitals, another
            case of P2PHANDSHAKE.
    """

    metadata_server: str = ""
    master_server_address: str = ""
    protocol: str = "rdma"
    device_name: str = ""
    mode: str = "embedded"
    global_segment_size: int = 4 * GIB
    local_buffer_size: int = 4 * GIB
    enable_offload: bool = False
    tenant_id: str = "default"
    local_hostname: str = ""

    def __repr__(self) -> str:
        """All values; an address without the password that it may hold."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["metadata_server"] = masked(self.metadata_server)
        return f"StoreConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ArgumentError(f"`{name}` must be text, got {shown(value)}")
            self._mend(name, value.strip(), "blanks around it are left out")
        if not isinstance(self.tenant_id, str):
            raise ArgumentError(f"`tenant_id` must be text, got {shown(self.tenant_id)}")
        for name in (*_TEXTS, "tenant_id"):
            if not getattr(self, name).isprintable():
                raise ArgumentError(
                    f"`{name}` must have printable characters only, "
                    f"got {shown(getattr(self, name))}"
                )
        for name in _SIZES:
            size = check_integer(getattr(self, name), name, 0, MAX_SIZE)
            object.__setattr__(self, name, size)  # the dataclass is frozen
        self._check_addresses()
        self._check_protocol()
        self._check_sizes()

    def _mend(self, name: str, value: str, what: str) -> None:
        given = getattr(self, name)
        if value != given:
            object.__setattr__(self, name, value)
            _warn(f"`{name}`: {what}, got {shown(given)}")

    def _check_addresses(self) -> None:
        if not self.master_server_address:
            raise ArgumentError("`master_server_address` must name the master as host:port, got ''")
        master_endpoints(self.master_server_address)
        if self.metadata_server.upper() == HANDSHAKE:
            self._mend("metadata_server", HANDSHAKE, f"{HANDSHAKE} is written in capitals")
        # vLLM's default is "", with which no client but one for rpc_only can be set up. `connect`
        # refuses it.
        if self.metadata_server:
            metadata_endpoints(self.metadata_server)
        if self.local_hostname:
            check_hostname(self.local_hostname, "local_hostname")

    def _check_protocol(self) -> None:
        self._mend("protocol", self.protocol.lower(), "protocols are written in small letters")
        if self.protocol not in PROTOCOLS:
            raise ArgumentError(
                f"`protocol` must be 'tcp', 'rdma' or another of Mooncake's, "
                f"got {shown(self.protocol)}"
            )
        if self.mode not in ("embedded", "standalone-store"):
            raise ArgumentError(
                f"`mode` must be 'embedded' or 'standalone-store', got {shown(self.mode)}"
            )

    def _check_sizes(self) -> None:
        if self.protocol == "rpc_only":
            # Such a client has nothing to move bytes with, and crashes when it gets memory.
            for name in _SIZES:
                if getattr(self, name):
                    raise ArgumentError(
                        f"`{name}` must be 0 for protocol 'rpc_only', got {getattr(self, name)}"
                    )
            return
        if self.local_buffer_size == 0:
            raise ArgumentError(
                f"`local_buffer_size` must be above 0, got {self.local_buffer_size}"
            )
        segment = self.global_segment_size
        if self.mode == "embedded" and segment == 0:
            raise ArgumentError(
                f"`global_segment_size` must be above 0 in mode 'embedded', got {segment}"
            )
        if self.mode == "standalone-store" and segment != 0:
            raise ArgumentError(
                f"`global_segment_size` must be 0 in mode 'standalone-store', got {segment}"
            )
        if 0 < segment < MIN_SEGMENT:
            raise ArgumentError(
                f"`global_segment_size` must be at least {MIN_SEGMENT} (16 MiB), which is the "
                f"smallest segment that the store can use, got {segment}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StoreConfig":
        """Create settings from the parsed file. Unknown keys are ignored, as in vLLM.

        A StoreConfigWarning names an unknown key that looks like a misspelt one.

        Two keys may have the names of Mooncake's own `setup`: `master_server_addr` and
        `rdma_devices`. The default of both sizes is 0 for protocol "rpc_only".

        Args:
            values: Names to values, as in the file.

        Returns:
            StoreConfig.

        Raises:
            ArgumentError: A value is invalid. The message names its key.
        """
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for alias, name in _ALIASES.items():
            if alias in values and name not in known:
                known[name] = values[alias]
        _warn_of_misspelt(values)
        protocol = known.get("protocol")
        if isinstance(protocol, str) and protocol.strip().lower() == "rpc_only":
            known = dict.fromkeys(_SIZES, 0) | known
        for name in _SIZES:
            if name in known:
                known[name] = parse_size(known[name], name)
        if "enable_offload" in known:
            known["enable_offload"] = bool(known["enable_offload"])
        if "tenant_id" in known:
            tenant = known["tenant_id"]
            if tenant is not None and not isinstance(tenant, str):
                raise ArgumentError(f"`tenant_id` must be text or null, got {shown(tenant)}")
            known["tenant_id"] = (tenant or "").strip() or "default"
        if known.get("local_hostname", "") is None:
            del known["local_hostname"]
        return cls(**known)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "StoreConfig":
        """Read a JSON file, such as the one that $MOONCAKE_CONFIG_PATH names for vLLM.

        Where Mooncake's own reader takes the file otherwise than vLLM's does, vLLM's rules hold,
        and a StoreConfigWarning names the key.

        Args:
            path: The file.

        Returns:
            StoreConfig.

        Raises:
            ArgumentError: It cannot be read, is no JSON object, or a value is invalid.
        """
        import json  # `import kvmask` does not need it

        try:
            values = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"the settings must be a readable JSON file, got {os.fspath(path)!r}: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error
        if not isinstance(values, dict):
            raise ArgumentError(
                f"the settings must hold one JSON object, got {type(values).__name__} "
                f"in {os.fspath(path)!r}"
            )
        if values.pop("local_hostname", None):
            _warn(
                "`local_hostname` of a file is not used, because vLLM ignores it: set "
                "$MOONCAKE_REQUESTER_LOCAL_HOSTNAME or $VLLM_HOST_IP"
            )
        for name in _SIZES:
            text = values.get(name)
            if isinstance(text, str) and not _VLLM_UNITS.fullmatch(text.strip().lower()):
                _warn(f"`{name}` is in a unit that vLLM's reader refuses, got {shown(text)}")
        for alias, name in _ALIASES.items():
            if alias in values and name not in values:
                _warn(f"`{alias}` is taken as `{name}`, which vLLM's reader needs")
        if isinstance(values.get("enable_offload"), str):
            offload = values["enable_offload"]
            _warn(f"`enable_offload` is text, which vLLM reads as {bool(offload)}, got {offload!r}")
        if values.get("enable_ssd_offload"):
            _warn("`enable_ssd_offload` is not used, because vLLM ignores it: see `enable_offload`")
        return cls.from_mapping(values)

    @classmethod
    def from_environment(cls) -> "StoreConfig":
        """Create settings from Mooncake's own variables, with its own defaults.

        These are $MOONCAKE_MASTER, $MOONCAKE_PROTOCOL (tcp), $MOONCAKE_DEVICE,
        $MOONCAKE_TE_META_DATA_SERVER (P2PHANDSHAKE), $MOONCAKE_GLOBAL_SEGMENT_SIZE (3200 MiB),
        $MOONCAKE_LOCAL_BUFFER_SIZE (1 GiB), $MOONCAKE_TENANT_ID and $MOONCAKE_LOCAL_HOSTNAME.
        With a segment of 0 the client gives no memory to the pool.
        """
        values: dict[str, Any] = {}
        for name, (variable, default) in _ENVIRONMENT.items():
            values[name] = os.environ.get(variable, default)
        if values["protocol"].strip().lower() == "rpc_only":
            for name in _SIZES:
                if _ENVIRONMENT[name][0] not in os.environ:
                    del values[name]
        else:
            if parse_size(values["global_segment_size"], "global_segment_size") == 0:
                values["mode"] = "standalone-store"
            if parse_size(values["local_buffer_size"], "local_buffer_size") == 0:
                # Mooncake's reader is also that of programs that only give memory.
                values["local_buffer_size"] = 16 * MIB
                _warn("`local_buffer_size`: a client that moves bytes gets 16 MiB, got 0")
        return cls.from_mapping(values)
