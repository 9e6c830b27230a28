"""A Mooncake master of this machine's own, on loopback."""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvmask.errors import ArgumentError, MissingDependencyError, StoreError
from kvmask.mooncake.hints import APT_HINT, PIP_HINT

if TYPE_CHECKING:
    import subprocess


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
    from kvmask.mooncake.process import start

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
