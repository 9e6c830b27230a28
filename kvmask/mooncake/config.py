"""Settings of one client: the JSON file that vLLM's Mooncake connectors read.

The rules are those of vLLM 0.32's Mooncake store settings. All keys are optional, except the
master's address:

    metadata_server        text, "" by default; with "P2PHANDSHAKE" no extra server is needed
    master_server_address  "host:port", or an HA address with a scheme such as "etcd://..."
    protocol               "rdma" by default; "tcp" works everywhere
    device_name            RDMA device names, "" by default
    mode                   "embedded" (this process gives memory to the pool) or "standalone-store"
    global_segment_size    bytes given to the pool: 4 GiB by default, 0 in standalone-store mode
    local_buffer_size      bytes of the client's own buffer, 4 GiB by default
    enable_offload         true if the pool has a disk tier
    tenant_id              text, "default" by default

A size is a number of bytes, or text such as "4GB", "512 MB" or "1.5kb". Units are powers of 1024.
"""

import json
import operator
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmask._core import check_integer
from kvmask.errors import ArgumentError

MAX_SIZE = (1 << 63) - 1
GIB = 1 << 30
MIB = 1 << 20

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(gb|mb|kb|b)?", re.ASCII)
_UNITS = {"gb": GIB, "mb": MIB, "kb": 1024, "b": 1}


def parse_size(value: object, name: str = "size") -> int:
    """Return a size in bytes, written as in vLLM's configuration files.

    Args:
        value: A number of bytes, or text with an optional unit GB, MB, KB or B (powers of 1024).
        name: The name for error messages.

    Raises:
        ArgumentError: The value is not such a size, or it is negative.

    >>> parse_size("4GB"), parse_size("1.5 kb"), parse_size(4096)
    (4294967296, 1536, 4096)
    """
    size: float | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match:
            size = float(match[1]) * _UNITS[match[2] or "b"] if "." in match[1] else None
            if size is None and len(match[1]) <= 20:
                size = int(match[1]) * _UNITS[match[2] or "b"]
    elif isinstance(value, float):
        size = value
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        size = operator.index(value)
    # This comparison is False for NaN. For integers of any length it is exact.
    if size is None or not 0 <= size <= MAX_SIZE:
        shown = reprlib.repr(value)
        raise ArgumentError(
            f"`{name}` must be a number of bytes or text such as '4GB', got {shown}"
        )
    return int(size)


@dataclass(frozen=True)
class StoreConfig:
    """Settings of one client, with the names, defaults and rules of vLLM's configuration file.

    Raises:
        ArgumentError: A value is invalid. The message names its key.
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

    def __post_init__(self) -> None:
        for name in ("metadata_server", "master_server_address", "protocol", "device_name", "mode"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ArgumentError(f"`{name}` must be text, got {value!r}")
        for name in ("global_segment_size", "local_buffer_size"):
            size = check_integer(getattr(self, name), name, 0, MAX_SIZE)
            object.__setattr__(self, name, size)  # the dataclass is frozen
        if not isinstance(self.tenant_id, str):
            raise ArgumentError(f"`tenant_id` must be text, got {self.tenant_id!r}")
        if not self.master_server_address:
            raise ArgumentError("`master_server_address` must name the master as host:port, got ''")
        if self.mode not in ("embedded", "standalone-store"):
            raise ArgumentError(
                f"`mode` must be 'embedded' or 'standalone-store', got {self.mode!r}"
            )
        if self.local_buffer_size == 0:
            raise ArgumentError(
                f"`local_buffer_size` must be above 0, got {self.local_buffer_size}"
            )
        if self.mode == "embedded" and self.global_segment_size == 0:
            raise ArgumentError(
                "`global_segment_size` must be above 0 in mode 'embedded', "
                f"got {self.global_segment_size}"
            )
        if self.mode == "standalone-store" and self.global_segment_size != 0:
            raise ArgumentError(
                "`global_segment_size` must be 0 in mode 'standalone-store', "
                f"got {self.global_segment_size}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StoreConfig":
        """Create settings from the parsed file. Unknown keys are ignored, as in vLLM."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name in ("global_segment_size", "local_buffer_size"):
            if name in known:
                known[name] = parse_size(known[name], name)
        if "enable_offload" in known:
            known["enable_offload"] = bool(known["enable_offload"])
        if "tenant_id" in known:
            tenant = known["tenant_id"]
            if tenant is not None and not isinstance(tenant, str):
                raise ArgumentError(f"`tenant_id` must be text or null, got {tenant!r}")
            known["tenant_id"] = (tenant or "").strip() or "default"
        return cls(**known)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "StoreConfig":
        """Read a JSON file, such as the one that $MOONCAKE_CONFIG_PATH names for vLLM."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"`source` must be a readable JSON file, got {os.fspath(path)!r}: {error}"
            ) from error
        if not isinstance(values, dict):
            raise ArgumentError(
                f"`source` must hold one JSON object, got {type(values).__name__} "
                f"in {os.fspath(path)!r}"
            )
        return cls.from_mapping(values)
