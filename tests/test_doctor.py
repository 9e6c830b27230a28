"""`kvmask doctor` on a pool in use, with a client that crashes or waits, with strange settings."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_connect import ONE_INTERFACE, namespaced

from kvmask import mooncake
from kvmask.cli import doctor, main, trip
from kvmask.errors import StoreError

ROOT = Path(mooncake.__file__).parents[2]
VARIABLES = (
    "MOONCAKE_CONFIG_PATH",
    "MOONCAKE_MASTER",
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    "VLLM_HOST_IP",
    "MC_RPC_PROTOCOL",
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path):
    """Writes a file of settings and returns its path."""

    def write(**values):
        path = tmp_path / "mooncake.json"
        base = {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        path.write_text(json.dumps(base | values))
        return str(path)

    return write


def checks(config=None, limit=60.0):
    """{name: (whether it passed, text)} of one run in this process."""
    return {name: (works, text) for name, works, text in doctor.run(config, limit)}


def command(*arguments, **changes):
    """Start `kvmask doctor` in a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", "kvmask", "doctor", *arguments],
        env=env | {"PYTHONPATH": str(ROOT)} | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whoever runs the tests may have it ignored, as a shell does for what runs behind it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


# --- the pool in use


@pytest.mark.store
def test_a_pool_in_use_loses_nothing(settings):
    """Others put their objects while doctor runs. None of them may lie in memory of doctor's."""
    with mooncake.local_master() as own:
        store = mooncake.connect(own)
        try:
            path = settings(master_server_address=own.address, global_segment_size="1GB")
            process = command("--config", path)
            value = bytes(256 << 10)
            put = []
            for i in range(800):
                assert store.put(f"mine/{i}", value) == 0
                put.append(process.poll() is None)
                time.sleep(0.005)
            text, _ = process.communicate(timeout=180)
            assert process.returncode == 0, text
            assert any(put[100:])  # doctor was at work meanwhile
            keys = [f"mine/{i}" for i in range(800)]
            assert store.batch_is_exist(keys) == [1] * 800
            assert all(store.get(key) == value for key in keys[::8])
            assert "ok   pool       4096 bytes put, found and got by a second process" in text
            capacity = 256 << 20  # what the store gave itself, and nothing of doctor's
            assert f"master_total_capacity_bytes {capacity}\n" in metrics(own)
        finally:
            store.close()


