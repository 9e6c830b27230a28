"""What the fault programs share: a master that can be killed and started again at its address,
owners of memory in processes of their own, and engines whose every block is known by its key."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]
logging.getLogger("kvmask").addHandler(logging.NullHandler())
logging.getLogger("kvmask").propagate = False

from kvmask import Contract, KVLayout, KVTransfer, mooncake  # noqa: E402
from kvmask.mooncake.master import find_master  # noqa: E402
from kvmask.mooncake.process import start, stop  # noqa: E402

MIB = 1 << 20

_OWNER = """
import sys, time
from kvmask import mooncake
store = mooncake.connect(
    {"master_server_address": sys.argv[1], "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"},
    segment_bytes=int(sys.argv[2]), buffer_bytes=16 << 20, hostname="127.0.0.1")
print("ready", store.get_hostname(), flush=True)
time.sleep(1e6)
"""


def quiet() -> None:
    """Send the client's log nowhere: it has a line for each of thousands of expected failures."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def free_ports(count: int) -> list[int]:
    """Ports that were free just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class Master:
    """A master that can be killed, stopped, and started again at the same address."""

    def __init__(self, *flags: str) -> None:
        found = find_master()
        if found is None:
            raise SystemExit("no mooncake_master program on this machine")
        self._program = found
        self._flags = flags
        rpc, metrics = free_ports(2)
        self.address = f"127.0.0.1:{rpc}"
        self._ports = (rpc, metrics)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: Any = None
        self.begin()

    def begin(self) -> None:
        """Start it, and wait until its port answers."""
        rpc, metrics = self._ports
        command = [
            str(self._program),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
            "--enable_http_metadata_server=false",
            "--enable_metric_reporting=false",
            "--logtostderr",
            *self._flags,
        ]
        self.process = start(command, self._log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", rpc), 1.0).close()
                return
            time.sleep(0.05)
        raise SystemExit("the master did not start")

    def signal(self, number: int) -> None:
        """Send a signal to exactly this process."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self.signal(signal.SIGCONT)
        stop(self.process)
        self._log.close()


class Owner:
    """A process that gives memory to the pool."""

    def __init__(self, address: str, segment_bytes: int) -> None:
        # A process that was started here inherits this environment and the end of this process.
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-c", _OWNER, address, str(segment_bytes)]
        self.process = start(command, self._log.file, env=env)
        self.stopped = False
        self.name = ""

    def wait(self) -> Owner:
        """Wait until its memory is in the pool."""
        deadline = time.monotonic() + 60
        while not (found := re.search(r"^ready (\S+)\n", self._said(), re.MULTILINE)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no owner: {self._said()[-2000:]}")
            time.sleep(0.05)
        self.name = found[1]
        return self

    def _said(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def rss_mib(self) -> float:
        """Its resident memory."""
        return rss_mib(self.process.pid)

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self.process.poll() is None

    def pause(self) -> None:
        """Stop it where it is."""
        if self.alive:
            os.kill(self.process.pid, signal.SIGSTOP)
            self.stopped = True

    def go_on(self) -> None:
        """Let it go on."""
        if self.alive and self.stopped:
            os.kill(self.process.pid, signal.SIGCONT)
        self.stopped = False

    def close(self) -> None:
        """End it at once."""
        self.go_on()
        if self.alive:
            self.process.kill()
        self.process.wait(10)
        self._log.close()


def client(address: str, segment_bytes: int = 0) -> Any:
    """A client in this process."""
    return mooncake.connect(
        {"master_server_address": address, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"},
        segment_bytes=segment_bytes,
        buffer_bytes=16 * MIB,
        hostname="127.0.0.1",
    )


def content(name: bytes, size: int) -> np.ndarray:
    """The right bytes of a block, from what it is known by."""
    seed = int.from_bytes(name, "little")
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, size, dtype=np.uint8)


class Engine:
    """KV memory and a transfer over it. What a block must hold follows from group and digest.

    Args:
        store: A client.
        contract: Groups and keys.
        blocks: Blocks per group; block 0 is the null block.
        block_bytes: Per group.
        options: Of KVTransfer.
    """

    def __init__(
        self,
        store: Any,
        contract: Contract,
        blocks: int,
        block_bytes: list[int],
        **options: Any,
    ) -> None:
        self.contract = contract
        self.memory = [np.zeros((blocks, size), np.uint8) for size in block_bytes]
        self.layouts = [KVLayout.from_tensors([m], num_blocks=blocks) for m in self.memory]
        self.kv = KVTransfer(store, contract.bind(self.layouts), **options)

    def expected(self, group: int, index: int, digests: list[bytes]) -> np.ndarray:
        """The right bytes of a block of a request."""
        unit = self.contract.hash_block_size
        size = self.contract.groups[group].block_size
        last = digests[(index + 1) * size // unit - 1]
        return content(last + bytes([group]), self.memory[group].shape[1])

    def compute(self, digests: list[bytes], tables: list[list[int]]) -> None:
        """Write a request's blocks, as a model would."""
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                self.memory[group][block] = self.expected(group, index, digests)

    def wrong_bytes(
        self, digests: list[bytes], tables: list[list[int]], masks: Any, bad: Any = ()
    ) -> tuple[int, int]:
        """(wrong bytes, compared bytes) of the blocks that a load reports as loaded."""
        wrong = seen = 0
        for group, mask in enumerate(masks):
            for index, wanted in enumerate(mask):
                block = tables[group][index]
                if wanted and (group, block) not in bad:
                    found = self.memory[group][block]
                    wrong += int((found != self.expected(group, index, digests)).sum())
                    seen += found.size
        return wrong, seen


def failed_blocks(result: Any) -> set[tuple[int, int]]:
    """The blocks of a load that may not be used."""
    return {(f.group, f.block_id) for f in result.failures}


def in_threads(*functions: Any) -> list[Any]:
    """Call functions at the same time; returns their results in order."""
    results: list[Any] = [None] * len(functions)

    def call(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
