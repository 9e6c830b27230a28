"""The Mooncake store: connecting to one, running one on this machine, and what its codes mean.

The `mooncake` package is imported only by `connect`, so masks, keys and addresses work without it.

Configuration is the JSON file that vLLM's Mooncake connectors read (vLLM 0.32, its shared Mooncake
store settings). Keys, all optional but the master's address:

    metadata_server        text, "" by default; "P2PHANDSHAKE" needs no extra server
    master_server_address  "host:port", or an HA address with a scheme such as "etcd://..."
    protocol               "rdma" by default; "tcp" works everywhere
    device_name            RDMA device names, "" by default
    mode                   "embedded" (this process gives memory to the pool) or "standalone-store"
    global_segment_size    bytes given to the pool: 4 GiB by default, 0 in standalone-store mode
    local_buffer_size      bytes of the client's own buffer, 4 GiB by default
    enable_offload         the pool has a disk tier
    tenant_id              text, "default" by default

A size is a number of bytes or text such as "4GB", "512 MB", "1.5kb"; units are powers of 1024.
"""

import contextlib
import enum
import importlib
import importlib.util
import json
import os
import re
import reprlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvmask.errors import ArgumentError, MissingDependencyError, StoreError

if TYPE_CHECKING:
    import subprocess

# `import kvmask` brings this module in; what starts processes and opens sockets is imported by the
# functions that do, which halves its cost.

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
# vLLM's override of the name under which other machines reach this client.
HOSTNAME_ENV = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
# The client's own log level, read when its library is loaded.
LOG_ENV = "MC_LOG_LEVEL"
MAX_SIZE = (1 << 63) - 1
GIB = 1 << 30
MIB = 1 << 20
SYSTEM_PACKAGES = ("libibverbs1", "librdmacm1", "libnuma1")
PIP_HINT = (
    "install one build of Mooncake: pip install 'kvmask[mooncake-cpu]' (no CUDA), "
    "'kvmask[mooncake]' (CUDA 12) or 'kvmask[mooncake-cuda13]'"
)
APT_HINT = "install the system libraries: apt-get install " + " ".join(SYSTEM_PACKAGES)


class Code(enum.IntEnum):
    """What the store answers; `get` calls answer the number of bytes instead of `OK`.

    Names and numbers are those of Mooncake's public header, as measured on 0.3.13.post1.
    """

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    INVALID_KEY = -400
    WRITE_FAIL = -500
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    RPC_FAIL = -900
    UNAVAILABLE_IN_CURRENT_STATUS = -1010
    UNAVAILABLE_IN_CURRENT_MODE = -1011


def code_name(code: int) -> str:
    """Name a return code of the store.

    >>> code_name(-200), code_name(-12345)
    ('NO_AVAILABLE_HANDLE', 'UNKNOWN_CODE')
    """
    try:
        return Code(code).name
    except ValueError:
        return "UNKNOWN_CODE"


def is_pressure(code: int) -> bool:
    """True when the pool was full: the same put may work once something was evicted.

    >>> is_pressure(-200), is_pressure(-600)
    (True, False)
    """
    return code == Code.NO_AVAILABLE_HANDLE


def is_final(code: int) -> bool:
    """True when the same call fails again whatever time passes: the key or the sizes are wrong.

    >>> is_final(-600), is_final(-900)
    (True, False)
    """
    return code in (Code.INVALID_KEY, Code.INVALID_PARAMS, Code.UNAVAILABLE_IN_CURRENT_MODE)


def is_success(code: int) -> bool:
    """True when a put leaves the key in the store: written now, or already there.

    >>> is_success(0), is_success(-705), is_success(-200)
    (True, True, False)
    """
    return code in (Code.OK, Code.OBJECT_ALREADY_EXISTS)


_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(gb|mb|kb|b)?", re.ASCII)
_UNITS = {"gb": GIB, "mb": MIB, "kb": 1024, "b": 1}


