"""The Mooncake store: connect to one, run one on this machine, and interpret its return codes.

The `mooncake` package is imported only by `connect`, so masks, keys and addresses work without it.
"""

from kvmask.mooncake.address import HOST_IP_ENV, HOSTNAME_ENV, advertised_address
from kvmask.mooncake.client import CONFIG_ENV, LOG_ENV, connect, import_store, load_settings
from kvmask.mooncake.codes import Code, code_name, is_final, is_pressure, is_success
from kvmask.mooncake.config import (
    GIB,
    MASTER_ENV,
    MAX_SIZE,
    MIB,
    MIN_SEGMENT,
    StoreConfig,
    parse_size,
)
from kvmask.mooncake.hints import APT_HINT, PIP_HINT, SYSTEM_PACKAGES
from kvmask.mooncake.master import LocalMaster, find_master, local_master
from kvmask.mooncake.policy import MooncakePolicy

__all__ = [
    "APT_HINT",
    "CONFIG_ENV",
    "GIB",
    "HOSTNAME_ENV",
    "HOST_IP_ENV",
    "LOG_ENV",
    "MASTER_ENV",
    "MAX_SIZE",
    "MIB",
    "MIN_SEGMENT",
    "PIP_HINT",
    "SYSTEM_PACKAGES",
    "Code",
    "LocalMaster",
    "MooncakePolicy",
    "StoreConfig",
    "advertised_address",
    "code_name",
    "connect",
    "find_master",
    "import_store",
    "is_final",
    "is_pressure",
    "is_success",
    "load_settings",
    "local_master",
    "parse_size",
]
