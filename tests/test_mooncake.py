"""Connecting to a store, a master of one's own, and what goes wrong there."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmask import mooncake
from kvmask.errors import ArgumentError, MissingDependencyError, StoreError
from kvmask.mooncake import GIB, Code, StoreConfig

ADDRESS = "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (4096, 4096),
        (0, 0),
        ("4GB", 4 * GIB),
        ("512 mb", 512 << 20),
        (" 1.5kb ", 1536),
        ("7b", 7),
        ("9", 9),
        (".5GB", GIB // 2),
        (10.0, 10),
        # Mooncake's own reader knows these.
        ("4g", 4 * GIB),
        ("64m", 64 << 20),
        ("1tb", 1 << 40),
        ("1.5 T", 3 << 39),
        ("2k", 2048),
        ("9007199254740993", 9007199254740993),  # above 2^53: no float on the way
    ],
)
def test_sizes_as_vllm_files_write_them(value, size):
    assert mooncake.parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GB",
        "4 PB",
        "1GiB",
        "1gi",
        "-1",
        -1,
        "1.2.3GB",
        None,
        True,
        [],
        float("nan"),
        "4GB!",
        "٤GB",
    ],
)
def test_sizes_that_are_none(value):
    with pytest.raises(ArgumentError, match="`local_buffer_size` must be a number of bytes"):
        mooncake.parse_size(value, "local_buffer_size")


def test_the_file_has_vllms_defaults(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": ADDRESS, "something_else": 1}))
    assert StoreConfig.from_file(path) == StoreConfig(
        metadata_server="",
        master_server_address=ADDRESS,
        protocol="rdma",
        device_name="",
        mode="embedded",
        global_segment_size=4 << 30,
        local_buffer_size=4 << 30,
        enable_offload=False,
        tenant_id="default",
    )


def test_the_file_is_read(tmp_path):
    values = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": ADDRESS,
        "protocol": "tcp",
        "device_name": "mlx5_0",
        "mode": "standalone-store",
        "global_segment_size": "0",
        "local_buffer_size": "1GB",
        "enable_offload": True,
        "tenant_id": "  team  ",
    }
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(values))
    config = StoreConfig.from_file(path)
    expected = values | {"global_segment_size": 0, "local_buffer_size": GIB, "tenant_id": "team"}
    expected["local_hostname"] = ""
    assert vars(config) == expected
    for empty in (None, "", "  "):
        assert StoreConfig.from_mapping(values | {"tenant_id": empty}).tenant_id == "default"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mode": "shared"},
            "`mode` must be 'embedded' or 'standalone-store', got 'shared'",
        ),
        ({"local_buffer_size": 0}, "`local_buffer_size` must be above 0, got 0"),
        (
            {"global_segment_size": 0},
            "`global_segment_size` must be above 0 in mode 'embedded', got 0",
        ),
        (
            {"mode": "standalone-store", "global_segment_size": 5},
            "`global_segment_size` must be 0 in mode 'standalone-store', got 5",
        ),
        (
            {"global_segment_size": "4 XB"},
            "`global_segment_size` must be a number of bytes or text such as '4GB', got '4 XB'",
        ),
        ({"tenant_id": 7}, "`tenant_id` must be text or null, got 7"),
        ({"protocol": None}, "`protocol` must be text, got None"),
        (
            {"master_server_address": ""},
            "`master_server_address` must name the master as host:port, got ''",
        ),
    ],
)
def test_wrong_settings_name_the_key_the_rule_and_the_value(change, message):
    with pytest.raises(ArgumentError) as caught:
        StoreConfig.from_mapping({"master_server_address": ADDRESS} | change)
    assert str(caught.value) == message


def test_wrong_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with pytest.raises(ArgumentError, match=r"`source` must be given when \$MOONCAKE_CONFIG_PATH"):
        mooncake.connect()
    with pytest.raises(ArgumentError, match=r"`source` must be a LocalMaster.* got int"):
        mooncake.connect(5)
    with pytest.raises(ArgumentError, match="the settings must be a readable JSON file"):
        mooncake.connect(tmp_path / "absent.json")
    for text, message in (("{", "readable JSON"), ("[1]", "one JSON object, got list")):
        path = tmp_path / "wrong.json"
        path.write_text(text)
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
        with pytest.raises(ArgumentError, match=message):
            mooncake.connect()


def test_codes_by_name():
    assert mooncake.code_name(-200) == "NO_AVAILABLE_HANDLE"
    assert mooncake.code_name(-707) == "LEASE_EXPIRED"
    assert mooncake.code_name(-42) == "UNKNOWN_CODE"
    assert [c for c in Code if mooncake.is_success(c)] == [0, -705]
    assert [c for c in Code if mooncake.is_pressure(c)] == [-200]
    assert not any(mooncake.is_final(c) for c in (0, -200, -703, -704, -707, -800, -900))
    assert mooncake.is_final(-600)
    assert mooncake.is_final(-400)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            ModuleNotFoundError("No module named 'mooncake'", name="mooncake"),
            "kvmask[mooncake-cpu]",
        ),
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4",
        ),
        (
            ImportError("libcudart.so.12: cannot open shared object file"),
            "this build of Mooncake needs CUDA; without it install one build of Mooncake: "
            "pip install 'kvmask[mooncake-cpu]'",
        ),
    ],
)
def test_a_missing_library_keeps_the_loaders_words(monkeypatch, error, hint):
    def broken(name):
        assert name == "mooncake.store"
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(MissingDependencyError) as caught:
        mooncake.connect({"master_server_address": ADDRESS})
    assert str(caught.value).startswith(str(error))
    assert hint in str(caught.value)
    assert caught.value.__cause__ is error


def test_everything_but_the_store_works_without_mooncake(tmp_path):
    """A package that does not load stands first on the path; masks must not notice."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    code = """
