"""Addresses in a store's settings: what can be one, and which one this machine gives to others.

Nothing here sends a packet. `probe` does, with what this module has taken apart.
"""

import contextlib
import os
import re
import reprlib
from typing import NamedTuple

from kvmask.errors import ArgumentError

# vLLM's variables for the address at which others reach this client, in the order of their weight.
HOSTNAME_ENV = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
HOST_IP_ENV = "VLLM_HOST_IP"
HANDSHAKE = "P2PHANDSHAKE"

_HOST_PORT = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>\w[\w.-]*)):(?P<port>\d+)", re.ASCII
)
_URL = re.compile(
    r"https?://(?:[^\s/@]+@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>\w[\w.-]*))(?::(?P<port>\d+))?(?P<path>/\S*)?",
    re.ASCII,
)
_REPR = reprlib.Repr()
_REPR.maxstring = 200


class Endpoints(NamedTuple):
    """Where a server may be reached.

    Attributes:
        kind: "handshake" (no server), "master", "etcd" or "http".
        hosts: Host and port of each.
        url: The whole URL of an HTTP server, else "".
    """

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    url: str = ""


def masked(text: str) -> str:
    """Return an address without the user and the password that it may hold.

    Args:
        text: An address, or what was meant as one. All between its scheme and its last "@" counts
            as secret.

    >>> masked("http://me:secret@host:80/x"), masked("host:80")
    ('http://***@host:80/x', 'host:80')
    """
    head, at, rest = text.rpartition("@")
    if not at:
        return text
    scheme, separator, _ = head.partition("://")
    return f"{scheme}://***@{rest}" if separator else f"***@{rest}"


def shown(value: object) -> str:
    """Return a value for an error message: on one line, shortened, and without a password."""
    return _REPR.repr(masked(value) if isinstance(value, str) else value)


def split_address(text: str, name: str, value: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[IPv6 address]:port".

    Args:
        text: The address, which may be a part of the value.
        name: The setting, for error messages.
        value: The whole value of the setting.

    >>> split_address("[::1]:50051", "master_server_address", "[::1]:50051")
    ('::1', 50051)
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ArgumentError(f"`{name}` must be host:port, got {shown(value)}")
    return _host(match, name, value), _port(match["port"], name, value)


def _host(match: re.Match[str], name: str, value: str) -> str:
    host: str = match["six"] or match["host"]
    try:
        host.encode("idna" if match["six"] is None else "ascii")
    except UnicodeError as error:
        raise ArgumentError(f"`{name}` must name a host, got {shown(value)}: {error}") from error
    return host


def _port(text: str, name: str, value: str) -> int:
    if len(text) > 5 or not 0 < int(text) < 1 << 16:
        raise ArgumentError(f"`{name}` must have a port from 1 to 65535, got {shown(value)}")
    return int(text)


def _etcd(rest: str, name: str, value: str) -> Endpoints:
    """Endpoints of etcd, separated by ";" or ",". The client leaves empty ones out."""
    parts = [part.strip() for part in re.split("[;,]", rest)]
    hosts = [split_address(re.sub("^http://", "", p), name, value) for p in parts if p]
    if not hosts:
        raise ArgumentError(f"`{name}` must name a server as etcd://host:port, got {shown(value)}")
    return Endpoints("etcd", tuple(hosts))


def master_endpoints(value: str) -> Endpoints:
    """Return where the master, or the etcd that knows which one leads, is reached.

    Raises:
        ArgumentError: Mooncake's client cannot use such an address.

    >>> master_endpoints("etcd://a:2379;b:2379").hosts
    (('a', 2379), ('b', 2379))
    """
    name = "master_server_address"
    scheme, separator, rest = value.partition("://")
    if not separator:
        return Endpoints("master", (split_address(value, name, value),))
    if scheme != "etcd":
        raise ArgumentError(f"`{name}` must be host:port or etcd://host:port, got {shown(value)}")
    return _etcd(rest, name, value)


def metadata_endpoints(value: str) -> Endpoints:
    """Return where the metadata server is reached. Without a scheme Mooncake means etcd.

    Raises:
        ArgumentError: Mooncake's client cannot use such an address. With some of them it would end
            the process.

    >>> metadata_endpoints("P2PHANDSHAKE")
    Endpoints(kind='handshake', hosts=(), url='')
    """
    name = "metadata_server"
    if value == HANDSHAKE:
        return Endpoints("handshake")
    scheme, separator, rest = value.partition("://")
    if scheme in ("http", "https") and separator:
        match = _URL.fullmatch(value)
        if match is None:
            raise ArgumentError(f"`{name}` must be a URL without blanks, got {shown(value)}")
        port = match["port"] or ("443" if scheme == "https" else "80")
        return Endpoints("http", ((_host(match, name, value), _port(port, name, value)),), value)
    if separator and scheme != "etcd":
        raise ArgumentError(
            f"`{name}` must be {HANDSHAKE!r} or begin with http://, https:// or etcd://, "
            f"got {shown(value)}"
        )
    if not separator and (":" not in value or value.upper().startswith(HANDSHAKE)):
        raise ArgumentError(
            f"`{name}` must be {HANDSHAKE!r}, a URL or host:port, got {shown(value)}"
        )
    return _etcd(rest if separator else value, name, value)


def check_hostname(value: str, name: str) -> str:
    """Return the address that this client gives to others: a host, with or without a port."""
    import ipaddress

    text = value.strip()
    if text in ("0.0.0.0", "::", "[::]"):
        raise ArgumentError(f"`{name}` must be an address of one machine, got {shown(value)}")
    if re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        return text
    with contextlib.suppress(ValueError):
        bare = text[1:-1] if text[:1] + text[-1:] == "[]" else text
        if ipaddress.ip_address(bare).version == 6:
            return text
    # A third part is the number of a device, which builds for Ascend append.
    split_address(re.sub(r":npu_\d+$", "", text), name, value)
    return text


def _routed(family: int, target: str) -> str:
    """Return this machine's address on the route to a target, or ""."""
    import socket

    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((target, 80))  # only looks up the route
        return str(s.getsockname()[0])
    return ""


def _interface_address() -> str:
    """Return an address of an interface, or "". A machine may have one and no default route."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(s.fileno(), 0x8915, request)  # SIOCGIFADDR
                if answer[20] != 127:
                    return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            digits, _, _, scope, _, _ = line.split()
            if scope == "00":  # neither loopback nor of one link
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def advertised_address(local_hostname: str = "") -> str:
    """Return the address at which other clients are to reach this one, as vLLM finds it.

    The first of these that there is: $MOONCAKE_REQUESTER_LOCAL_HOSTNAME, the settings'
    `local_hostname`, $VLLM_HOST_IP, the address on the IPv4 route to the outside, the one on the
    IPv6 route, an address of an interface, "127.0.0.1". No packet is sent.

    Args:
        local_hostname: The one of the settings, or "".

    Raises:
        ArgumentError: What was given cannot be an address.
    """
    import socket

    for name, value in (
        ("$" + HOSTNAME_ENV, os.environ.get(HOSTNAME_ENV, "")),
        ("local_hostname", local_hostname),
        ("$" + HOST_IP_ENV, os.environ.get(HOST_IP_ENV, "")),
    ):
        if value.strip():
            return check_hostname(value, name)
    return (
        # The same targets as vLLM, so that both find the same route.
        _routed(socket.AF_INET, "8.8.8.8")
        or _routed(socket.AF_INET6, "2001:4860:4860::8888")
        or _interface_address()
        or "127.0.0.1"
    )
