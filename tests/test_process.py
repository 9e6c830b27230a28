"""Programs that are started: with their own id and log, and never longer than this process."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvmask import mooncake
from kvmask.errors import StoreError
from kvmask.mooncake import process as _process


def script(tmp_path, text):
    path = tmp_path / "mooncake_master"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


SLEEPER = "echo $$ >> {0}/pids; exec sleep 60"


def waiting(code, tmp_path):
    """A Python process that runs `code`, up to the line it prints."""
    root = Path(mooncake.__file__).parent.parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(script(tmp_path, SLEEPER.format(tmp_path)))],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    return process


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_does_not_outlive_its_parent(tmp_path, signum):
    code = """
import sys, tempfile, threading, time
from kvmask.mooncake import process as _process
log = tempfile.TemporaryFile()
made = []
# The thread that asks for it is gone before anything else happens.
thread = threading.Thread(target=lambda: made.append(_process.start([sys.argv[1]], log)))
thread.start(); thread.join()
while not __import__("os").path.exists(sys.argv[1].replace("mooncake_master", "pids")):
    time.sleep(0.01)
time.sleep(0.3)
assert made[0].poll() is None
print("started", flush=True)
time.sleep(60)
"""
    process = waiting(code, tmp_path)
    pid = int((tmp_path / "pids").read_text())
    assert runs(pid)  # although that thread has ended
    process.send_signal(signum)
    process.communicate(timeout=30)
    end = time.monotonic() + 30
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(pid)


def test_a_child_has_the_id_of_its_program(tmp_path):
    with tempfile.TemporaryFile() as log:
        process = _process.start([str(script(tmp_path, SLEEPER.format(tmp_path)))], log)
        try:
            end = time.monotonic() + 30
            while not (tmp_path / "pids").exists() and time.monotonic() < end:
                time.sleep(0.02)
            assert int((tmp_path / "pids").read_text()) == process.pid
            assert process.poll() is None
        finally:
            process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_a_program_that_is_none(tmp_path):
    program = tmp_path / "mooncake_master"
    program.write_bytes(b"\x7fELF and no more")
    program.chmod(0o755)
    for wrong, text in ((program, "Exec format error"), (tmp_path, "must be executable")):
        with pytest.raises(StoreError, match=text), mooncake.local_master(program=wrong):
            pass


def test_a_program_is_looked_up_on_the_path(tmp_path, monkeypatch):
    script(tmp_path, "echo found; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with (
        pytest.raises(StoreError, match="status 3; end of its log: found"),
        mooncake.local_master(program="mooncake_master"),
    ):
        pass


def test_a_second_start_has_a_log_of_its_own(tmp_path):
    program = script(
        tmp_path,
        f"if [ -e {tmp_path}/once ]; then echo second; else touch {tmp_path}/once; "
        "echo first Address already in use; fi; exit 4",
    )
    with (
        pytest.raises(StoreError, match=r"end of its log: second$"),
        mooncake.local_master(program=program),
    ):
        pass