def parse_size(value: object, name: str = "size") -> int:
    """Read a size in bytes as vLLM's configuration files write it.

    Args:
        value: A number of bytes, or text with an optional unit GB, MB, KB or B (powers of 1024).
        name: What error messages call it.

    Raises:
        ArgumentError: It is no such size, or it is negative.

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
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size = value
    # A comparison is False for NaN, and exact for integers of any length.
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
        ArgumentError: A value breaks a rule; the message names the key.
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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value > MAX_SIZE:
                raise ArgumentError(
                    f"`{name}` must be an integer up to 2**63 - 1, got {reprlib.repr(value)}"
                )
        if not isinstance(self.tenant_id, str):
            raise ArgumentError(f"`tenant_id` must be text, got {self.tenant_id!r}")
        if not self.master_server_address:
            raise ArgumentError("`master_server_address` must name the master as host:port, got ''")
        if self.mode not in ("embedded", "standalone-store"):
            raise ArgumentError(
                f"`mode` must be 'embedded' or 'standalone-store', got {self.mode!r}"
            )
        if self.local_buffer_size <= 0:
            raise ArgumentError(
                f"`local_buffer_size` must be above 0, got {self.local_buffer_size}"
            )
        if self.mode == "embedded" and self.global_segment_size <= 0:
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
        """Build from the parsed file; keys it does not know are ignored, as vLLM does."""
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
        """Read the JSON file that vLLM users name in $MOONCAKE_CONFIG_PATH."""
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


@dataclass(frozen=True)
class LocalMaster:
    """A running master of `local_master`.

    Attributes:
        address: Its RPC address, "127.0.0.1:port".
        metrics_url: Where it answers HTTP: /health, /metrics.
        pid: Its process id.
        log_path: Its log, while it runs: a file without a name, opened by way of /proc.
    """

    address: str
    metrics_url: str
    pid: int
    log_path: Path
    process: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self.process.poll() is None


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


def find_master() -> Path | None:
    """Return the `mooncake_master` program: the wheel's own, beside this Python, or on PATH."""
    import shutil

    spec = importlib.util.find_spec("mooncake")  # looks, does not import
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    # The launcher beside Python only executes the wheel's program.
    for folder in (*folders, Path(sys.executable).parent):
        candidate = folder / "mooncake_master"
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    found = shutil.which("mooncake_master")
    return Path(found) if found else None


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    import socket

    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _healthy(address: str, metrics_url: str) -> bool:
    import socket
    import urllib.request

    host, _, port = address.rpartition(":")
    # No proxy of the environment may stand between this process and loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError):
        with opener.open(f"{metrics_url}/health", timeout=1.0) as answer:
            ready: bool = answer.status == 200
        socket.create_connection((host, int(port)), 1.0).close()
        return ready
    return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End exactly this process: ask, then kill; at most about ten seconds."""
    import subprocess

    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _tail(path: Path, limit: int = 1500) -> str:
    return path.read_bytes()[-limit:].decode("utf-8", "replace").strip()


def _start(program: Path, args: Sequence[str], log: IO[bytes], timeout: float) -> LocalMaster:
    """Start one master and wait until it answers, or raise with the end of its log."""
    from kvmask import _process

    if not (program.is_file() and os.access(program, os.X_OK)):
        raise StoreError(f"`program` must be executable, got {program}")
    # Shared with the process that an earlier attempt started: begin anew.
    os.lseek(log.fileno(), 0, os.SEEK_SET)
    os.ftruncate(log.fileno(), 0)
    # The file has no name, so nothing is left of it when this process is killed.
    log_path = Path(f"/proc/{os.getpid()}/fd/{log.fileno()}")
    rpc, metrics = _free_ports(2)
    command = [
        str(program),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
        # Its third port, 8080 on all addresses by default; clients shake hands peer to peer.
        "--enable_http_metadata_server=false",
        "--enable_metric_reporting=false",
        "--logtostderr",
        *args,
    ]
    deadline = time.monotonic() + timeout
    try:
        process = _process.start(command, log)
    except OSError as error:
        raise StoreError(f"`program` must be startable, got {program}: {error}") from error
    address, metrics_url = f"127.0.0.1:{rpc}", f"http://127.0.0.1:{metrics}"
    try:
        while process.poll() is None:
            if _healthy(address, metrics_url):
                return LocalMaster(address, metrics_url, process.pid, log_path, process)
            if time.monotonic() > deadline:
                raise StoreError(
                    f"mooncake_master did not answer within {timeout} s; "
                    f"end of its log: {_tail(log_path)}"
                )
            time.sleep(0.02)
    except BaseException:
        _stop(process)
        raise
    text = _tail(log_path)
    if process.returncode == 126:
        raise StoreError(f"`program` must be executable, got {text}", 126)
    hint = f"; {APT_HINT}" if "shared librar" in text else ""
    raise StoreError(
        f"mooncake_master ended at start with status {process.returncode}; "
        f"end of its log: {text}{hint}",
        process.returncode,
    )


@contextlib.contextmanager
def local_master(
    *,
    program: str | os.PathLike[str] | None = None,
    lease_ms: int | None = None,
    args: Sequence[str] = (),
    timeout: float = 20.0,
) -> Iterator[LocalMaster]:
    """Run a Mooncake master of this machine's own on free loopback ports while the block runs.

    Exactly the started process is stopped at the end, also when the body raises. It is killed when
    this process ends in any other way, by SIGKILL for example; the thread that entered may end
    before.

    Args:
        program: The `mooncake_master` to run; by default the one of the installed wheel.
        lease_ms: How long a looked-up object is safe from eviction; None is the master's default.
        args: Further command line flags of the master, such as "--eviction_ratio=0.1".
        timeout: Seconds it may take to answer.

    Raises:
        MissingDependencyError: There is no such program.
        StoreError: It ended at start or did not answer; the message ends with its log.
        ArgumentError: `lease_ms` is not a positive number.
    """
    import shutil
    import tempfile

    if lease_ms is not None and (not isinstance(lease_ms, int) or lease_ms < 1):
        raise ArgumentError(f"`lease_ms` must be at least 1, got {lease_ms!r}")
    path = find_master() if program is None else Path(shutil.which(program) or program)
    if path is None:
        raise MissingDependencyError(f"no mooncake_master program found; {PIP_HINT}")
    flags = [*args, *([] if lease_ms is None else [f"--default_kv_lease_ttl={lease_ms}"])]
    with tempfile.TemporaryFile() as log:
        attempts = 3
        while True:
            try:
                master = _start(path.absolute(), flags, log, timeout)
                break
            except StoreError as error:
                attempts -= 1
                # Another process took one of the free ports in the moment between.
                if attempts == 0 or "Address already in use" not in str(error):
                    raise
        try:
            yield master
        finally:
            _stop(master.process)
