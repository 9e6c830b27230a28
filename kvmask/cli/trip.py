"""The two processes of doctor's round trip: one puts an object, another gets it.

Each is a process of its own, because Mooncake's client may end its process: with a signal, or
because it waits for ever. Its output is a file that doctor reads; one line of it is the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmask import mooncake
from kvmask.errors import KVMaskError, StoreError

SIZE = 4096
# Begins the line of the result.
MARK = "kvmask-trip: "
# The client logs this when it moves bytes over TCP.
TCP_LINE = "TcpTransport: listen"
# Lines of the client's log that begin with these letters and a date are errors and warnings.
_SEVERE = ("E", "F", "W")
# Arguments: the folder of this package, and the task. -P leaves the working directory out.
_START = (
    "import sys; root, task = sys.argv[1:]; root in sys.path or sys.path.insert(0, root); "
    "from kvmask.cli import trip; trip.child(task)"
)


def expect(call: str, answer: Any, right: Any) -> None:
    """Raise StoreError unless a call's answer is the right one."""
    if answer != right:
        code = answer[0] if isinstance(answer, list) and answer else answer
        name = mooncake.code_name(code) if isinstance(code, int) and code < 0 else ""
        raise StoreError(
            f"{call} must answer {right}, got {answer} {name}".rstrip(),
            code if isinstance(code, int) else None,
        )


@contextlib.contextmanager
def _registered(store: Any, *buffers: ctypes.Array[ctypes.c_char]) -> Iterator[list[int]]:
    addresses: list[int] = []
    try:
        for buffer in buffers:
            address = ctypes.addressof(buffer)
            expect("register_buffer", store.register_buffer(address, SIZE), 0)
            addresses.append(address)
        yield addresses
    finally:
        for address in addresses:
            store.unregister_buffer(address)


def put(store: Any, key: str, data: bytes) -> None:
    """Put one object, find it and get it back.

    Raises:
        StoreError: A call returned a wrong result, or the bytes differ.
    """
    source = ctypes.create_string_buffer(data, SIZE)
    target = ctypes.create_string_buffer(SIZE)
    with _registered(store, source, target) as (here, there):
        expect("put", store.batch_put_from_multi_buffers([key], [[here]], [[SIZE]]), [0])
        expect("exists", store.batch_is_exist([key, key + "/absent"]), [1, 0])
        _get(store, key, there, target, data)


def get(store: Any, key: str, data: bytes) -> None:
    """Get one object that another process has put.

    Raises:
        StoreError: A call returned a wrong result, or the bytes differ.
    """
    target = ctypes.create_string_buffer(SIZE)
    with _registered(store, target) as (there,):
        expect("exists", store.batch_is_exist([key]), [1])
        _get(store, key, there, target, data)


def _get(
    store: Any, key: str, there: int, target: ctypes.Array[ctypes.c_char], data: bytes
) -> None:
    expect("get", store.batch_get_into_multi_buffers([key], [[there]], [[SIZE]]), [SIZE])
    if target.raw != data:
        raise StoreError(f"get must return the bytes that were put, key {key}")


def _endpoint(store: Any, key: str) -> str:
    """Return where other clients get an object: host and port of the one that has it."""
    try:
        replica = store.get_replica_desc(key)[0].get_memory_descriptor()
        return str(replica.buffer_descriptor.transport_endpoint)
    except (AttributeError, IndexError):  # another release of the client
        return str(store.get_hostname())


def _remove(store: Any, key: str) -> None:
    """Leave nothing behind, though the lookups have given the object a lease."""
    with contextlib.suppress(TypeError):  # another release of the client
        store.remove(key, True)


def child(text: str) -> None:
    """Run one of the two processes. The one that puts keeps its client until it is stopped."""
    task = json.loads(text)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            config = mooncake.StoreConfig(**task["settings"])
            store = mooncake.connect(config, hostname=task["hostname"], timeout=task["timeout"])
            stack.callback(store.close)
            data = bytes.fromhex(task["data"])
            if config.protocol == "rpc_only":
                expect("exists", store.batch_is_exist([task["key"]]), [0])
            elif task["role"] == "put":
                stack.callback(_remove, store, task["key"])
                put(store, task["key"], data)
                result["endpoint"] = _endpoint(store, task["key"])
            else:
                get(store, task["key"], data)
        except (KVMaskError, OSError) as error:
            result = {"error": str(error), "code": getattr(error, "code", None)}
        line = f"\n{MARK}{json.dumps(result)}\n"
        os.write(1, line.encode())  # in one piece, between the lines of other threads
        if task["role"] == "put" and "error" not in result:
            time.sleep(task["limit"])


class Child:
    """One of the two processes, while it runs.

    Args:
        task: What `child` is to do.
        limit: Seconds until it must have a result.
    """

    def __init__(self, task: Mapping[str, Any], limit: float) -> None:
        from kvmask.mooncake.process import start

        self.limit = limit
        self.deadline = time.monotonic() + limit
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `stop`
        root = str(Path(mooncake.__file__).parents[2])
        command = [sys.executable, "-P", "-c", _START, root, json.dumps(dict(task, limit=limit))]
        # The log is not shown, unless something goes wrong. Some of it says what the client uses.
        env = os.environ | {mooncake.LOG_ENV: "INFO"}
        self.process = start(command, self.log, env)

    def text(self) -> str:
        """Return the output up to now."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode("utf-8", "replace")

    def result(self) -> dict[str, Any]:
        """Wait for the result.

        Raises:
            StoreError: It is an error, or there is none: the process ended, or the time did.
        """
        while True:
            ended = self.process.poll()
            for line in self.text().splitlines(keepends=True):
                if line.startswith(MARK) and line.endswith("\n"):
                    with contextlib.suppress(ValueError):
                        return self._checked(json.loads(line.removeprefix(MARK)))
            if ended is not None:
                raise StoreError(f"the client's process {_how(ended)}{self._end()}")
            if time.monotonic() > self.deadline:
                raise StoreError(f"no result within {self.limit:g} s{self._end()}")
            time.sleep(0.02)

    def _checked(self, result: dict[str, Any]) -> dict[str, Any]:
        if "error" in result:
            raise StoreError(result["error"], result["code"])
        return result

    def _end(self) -> str:
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        severe = [x for x in lines if x[:1] in _SEVERE and x[1:5].isdigit()]
        lines = (severe or lines)[-3:]
        return f"; end of its log: {' | '.join(lines)[-700:]}" if lines else "; its log is empty"

    def stop(self) -> None:
        """End the process, if it runs, and give its memory back."""
        from kvmask.mooncake.process import stop

        stop(self.process)
        self.log.close()


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
