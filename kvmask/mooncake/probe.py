"""Ask the servers that a client needs, before the client does.

Mooncake's client tries for minutes when one of them is missing, holds the interpreter's lock
meanwhile, and does not say which. Here each is asked within a time limit, and an error names the
setting and its value.
"""

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmask.errors import ArgumentError, KVMaskError, StoreError
from kvmask.mooncake.address import Endpoints, masked, master_endpoints, metadata_endpoints, shown
from kvmask.mooncake.codes import Code
from kvmask.mooncake.config import StoreConfig

# `import kvmask` imports this module. So `socket` and the like are imported only where they are
# used.

DEVICES = Path("/sys/class/infiniband")
# Each attempt takes at most this many seconds.
_ATTEMPT = 2.0
# A call of Mooncake's RPC, to a function that no master has: magic, version, two types, sequence
# number, function, two lengths. A master answers that it has none, and logs nothing.
_RPC_MAGIC = 0x15
_RPC_CALL = struct.pack("<BBBBIIII", _RPC_MAGIC, 0, 0, 0, 1, 0, 0, 0)
# What a client of HTTP/2, and so of etcd, sends first: a fixed text and an empty frame of settings.
# A server answers with its own settings.
_HTTP2_CALL = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def check_servers(config: StoreConfig, timeout: float) -> None:
    """Wait until all that a client needs is there: devices, master, metadata server.

    Args:
        config: The settings.
        timeout: Seconds to wait, for all together.

    Raises:
        ArgumentError: No client can be set up with these settings.
        StoreError: A server does not answer in time, or is another one. The message names the
            setting. `code` is RPC_FAIL.
    """
    deadline = time.monotonic() + timeout
    _check_devices(config)
    address = config.master_server_address
    master = master_endpoints(address)
    _wait(
        lambda limit: _any(_ask_etcd if master.kind == "etcd" else _ask_master, master, limit),
        deadline,
        f"no Mooncake master answers at `master_server_address` {address}",
    )
    if config.protocol == "rpc_only":
        return  # such a client tells nobody where it is
    metadata = metadata_endpoints(config.metadata_server)
    where = f"no metadata server answers at `metadata_server` {masked(config.metadata_server)}"
    if "://" not in config.metadata_server:
        where += " (without http:// this is an etcd)"
    if metadata.kind == "http":
        _wait(lambda limit: _ask_http(metadata.url, limit), deadline, where)
    elif metadata.kind == "etcd":
        _wait(lambda limit: _any(_ask_etcd, metadata, limit), deadline, where)


def _check_devices(config: StoreConfig) -> None:
    names = [name.strip() for name in config.device_name.split(",") if name.strip()]
    if config.protocol != "rdma" or not names or names == ["auto-discovery"]:
        return
    if "MC_FORCE_TCP" in os.environ:
        return
    try:
        found = sorted(os.listdir(DEVICES))
    except OSError:
        found = []
    # With one of several the client works.
    if not set(names) & set(found):
        raise ArgumentError(
            f"`device_name` must name RDMA devices of this machine, which are {found}, "
            f"got {shown(config.device_name)}"
        )


def _wait(ask: Callable[[float], None], deadline: float, what: str) -> None:
    """Ask until there is an answer.

    It is asked on a thread of its own, because looking up a host name has no time limit.
    """
    from queue import Empty, SimpleQueue

    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    last: list[object] = ["no answer in time"]

    def work() -> None:
        while True:
            try:
                ask(max(0.05, min(deadline - time.monotonic(), _ATTEMPT)))
            except OSError as error:
                last[0] = error
                if time.monotonic() + 0.05 >= deadline:
                    return ended.put(error)
                time.sleep(0.05)
            except BaseException as error:
                return ended.put(error)
            else:
                return ended.put(None)

    threading.Thread(target=work, name="kvmask-probe", daemon=True).start()
    try:
        # The last attempt may begin just before the deadline.
        error = ended.get(timeout=max(0.0, deadline - time.monotonic()) + 0.5)
    except Empty:
        raise StoreError(f"{what}: {last[0]}", int(Code.RPC_FAIL)) from None
    if isinstance(error, OSError | KVMaskError):
        raise StoreError(f"{what}: {error}", int(Code.RPC_FAIL)) from error
    if error is not None:
        raise error


def _any(ask: Callable[[str, int, float], None], endpoints: Endpoints, limit: float) -> None:
    """Ask the servers in turn until one answers, because the client does so too."""
    error: Exception | None = None
    for host, port in endpoints.hosts:
        try:
            return ask(host, port, limit / len(endpoints.hosts))
        except (OSError, KVMaskError) as failed:
            error = failed
    assert error is not None  # there is at least one server
    raise error


def _exchange(host: str, port: int, call: bytes, limit: float) -> bytes:
    """Send a few bytes and return the first ones of the answer, which may be none."""
    import socket

    with socket.create_connection((host, port), limit) as connection:
        connection.settimeout(limit)
        connection.sendall(call)
        return connection.recv(64)


def _ask_master(host: str, port: int, limit: float) -> None:
    if os.environ.get("MC_RPC_PROTOCOL", "tcp") != "tcp":
        import socket

        socket.create_connection((host, port), limit).close()
        return
    answer = _exchange(host, port, _RPC_CALL, limit)
    if answer and answer[0] != _RPC_MAGIC:
        raise StoreError(f"what listens there is no master, it answers {answer[:16]!r}")
    # Another release may close the connection here. If it is no master, the client fails at once.


def _ask_etcd(host: str, port: int, limit: float) -> None:
    answer = _exchange(host, port, _HTTP2_CALL, limit)
    if len(answer) < 4 or answer[3] != 4 or answer.startswith(b"HTTP"):  # 4: a frame of settings
        raise StoreError(f"what listens there is no etcd, it answers {answer[:16]!r}")


def _ask_http(url: str, limit: float) -> None:
    """Put a key and delete it, as a client does with its address."""
    import base64
    import http.client
    import ssl
    import urllib.error
    import urllib.parse
    import urllib.request
    import uuid

    # The client goes through the proxies that these variables name.
    proxies = {
        scheme: os.environ[variable]
        for scheme, variable in (("http", "http_proxy"), ("https", "https_proxy"))
        if os.environ.get(variable)
    }
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        # The client checks certificates, against its own list. This only asks for an answer.
        urllib.request.HTTPSHandler(context=ssl._create_unverified_context()),
    )
    # urllib takes a user and a password for a part of the host.
    parts = urllib.parse.urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    url = parts._replace(netloc=host).geturl()
    headers = {}
    if at:
        secret = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
        headers["Authorization"] = f"Basic {secret}"
    key = f"{url}?key=kvmask-probe-{uuid.uuid4().hex}"

    def send(method: str) -> Any:
        data = b'"kvmask"' if method == "PUT" else None
        request = urllib.request.Request(key, data=data, method=method, headers=headers)
        try:
            with opener.open(request, timeout=limit) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except (http.client.HTTPException, ValueError) as error:
            raise StoreError(f"what listens there speaks no HTTP: {error!r}") from error

    status = send("PUT")
    if status != 200:
        raise StoreError(f"a key must be accepted with status 200, got {status}")
    send("DELETE")