def metrics(master):
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{master.metrics_url}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.store
def test_no_memory_is_ever_given_to_the_pool(settings):
    with mooncake.local_master() as own:
        seen, stop = set(), threading.Event()

        def watch():
            while not stop.is_set():
                lines = metrics(own).splitlines()
                seen.update(x for x in lines if x.startswith("master_total_capacity_bytes "))
                stop.wait(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            found = checks(settings(master_server_address=own.address))
        finally:
            stop.set()
            watcher.join(30)
        assert seen == {"master_total_capacity_bytes 0"}
    assert found["pool"] == (
        True,
        "the master answers; nothing was put, for the pool has no memory yet or is full",
    )
    assert found["round trip"][0]


@pytest.mark.store
def test_a_pool_that_others_must_fill_fails_while_it_is_empty(settings):
    with mooncake.local_master() as own:
        path = settings(
            master_server_address=own.address, mode="standalone-store", global_segment_size=0
        )
        works, text = checks(path)["pool"]
    assert not works
    assert "put must answer [0], got [-200] NO_AVAILABLE_HANDLE" in text


@pytest.mark.store
def test_what_was_put_is_removed(settings, master, live_store):
    assert checks(settings(master_server_address=master.address))["pool"][0]
    assert "master_key_count 0\n" in metrics(master)


# --- addresses


@pytest.mark.store
def test_an_address_that_nobody_reaches_fails(master):
    """In a network of its own, where the address is on a wire without a machine."""
    code = """
from kvmask.cli import doctor
for name, works, text in doctor.run(None, 60.0):
    print(works, name, text)
"""
    commands = [*ONE_INTERFACE, "ip address add 10.255.255.2/24 dev one"]
    env = {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "10.255.255.1"}
    *_, line = namespaced(commands, code, env).splitlines()
    assert line.startswith(
        "False round trip a second process must get what the first put at 10.255."
    )
    reached = {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "10.255.255.2"}
    *_, line = namespaced(commands, code, reached).splitlines()
    assert line.startswith("True round trip 4096 bytes put")
    assert " from 10.255.255.2:" in line


@pytest.mark.store
def test_the_address_is_printed(settings, master, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    works, text = checks(settings(master_server_address=master.address))["round trip"]
    assert works
    assert " from 127.0.0.1:" in text
    assert text.endswith("; only this machine reaches that address")


@pytest.mark.store
def test_rdma_without_a_device_says_that_it_is_tcp(settings, master, monkeypatch):
    if Path("/sys/class/infiniband").is_dir() and os.listdir("/sys/class/infiniband"):
        pytest.skip("this machine has RDMA devices")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    path = settings(master_server_address=master.address, protocol="rdma")
    works, text = checks(path)["round trip"]
    assert works
    assert "; rdma fell back to TCP, because the client found no device" in text
    path = settings(master_server_address=master.address, protocol="rdma", device_name="mlx5_9")
    for name in ("pool", "round trip"):
        works, text = checks(path)[name]
        assert not works
        assert "`device_name` must name RDMA devices of this machine" in text


# --- a client that crashes, waits, or writes something else


@pytest.mark.store
def test_a_client_that_crashes_is_a_line_not_a_crash(settings, master):
    process = command(
        "--config", settings(master_server_address=master.address), MC_RPC_PROTOCOL="rdma"
    )
    text, _ = process.communicate(timeout=180)
    assert process.returncode == 1, text
    assert "FAIL round trip the client's process was ended by SIG" in text
    assert "; end of its log: " in text


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            # AddressSanitizer would handle it.
            "import os, signal; signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)",
            r"was ended by SIGSEGV; its log is empty",
        ),
        ("import os; os.abort()", r"was ended by SIGABRT; its log is empty"),
        (
            "import os, sys; print('I1201 00:00:00 begun', flush=True); "
            "print('F1201 00:00:00 cannot find it', flush=True); "
            "print('*** Check failure stack trace: ***', flush=True); os.abort()",
            r"was ended by SIGABRT; end of its log: F1201 00:00:00 cannot find it$",
        ),
        ("raise MemoryError(7)", r"ended with status 1; end of its log: .*MemoryError: 7$"),
        ("import time; time.sleep(60)", r"no result within 0.5 s; its log is empty"),
        (
            "import time; print('waiting for etcd', flush=True); time.sleep(60)",
            r"no result within 0.5 s; end of its log: waiting for etcd$",
        ),
        ("print('kvmask-trip: {}' * 2)", r"ended with status 0"),
    ],
)
def test_how_a_client_can_end(monkeypatch, program, reason):
    monkeypatch.setattr(trip, "_START", program)
    child = trip.Child({}, 0.5 if "sleep" in program else 30)
    try:
        with pytest.raises(StoreError, match=reason):
            child.result()
    finally:
        child.stop()
    assert child.process.poll() is not None


def test_an_error_of_the_client_keeps_its_code(monkeypatch):
    monkeypatch.setattr(trip, "_START", """print('kvmask-trip: {"error": "no", "code": -200}')""")
    child = trip.Child({}, 30)
    with pytest.raises(StoreError, match=r"^no$") as told:
        child.result()
    child.stop()
    assert told.value.code == -200


@pytest.mark.store
def test_nothing_runs_when_doctor_has_ended(settings, master, monkeypatch):
    started = []
    original = trip.Child.__init__

    def remember(self, *args):
        original(self, *args)
        started.append(self.process)

    monkeypatch.setattr(trip.Child, "__init__", remember)
    checks(settings(master_server_address=master.address))
    assert len(started) >= 3
    assert all(process.poll() is not None for process in started)


