"""What `connect` asks before it makes a client: servers, devices, the address for others, memory.

The servers here are this test's own, on loopback: some answer, some stay silent, some are others.
"""

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from kvmask import mooncake
from kvmask.errors import ArgumentError, StoreConfigWarning, StoreError
from kvmask.mooncake import Code, StoreConfig, advertised_address
from kvmask.mooncake.address import check_hostname, master_endpoints, metadata_endpoints
from kvmask.mooncake.probe import check_servers

ROOT = Path(mooncake.__file__).parents[2]
ADDRESS = "127.0.0.1:50051"
BASE = {"metadata_server": "P2PHANDSHAKE", "master_server_address": ADDRESS, "protocol": "tcp"}
# The first bytes of an etcd: an empty frame of settings.
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"
MASTER_ANSWER = b"\x15\0\x0b\0\1\0\0\0\0\0\0\0\0\0\0\0"


@contextlib.contextmanager
def listener(answer=None, closes=True):
    """The address of a server that gives one answer to whoever sends something; None: silence."""
    held = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.recv(1024)
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for connection in held:
                connection.close()


@pytest.fixture
def free_address():
    """An address at which nobody listens: the port is bound and refuses."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


class Metadata(http.server.BaseHTTPRequestHandler):
    """A metadata server: keys under /metadata."""

    def log_message(self, *args):
        pass

    def answer(self, store=None):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        keys = self.server.keys
        found = self.path.startswith("/metadata?key=")
        if found and self.command == "PUT":
            keys[self.path] = body
        elif found and self.command == "DELETE":
            found = keys.pop(self.path, None) is not None
        elif found:
            body = keys.get(self.path)
            found = body is not None
        self.send_response(200 if found else 404)
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(body)
        self.server.seen.append((self.command, self.path))

    do_GET = do_PUT = do_DELETE = answer


@pytest.fixture
def metadata():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.daemon_threads = True
    server.keys, server.seen = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.base = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def config(**changes):
    return StoreConfig.from_mapping(BASE | changes)


# --- servers


@pytest.mark.parametrize("shape", ["etcd://{}", "{}", "etcd://{0};{0}", "etcd://http://{}"])
def test_an_etcd_that_is_not_there_is_named(free_address, shape):
    value = shape.format(free_address)
    with listener(MASTER_ANSWER) as master, pytest.raises(StoreError) as told:
        check_servers(config(master_server_address=master, metadata_server=value), 0.3)
    assert str(told.value).startswith(f"no metadata server answers at `metadata_server` {value}")
    assert "refused" in str(told.value)
    assert told.value.code == Code.RPC_FAIL


@pytest.mark.parametrize("silent", [True, False])
def test_an_http_server_that_is_not_there_is_named(free_address, silent):
    with listener(MASTER_ANSWER) as master, listener() as quiet:
        value = f"http://{quiet if silent else free_address}/metadata"
        with pytest.raises(StoreError) as told:
            check_servers(config(master_server_address=master, metadata_server=value), 0.3)
    assert str(told.value).startswith(f"no metadata server answers at `metadata_server` {value}: ")


@pytest.mark.parametrize("kind", ["metadata_server", "master_server_address"])
@pytest.mark.parametrize("shape", ["{}", "etcd://{}"])
def test_servers_that_stay_silent_are_named(kind, shape):
    with listener(MASTER_ANSWER) as master, listener() as quiet:
        settings = config(**{"master_server_address": master, kind: shape.format(quiet)})
        with pytest.raises(StoreError, match=f"`{kind}` .*{quiet}.*: .*timed out"):
            check_servers(settings, 0.3)


def test_a_host_name_that_takes_for_ever_does_not(monkeypatch):
    """Looking up a name has no time limit of its own."""
    stop = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: stop.wait(30) or [])
    try:
        with pytest.raises(StoreError, match="`master_server_address` slow:1: no answer in time"):
            check_servers(config(master_server_address="slow:1"), 0.1)
    finally:
        stop.set()


def test_other_servers_at_the_address_are_told_apart():
    page = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    with listener(MASTER_ANSWER) as master, listener(page) as other:
        wrong = config(master_server_address=master, metadata_server=other)
        with pytest.raises(StoreError, match=r"without http:// this is an etcd.* there is no etcd"):
            check_servers(wrong, 5)
        with pytest.raises(StoreError, match=r"there is no master, it answers b'HTTP/1.1 400 Bad'"):
            check_servers(config(master_server_address=other), 5)
        with pytest.raises(StoreError, match=r"no Mooncake master.*there is no etcd"):
            check_servers(config(master_server_address=f"etcd://{other}"), 5)


def test_servers_that_are_there(metadata, free_address):
    with listener(MASTER_ANSWER) as master, listener(SETTINGS_FRAME) as etcd:
        for value in (
            "P2PHANDSHAKE",
            f"{metadata.base}/metadata",
            etcd,
            f"etcd://{etcd}",
            f"etcd://{free_address};{etcd}",
        ):
            check_servers(config(master_server_address=master, metadata_server=value), 10)
        check_servers(config(master_server_address=f"etcd://{free_address},{etcd}"), 10)
    # Each request has a thread of its own, which notes it when it is answered.
    assert sorted(method for method, _ in metadata.seen) == ["DELETE", "PUT"]
    assert metadata.keys == {}  # what was put to try it is gone


@pytest.mark.parametrize("path", ["", "/", "/meta"])
def test_a_wrong_path_of_the_metadata_server_is_named(metadata, path):
    with listener(MASTER_ANSWER) as master:
        wrong = config(master_server_address=master, metadata_server=metadata.base + path)
        with pytest.raises(StoreError, match=r"`metadata_server` .*with status 200, got 404"):
            check_servers(wrong, 5)


def test_no_metadata_server_at_all():
    """vLLM's default is empty text, with which a client cannot be set up."""
    with listener(MASTER_ANSWER) as master:
        with pytest.raises(ArgumentError, match=r"`metadata_server` must be 'P2PHANDSHAKE'.*''"):
            check_servers(config(master_server_address=master, metadata_server=""), 5)
        only = {"protocol": "rpc_only", "metadata_server": "", "master_server_address": master}
        check_servers(StoreConfig.from_mapping(only), 5)