import kvmask, kvmask.errors, kvmask.mooncake
groups = [kvmask.FullAttention(block_size=64), kvmask.SlidingWindow(block_size=16, window=32)]
assert kvmask.Coordinator(groups, hash_block_size=16).store_mask(128)[1].indices() == [2, 3, 6, 7]
try:
    kvmask.mooncake.connect({'master_server_address': '127.0.0.1:1'})
except kvmask.errors.MissingDependencyError as error:
    assert str(error).startswith('libcudart.so.12: cannot open'), error
    assert str(error.__cause__) == 'libcudart.so.12: cannot open'
    print('told')
"""
    root = Path(mooncake.__file__).parent.parent.parent
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert out.stdout == "told\n", out.stderr


def module(setup):
    """A `mooncake.store` whose client is set up by a function."""

    class Store:
        def setup(self, *args, **kwargs):
            return setup(*args, **kwargs)

    class Module:
        MooncakeDistributedStore = Store

    return Module


@pytest.fixture
def no_servers(monkeypatch):
    monkeypatch.setattr("kvmask.mooncake.client.check_servers", lambda config, timeout: None)


SETTINGS = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": ADDRESS,
    "tenant_id": "team",
    "global_segment_size": "16MB",
}


def test_a_refused_setup_names_the_code(monkeypatch, no_servers):
    def setup(*args, **kwargs):
        assert args == ("host", "P2PHANDSHAKE", 16 << 20, 2 << 20, "rdma", "", ADDRESS)
        assert kwargs == {"tenant_id": "team"}
        return -900

    monkeypatch.setattr("kvmask.mooncake.client.import_store", lambda: module(setup))
    with pytest.raises(StoreError, match=r"got -900 \(RPC_FAIL\)") as caught:
        mooncake.connect(SETTINGS, buffer_bytes=2 << 20, hostname="host")
    assert caught.value.code == -900
    for text in ("`metadata_server` P2PHANDSHAKE", f"`master_server_address` {ADDRESS}", "at host"):
        assert text in str(caught.value)


@pytest.mark.parametrize("huge", [False, True])
def test_memory_that_runs_out_names_both_sizes(monkeypatch, no_servers, huge):
    def setup(*args, **kwargs):
        raise MemoryError("std::bad_alloc")

    monkeypatch.delenv("MC_STORE_USE_HUGEPAGE", raising=False)
    if huge:
        monkeypatch.setenv("MC_STORE_USE_HUGEPAGE", "1")
    monkeypatch.setattr("kvmask.mooncake.client.import_store", lambda: module(setup))
    with pytest.raises(StoreError) as caught:
        mooncake.connect(SETTINGS | {"local_buffer_size": "30GB"}, hostname="host")
    text = str(caught.value)
    assert "segment (`global_segment_size`) of 16777216 bytes" in text
    assert "buffer (`local_buffer_size`) of 32212254720 bytes" in text
    assert ("$MC_STORE_USE_HUGEPAGE is set, and vm.nr_hugepages reserves " in text) == huge
    assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", None, True])
def test_a_time_limit_that_is_none(timeout):
    with pytest.raises(ArgumentError, match="`timeout` must be a number of seconds above 0"):
        mooncake.connect(SETTINGS, timeout=timeout)
    with (
        pytest.raises(ArgumentError, match="`timeout` must be a number of seconds above 0"),
        mooncake.local_master(timeout=timeout),
    ):
        pass


def test_no_master_program(monkeypatch, tmp_path):
    monkeypatch.setattr("kvmask.mooncake.master.find_master", lambda: None)
    with (
        pytest.raises(MissingDependencyError, match="no mooncake_master program found; install"),
        mooncake.local_master(),
    ):
        pass
    with (
        pytest.raises(StoreError, match="`program` must be executable"),
        mooncake.local_master(program=tmp_path / "absent"),
    ):
        pass
    with (
        pytest.raises(ArgumentError, match="`lease_ms` must be at least 1, got 0"),
        mooncake.local_master(lease_ms=0),
    ):
        pass
    with (
        pytest.raises(TypeError, match="`lease_ms` must be an integer, got bool"),
        mooncake.local_master(lease_ms=True),
    ):
        pass
    with (
        pytest.raises(TypeError, match="`args` must be a sequence of text, got '--v=1'"),
        mooncake.local_master(args="--v=1"),
    ):
        pass


def script(tmp_path, text):
    path = tmp_path / "mooncake_master"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_a_master_that_ends_at_start_shows_its_log(tmp_path):
    program = script(tmp_path, "echo libnuma.so.1: error while loading shared libraries; exit 127")
    with (
        pytest.raises(StoreError, match=r"status 127; .*libnuma.so.1.* libnuma1") as caught,
        mooncake.local_master(program=program),
    ):
        pass
    assert caught.value.code == 127


def test_a_master_that_never_answers_is_stopped(tmp_path):
    program = script(tmp_path, f"echo $$ > {tmp_path}/pid; echo waiting; exec sleep 60")
    with (
        pytest.raises(StoreError, match=r"did not answer within 3 s; end of its log: waiting"),
        mooncake.local_master(program=program, timeout=3),
    ):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.store
def test_no_master_at_the_address_is_told_soon(master):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refused
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StoreError, match=f"no Mooncake master answers at .* {address}") as told:
            mooncake.connect({"master_server_address": address}, timeout=0.2)
    assert told.value.code == Code.RPC_FAIL


@pytest.mark.store
def test_a_file_as_vllm_has_it_connects(master, tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master.address,
                "protocol": "tcp",
                "global_segment_size": "16MB",
                "local_buffer_size": "16MB",
            }
        )
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    store = mooncake.connect(hostname="127.0.0.1")
    try:
        assert store.put("file", b"12345") == 0
        assert store.batch_is_exist(["file", "absent"]) == [1, 0]
        assert store.remove("file") in (0, Code.OBJECT_HAS_LEASE)
    finally:
        store.close()


@pytest.mark.store
def test_a_master_of_ones_own_stops_also_when_the_body_raises(master):
    with pytest.raises(KeyError), mooncake.local_master(lease_ms=100) as own:
        assert own.address != master.address
        assert own.alive
        os.kill(own.pid, 0)
        store = mooncake.connect(own, segment_bytes=0)  # a client that gives no memory
        assert store.batch_is_exist(["x"]) == [0]
        store.close()
        raise KeyError
    assert not own.alive
    assert not own.log_path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(own.pid, 0)
    assert master.alive


@pytest.mark.store
def test_a_master_listens_on_loopback_only(master):
    """Two ports, both asked for: nothing on all addresses, no metadata server on 8080."""
    inodes = set()
    for fd in Path(f"/proc/{master.pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{master.pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                listening.append(words[1].split(":"))
    ports = sorted(int(url.rpartition(":")[2]) for url in (master.address, master.metrics_url))
    assert sorted(int(port, 16) for _, port in listening) == ports
    assert {host for host, _ in listening} == {"0100007F"}


@pytest.mark.store
def test_a_store_without_its_master_answers_a_code(master):
    with mooncake.local_master() as own:
        store = mooncake.connect(own, segment_bytes=0)
        assert store.batch_is_exist(["x", "y"]) == [0, 0]
    assert store.batch_is_exist(["x", "y"]) == [Code.RPC_FAIL] * 2
    store.close()


@pytest.mark.parametrize(
    "size", ["9" * 5000, "9" * 400 + ".5gb", "1e5", 1 << 63, 1 << 5000, -1, float("inf"), True]
)
def test_sizes_that_no_store_has(size):
    with pytest.raises(ArgumentError, match="`size` must be a number of bytes") as told:
        mooncake.parse_size(size)
    assert len(str(told.value)) < 200
    for name in ("global_segment_size", "local_buffer_size"):
        with pytest.raises((ArgumentError, TypeError), match=f"`{name}`") as told:
            mooncake.StoreConfig(master_server_address=ADDRESS, **{name: size})
        assert len(str(told.value)) < 200


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("localhost:70000", "a port from 1 to 65535"),
        ("localhost:0", "a port from 1 to 65535"),
        ("localhost:" + "9" * 5000, "a port from 1 to 65535"),
        ("a" * 100 + ".b:5", "must name a host"),
    ],
)
def test_addresses_that_nothing_can_have(monkeypatch, address, text):
    monkeypatch.setattr("kvmask.mooncake.client.import_store", lambda: None)
    with pytest.raises(ArgumentError, match=text):
        mooncake.connect({"master_server_address": address}, timeout=0.1)


@pytest.mark.parametrize(("given", "level"), [(None, "ERROR"), ("INFO", "INFO")])
def test_the_client_logs_errors_unless_told_otherwise(monkeypatch, given, level):
    seen = []
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    if given:
        monkeypatch.setenv("MC_LOG_LEVEL", given)
    monkeypatch.setattr(
        importlib, "import_module", lambda name: seen.append((name, os.environ["MC_LOG_LEVEL"]))
    )
    mooncake.import_store()
    assert seen == [("mooncake.store", level)]
