"""Start a Mooncake master on this machine's loopback interface."""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvmask._core import check_integer, shown
from kvmask.checks import check_timeout
from kvmask.errors import MissingDependencyError, StoreError
from kvmask.mooncake.hints import APT_HINT, PIP_HINT

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True)
class LocalMaster:
    """A running master, as `local_master` yields it.

    Attributes:
        address: Its RPC address, "127.0.0.1:port".
        metrics_url: The base URL of /health and /metrics.
        pid: Its process id.
        log_path: Its log, which exists while it runs. It is a path in /proc, because the file
            itself has no name.
    """

    address: str
    metrics_url: str
    pid: int
    log_path: Path
    process: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def alive(self) -> bool:
        """False after the process has ended."""
        return self.process.poll() is None


def find_master() -> Path | None:
    """Find the `mooncake_master` program: in the wheel, next to this Python, or on PATH."""
    import shutil

    spec = importlib.util.find_spec("mooncake")  # does not import it
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    # The launcher next to Python only executes the wheel's program.
    for folder in (*folders, Path(sys.executable).parent):
        candidate = folder / "mooncake_master"
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    found = shutil.which("mooncake_master")
    return Path(found) if found else None


def _free_ports(count: int) -> list[int]:
    """Return different ports that were free just now."""
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
    # Loopback must be reached directly, even if the environment sets a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(OSError):
        with opener.open(f"{metrics_url}/health", timeout=1.0) as answer:
            ready: bool = answer.status == 200
        socket.create_connection((host, int(port)), 1.0).close()
        return ready
    return False


def _tail(path: Path, limit: int = 1500) -> str:
    return path.read_bytes()[-limit:].decode("utf-8", "replace").strip()


def _start(program: Path, args: Sequence[str], log: IO[bytes], timeout: float) -> LocalMaster:
    """Start one master and wait until it answers. An error contains the end of its log."""
    from kvmask.mooncake.process import start, stop

    if not (program.is_file() and os.access(program, os.X_OK)):
        raise StoreError(f"`program` must be executable, got {program}")
    # An earlier attempt may have written to the same file, so empty it.
    os.lseek(log.fileno(), 0, os.SEEK_SET)
    os.ftruncate(log.fileno(), 0)
    # The file has no name, so it disappears even when this process is killed.
    log_path = Path(f"/proc/{os.getpid()}/fd/{log.fileno()}")
    rpc, metrics = _free_ports(2)
    command = [
        str(program),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics}",
        # This server would listen on port 8080 of all addresses. It is not needed here, because
        # the clients use peer-to-peer handshakes.
        "--enable_http_metadata_server=false",
        "--enable_metric_reporting=false",
        "--logtostderr",
        *args,
    ]
    deadline = time.monotonic() + timeout
    try:
        process = start(command, log)
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
        stop(process)
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
    """Run a Mooncake master on free loopback ports while the `with` block runs.

    At the end of the block only the process that it started is stopped, also if the block raises.
    A forked child leaves it alone. If this process ends in another way, for example by SIGKILL, the
    master is killed. It keeps running if only the thread that started it ends.

    Args:
        program: The `mooncake_master` to run. The default is that of the installed wheel.
        lease_ms: How long an object cannot be evicted after a lookup, in ms. None is the master's
            default, which is 10 s in Mooncake 0.3.13.
        args: Further command line flags of the master, such as "--eviction_ratio=0.1".
        timeout: Seconds to wait for its first answer.

    Yields:
        LocalMaster, while it runs.

    Raises:
        MissingDependencyError: There is no such program.
        StoreError: The master ended at its start, or did not answer. The message ends with its log.
        ArgumentError: `lease_ms` is below 1, or `timeout` is no number of seconds above 0.
        TypeError: An argument is of another kind.
    """
    import shutil
    import tempfile

    from kvmask.mooncake.process import stop

    if lease_ms is not None:
        lease_ms = check_integer(lease_ms, "lease_ms")
    if isinstance(args, str | bytes) or not all(isinstance(arg, str) for arg in args):
        raise TypeError(f"`args` must be a sequence of text, got {shown(args)}")
    check_timeout(timeout)
    path = find_master() if program is None else Path(shutil.which(program) or program)
    if path is None:
        raise MissingDependencyError(f"no mooncake_master program found; {PIP_HINT}")
    owner = os.getpid()
    flags = [*args, *([] if lease_ms is None else [f"--default_kv_lease_ttl={lease_ms}"])]
    with tempfile.TemporaryFile() as log:
        attempts = 3
        while True:
            try:
                master = _start(path.absolute(), flags, log, timeout)
                break
            except StoreError as error:
                attempts -= 1
                # Another process may have taken one of the free ports meanwhile.
                if attempts == 0 or "Address already in use" not in str(error):
                    raise
        try:
            yield master
        finally:
            if os.getpid() == owner:
                stop(master.process)
