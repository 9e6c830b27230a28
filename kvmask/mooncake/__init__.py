"""The Mooncake store: connect to one, run one on this machine, and interpret its return codes.

The `mooncake` package is imported only by `connect`, so masks, keys and addresses work without it.
"""

from kvmask.mooncake.client import CONFIG_ENV, HOSTNAME_ENV, LOG_ENV, connect, import_store
from kvmask.mooncake.codes import Code, code_name, is_final, is_pressure, is_success
from kvmask.mooncake.config import GIB, MAX_SIZE, MIB, StoreConfig, parse_size
from kvmask.mooncake.hints import APT_HINT, PIP_HINT, SYSTEM_PACKAGES
from kvmask.mooncake.master import LocalMaster, find_master, local_master
from kvmask.mooncake.policy import MooncakePolicy

__all__ = [
    "APT_HINT",
    "CONFIG_ENV",
    "GIB",
    "HOSTNAME_ENV",
    "LOG_ENV",
    "MAX_SIZE",
    "MIB",
    "PIP_HINT",
    "SYSTEM_PACKAGES",
    "Code",
    "LocalMaster",
    "MooncakePolicy",
    "StoreConfig",
    "code_name",
    "connect",
    "find_master",
    "import_store",
    "is_final",
    "is_pressure",
    "is_success",
    "local_master",
    "parse_size",
]