def test_a_server_that_comes_late_is_waited_for():
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{late.getsockname()[1]}"

        def begin():
            late.listen()
            with contextlib.suppress(OSError):
                connection, _ = late.accept()
                connection.recv(64)
                connection.sendall(MASTER_ANSWER)
                connection.close()

        timer = threading.Timer(0.5, begin)
        timer.start()
        check_servers(config(master_server_address=address), 30)
        timer.join(30)


def test_devices_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr("kvmask.mooncake.probe.DEVICES", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    with listener(MASTER_ANSWER) as master:

        def ask(device, protocol="rdma"):
            check_servers(
                config(master_server_address=master, protocol=protocol, device_name=device), 5
            )

        for device in ("", "auto-discovery", "mlx5_0", "mlx5_9, mlx5_0"):
            ask(device)
        ask("mlx5_9", protocol="tcp")
        with pytest.raises(ArgumentError, match=r"`device_name` .* \['mlx5_0'\], got 'mlx5_9'"):
            ask("mlx5_9")
        monkeypatch.setattr("kvmask.mooncake.probe.DEVICES", tmp_path / "absent")
        with pytest.raises(ArgumentError, match=r"`device_name` .* are \[\], got 'mlx5_0'"):
            ask("mlx5_0")
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        ask("mlx5_0")


# --- the address for others


@pytest.fixture
def no_variables(monkeypatch):
    for name in ("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)


def test_the_advertised_address_in_order(monkeypatch, no_variables):
    routes = {}
    monkeypatch.setattr(
        "kvmask.mooncake.address._routed", lambda family, target: routes.get(family, "")
    )
    monkeypatch.setattr("kvmask.mooncake.address._interface_address", lambda: "")
    assert advertised_address() == "127.0.0.1"
    monkeypatch.setattr("kvmask.mooncake.address._interface_address", lambda: "fd00::7")
    assert advertised_address() == "fd00::7"
    routes[socket.AF_INET6] = "fd00::5"
    assert advertised_address() == "fd00::5"
    routes[socket.AF_INET] = "192.0.2.4"
    assert advertised_address() == "192.0.2.4"
    monkeypatch.setenv("VLLM_HOST_IP", " 127.0.0.3 ")
    assert advertised_address() == "127.0.0.3"
    assert advertised_address("node:5000") == "node:5000"
    monkeypatch.setenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "worker-a:50053")
    assert advertised_address("node") == "worker-a:50053"


def test_blank_variables_count_as_not_set(monkeypatch):
    monkeypatch.setenv("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "  ")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    assert advertised_address() == "127.0.0.2"


@pytest.mark.parametrize(
    "value", ["a b", "http://a", "a/b", "a:b", "a:70000", "[::1", "a\nb", "x:"]
)
def test_what_no_address_can_be(monkeypatch, no_variables, value):
    monkeypatch.setenv("VLLM_HOST_IP", value)
    with pytest.raises(ArgumentError, match=r"`\$VLLM_HOST_IP` must"):
        advertised_address()
    with pytest.raises(ArgumentError, match="`hostname` must"):
        mooncake.connect(BASE, hostname=value)


@pytest.mark.parametrize(
    "value", ["a", "a.b-c_d", "10.0.0.1:12345", "::1", "[::1]", "[fd00::5]:80", "10.1.1.1:5:npu_3"]
)
def test_what_an_address_can_be(value):
    assert check_hostname(value, "hostname") == value


def namespaced(commands, code, env=None):
    """Run Python code in a network namespace of its own; skips where none can be made."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("no unshare or ip program")
    enter = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "-r", "--net"]
    if subprocess.run([*enter, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    script = " && ".join([*commands, 'exec "$0" -c "$1"'])
    clean = {
        k: v for k, v in os.environ.items() if k not in (mooncake.HOSTNAME_ENV, "VLLM_HOST_IP")
    }
    done = subprocess.run(
        [*enter, "sh", "-c", script, sys.executable, code],
        env=clean | {"PYTHONPATH": str(ROOT)} | (env or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "Unknown device type" in done.stderr:
        pytest.skip("this kernel has no veth interfaces")
    assert done.returncode == 0, done.stderr
    return done.stdout


PRINT = "from kvmask.mooncake import advertised_address; print(advertised_address())"


ONE_INTERFACE = ["ip link set lo up", "ip link add one type veth peer name two"]
ONE_INTERFACE += ["ip link set one up", "ip link set two up"]


@pytest.mark.parametrize("route", [False, True])
@pytest.mark.parametrize("address", ["fd00::5/64", "192.0.2.77/24"])
def test_a_machine_with_one_address_advertises_it(address, route):
    six = ":" in address
    commands = [
        *ONE_INTERFACE,
        f"ip {'-6' if six else '-4'} address add {address} dev one {'nodad' if six else ''}",
    ]
    if route:
        commands.append(f"ip {'-6' if six else '-4'} route add default dev one")
    assert namespaced(commands, PRINT) == address.partition("/")[0] + "\n"


def test_an_address_of_the_loopback_interface_counts_too():
    commands = ["ip link set lo up", "ip -6 address add fd00::5/64 dev lo"]
    assert namespaced(commands, PRINT) == "fd00::5\n"


def test_a_machine_without_any_address_advertises_loopback():
    assert namespaced(["ip link set lo up"], PRINT) == "127.0.0.1\n"


# --- the real client


def live(master, code, env=None, **settings):
    """Run `connect` in a process of its own, which ends within a minute."""
    values = BASE | {"global_segment_size": "16m", "local_buffer_size": "16m"} | settings
    values.setdefault("master_server_address", master.address)
    if values["master_server_address"] == ADDRESS:
        values["master_server_address"] = master.address
    program = f"""
import json, sys
from kvmask import errors, mooncake
values = json.loads(sys.argv[1])
{code}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(values)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TELL = """
try:
    store = mooncake.connect(values)
except errors.KVMaskError as error:
    print(type(error).__name__)
    print(error)
else:
    print(store.get_hostname())
    print(store.batch_is_exist(["x"]))
    store.close()
"""


@pytest.mark.store
def test_vllms_variables_name_the_address(master):
    assert live(master, TELL, {"VLLM_HOST_IP": "127.0.0.1"})[0].startswith("127.0.0.1:")
    both = {"VLLM_HOST_IP": "127.0.0.1", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "localhost"}
    assert live(master, TELL, both)[0].startswith("localhost:")
    mine = live(master, TELL, {"VLLM_HOST_IP": "127.0.0.1"}, local_hostname="127.0.0.9")
    assert mine[0].startswith("127.0.0.9:")


@pytest.mark.store
def test_a_client_for_calls_only_needs_no_buffer(master):
    """With one its set-up ends the process."""
    settings = {"protocol": "rpc_only", "global_segment_size": 0, "local_buffer_size": 0}
    assert live(master, TELL, {"VLLM_HOST_IP": "127.0.0.1"}, **settings)[1] == "[0]"
    assert live(master, TELL, protocol="rpc_only", global_segment_size=0) == [
        "ArgumentError",
        "`local_buffer_size` must be 0 for protocol 'rpc_only', got 16777216",
    ]


@pytest.mark.store
def test_memory_that_the_machine_does_not_have(master):
    kind, text = live(master, TELL, local_buffer_size=1 << 50)
    assert kind == "StoreError"
    assert "`global_segment_size`) of 16777216 bytes" in text
    assert f"`local_buffer_size`) of {1 << 50} bytes" in text
    kind, text = live(master, TELL, global_segment_size=1 << 50)
    assert kind == "StoreError"
    assert f"`global_segment_size`) of {1 << 50} bytes" in text


@pytest.mark.store
def test_huge_pages_that_are_not_reserved_name_the_setting(master):
    with contextlib.suppress(OSError):
        if int(Path("/proc/sys/vm/nr_hugepages").read_text()):
            pytest.skip("this machine has huge pages")
    kind, text = live(master, TELL, {"MC_STORE_USE_HUGEPAGE": "1"})
    assert kind == "StoreError"
    assert "$MC_STORE_USE_HUGEPAGE is set, and vm.nr_hugepages reserves 0" in text


@pytest.mark.store
def test_the_client_uses_an_http_metadata_server(master, metadata):
    url = f"{metadata.base}/metadata"
    host, answer = live(master, TELL, {"VLLM_HOST_IP": "127.0.0.1"}, metadata_server=url)
    assert host.startswith("127.0.0.1:")
    assert answer == "[0]"
    assert len(metadata.seen) > 2  # the client's own keys, after the one that tried it


@pytest.mark.store
def test_a_protocol_in_capitals_is_mended(master):
    code = "import warnings\nwarnings.simplefilter('ignore')\n" + TELL
    assert live(master, code, {"VLLM_HOST_IP": "127.0.0.1"}, protocol="TCP")[1] == "[0]"


@pytest.mark.store
def test_the_environment_alone_connects(master):
    env = {
        "MOONCAKE_MASTER": master.address,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16m",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "16m",
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.8",
        "MOONCAKE_CONFIG_PATH": "",
    }
    lines = live(master, TELL.replace("connect(values)", "connect()"), env)
    assert lines[0].startswith("127.0.0.8:")
    assert lines[1] == "[0]"


@pytest.mark.store
def test_a_master_that_was_stopped_is_told_in_time(master):
    """It still accepts connections, because the kernel does."""
    import signal

    with mooncake.local_master() as own:
        os.kill(own.pid, signal.SIGSTOP)
        try:
            lines = live(
                master,
                TELL.replace("connect(values)", "connect(values, timeout=1)"),
                master_server_address=own.address,
            )
        finally:
            os.kill(own.pid, signal.SIGCONT)
    assert lines[0] == "StoreError"
    assert f"`master_server_address` {own.address}: " in lines[1]


# --- what cannot be right, and what is mended


@pytest.mark.parametrize(
    "value",
    [
        "127.0.0.1:50051/",
        "127.0.0.1",
        "127.0.0.1:",
        ":50051",
        "127.0.0.1 :50051",
        "127.0.0.1: 50051",
        "http://127.0.0.1:50051",
        "tcp://127.0.0.1:50051",
        "redis://127.0.0.1:6379",
        "k8s://default/master",
        "127.0.0.1:50051,127.0.0.1:50052",
        "::1:50051",
        "<master_ip>:50051",
        "${MASTER}:50051",
        "127.0.0.1:50051\n127.0.0.1:50052",
        "etcd://",
        "etcd://127.0.0.1",
        "etcd://127.0.0.1:2379/",
        "a:٥",
    ],
)
def test_masters_that_cannot_be_right(value):
    with pytest.raises(ArgumentError, match="`master_server_address` must"):
        config(master_server_address=value)


@pytest.mark.parametrize(
    "value",
    [
        "redis://127.0.0.1:6379",
        "zookeeper://127.0.0.1:2181",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:2379/",
        "etcd://127.0.0.1:2379/",
        "etcd://127.0.0.1",
        "http://",
        "http:///metadata",
        "http://127.0.0.1:8080/meta data",
        "http://127.0.0.1:99999/metadata",
        "HTTP://127.0.0.1:8080/metadata",
        "P2PHANDSHAKE:1",
        "P2P",
        "P2PHANDSHAKE/",
    ],
)
def test_metadata_servers_that_cannot_be_right(value):
    with pytest.raises(ArgumentError, match="`metadata_server` must"):
        config(metadata_server=value)


def test_addresses_taken_apart():
    assert master_endpoints("[::1]:50051").hosts == (("::1", 50051),)
    assert master_endpoints("mooncake_master.ns.svc:1").hosts == (("mooncake_master.ns.svc", 1),)
    assert metadata_endpoints("h:2379").kind == "etcd"
    assert metadata_endpoints("etcd://a:1, b:2;").hosts == (("a", 1), ("b", 2))
    assert metadata_endpoints("http://h/metadata").hosts == (("h", 80),)
    assert metadata_endpoints("https://[fd00::5]/m").hosts == (("fd00::5", 443),)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("metadata_server", "p2phandshake", "P2PHANDSHAKE"),
        ("metadata_server", " P2PHandshake\n", "P2PHANDSHAKE"),
        ("metadata_server", " http://127.0.0.1:8080/metadata", "http://127.0.0.1:8080/metadata"),
        ("master_server_address", f" {ADDRESS} ", ADDRESS),
        ("protocol", "TCP", "tcp"),
        ("protocol", "Ascend", "ascend"),
        ("protocol", " rdma", "rdma"),
        ("device_name", " mlx5_0", "mlx5_0"),
        ("mode", "embedded ", "embedded"),
    ],
)
def test_what_has_one_meaning_is_mended(name, given, taken):
    with pytest.warns(StoreConfigWarning, match=f"`{name}`: "):
        mended = config(**{name: given})
    assert getattr(mended, name) == taken
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StoreConfig(**vars(mended)) == mended  # once is enough


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": "ib"}, "`protocol` must be 'tcp', 'rdma' or another of Mooncake's, got 'ib'"),
        ({"protocol": ""}, "`protocol` must be 'tcp', 'rdma' or another of Mooncake's, got ''"),
        (
            {"global_segment_size": "1MB"},
            "`global_segment_size` must be at least 16777216 (16 MiB), which is the smallest "
            "segment that the store can use, got 1048576",
        ),
        (
            {"protocol": "rpc_only", "global_segment_size": "1GB"},
            "`global_segment_size` must be 0 for protocol 'rpc_only', got 1073741824",
        ),
        ({"device_name": None}, "`device_name` must be text, got None"),
        (
            {"device_name": "a\nb"},
            "`device_name` must have printable characters only, got 'a\\nb'",
        ),
        ({"tenant_id": "a\0"}, "`tenant_id` must have printable characters only, got 'a\\x00'"),
    ],
)
def test_other_settings_that_cannot_be_right(changes, message):
    with pytest.raises(ArgumentError) as told:
        config(**changes)
    assert str(told.value) == message


def test_messages_stay_short():
    for name in ("master_server_address", "metadata_server", "protocol", "mode", "device_name"):
        with pytest.raises(ArgumentError, match=f"`{name}`") as told:
            config(**{name: "x\0" * 1_000_000})
        assert len(str(told.value)) < 500