@pytest.mark.store
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_doctor_that_is_stopped_ends_what_it_started(settings, signum):
    """Its master is silent, so it would wait."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        path = settings(master_server_address=f"127.0.0.1:{silent.getsockname()[1]}")
        process = command("--config", path)
        for line in process.stdout:
            if line.startswith("ok   config"):
                break
        children, end = [], time.monotonic() + 60
        while not children and time.monotonic() < end:
            text = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            children = [pid for t in tasks for pid in (t / "children").read_text().split()]
            time.sleep(0.05)
        assert children, text
        process.send_signal(signum)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signum
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


# --- settings


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"metadata_server": "redis://127.0.0.1:6379"}, "metadata_server"),
        ({"master_server_address": "127.0.0.1:50051/"}, "master_server_address"),
        ({"protocol": "rpc_only", "local_buffer_size": "16MB"}, "local_buffer_size"),
        ({"global_segment_size": "1MB"}, "global_segment_size"),
    ],
)
def test_settings_that_cannot_work_are_named_without_a_client(settings, capsys, values, key):
    path = settings(**({"master_server_address": "127.0.0.1:50051"} | values))
    assert main(["doctor", "--config", path]) == 1
    *_, config, pool, last = capsys.readouterr().out.splitlines()
    assert config.startswith(f"FAIL config     `{key}` must ")
    assert pool == "FAIL pool       the configuration is wrong, see above"
    assert last == "FAIL round trip the configuration is wrong, see above"


@pytest.mark.store
def test_a_master_that_is_not_there_is_named_and_the_rest_goes_on(settings, master):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        found = checks(settings(master_server_address=address), limit=10.0)
    works, text = found["pool"]
    assert not works
    assert f"no Mooncake master answers at `master_server_address` {address}" in text
    assert found["round trip"][0]


@pytest.mark.store
def test_what_was_mended_is_noted(settings, master):
    path = settings(
        master_server_address=f" {master.address}",
        protocol="TCP",
        local_hostname="localhost",
        global_segment_size="4g",
    )
    found = checks(path)
    works, text = found["config"]
    assert works
    for name in ("local_hostname", "global_segment_size", "master_server_address", "protocol"):
        assert f"note: `{name}`" in text
    assert found["pool"][0]


@pytest.mark.store
def test_the_environment_alone_is_a_configuration(master, monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.6")
    found = checks()
    assert found["config"] == (True, f"$MOONCAKE_MASTER: master {master.address}, tcp")
    assert found["pool"][0]
    assert " from 127.0.0.6:" in found["round trip"][1]


@pytest.mark.store
def test_clients_for_calls_only(settings, master):
    path = settings(master_server_address=master.address, protocol="rpc_only")
    found = checks(path)
    assert found["pool"] == (True, "the master answers; a client for calls only moves no bytes")
    assert found["round trip"] == (True, "not made: protocol 'rpc_only' moves no bytes")


def test_libraries_are_those_that_bootstrap_installs():
    script = Path(__file__).parent.parent / "scripts" / "bootstrap.sh"
    if not script.exists():
        pytest.skip("the script is not beside the tests")
    pairs = re.findall(r"(lib\w+\.so\.\d+):(\w+)", script.read_text(encoding="utf-8"))
    assert [library for library, _ in pairs] == list(doctor.LIBRARIES)
    assert [package for _, package in pairs] == list(mooncake.SYSTEM_PACKAGES)


def test_a_misspelt_setting_is_named_beside_the_one_that_is_missing(tmp_path, capsys):
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_adress": "127.0.0.1:1"}')
    assert main(["doctor", "--config", str(path)]) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("FAIL config")]
    assert "`master_server_address` must name the master" in line
    assert "'master_server_adress' is not read: `master_server_address` may be meant" in line
