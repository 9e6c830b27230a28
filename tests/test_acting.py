"""The switch: a file or an internal error put the engine's own functions back."""

import logging
import threading
import time

import pytest

from kvmask.engines import acting as module
from kvmask.engines.acting import Switch

LOG = logging.getLogger("test.switch")


@pytest.fixture
def switch(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    made = Switch("stock", LOG)
    yield made
    made.reset()  # its thread ends


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_file_that_nobody_can_watch_is_not_taken_for_watched(switch, tmp_path, monkeypatch):
    file = tmp_path / "switch"

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            switch.watch(file)
    switch.watch(file)
    file.write_text("stock")
    wait_until(lambda: not switch.on)


def test_a_file_turns_it_off_and_on(switch, tmp_path, caplog):
    file = tmp_path / "switch"
    switch.watch(file)
    assert switch.on
    file.write_text(" Stock\n")
    wait_until(lambda: not switch.on)
    file.write_text("kvmask")
    wait_until(lambda: switch.on)
    file.write_text("stock")
    wait_until(lambda: not switch.on)
    file.unlink()
    wait_until(lambda: switch.on)
    time.sleep(0.1)
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        f"kvmask is off, stock acts: {file}",
        f"kvmask is on again: {file}",
        f"kvmask is off, stock acts: {file}",
        f"kvmask is on again: {file}",
    ]


def test_it_is_read_at_once(switch, tmp_path):
    file = tmp_path / "switch"
    file.write_text("stock")
    switch.watch(str(file))
    assert not switch.on
    switch.watch(file)
    assert sum(t.name == "kvmask-switch" for t in threading.enumerate()) >= 1


def test_any_of_several_files_turns_it_off(switch, tmp_path):
    switch.watch(tmp_path / "a")
    switch.watch(tmp_path / "b")
    (tmp_path / "b").write_text("stock")
    wait_until(lambda: not switch.on)
    (tmp_path / "b").write_text("")
    wait_until(lambda: switch.on)


@pytest.mark.parametrize("on", [True, False])
def test_what_it_does_not_know_changes_nothing(switch, tmp_path, caplog, on):
    file = tmp_path / "switch"
    if not on:
        file.write_text("stock")
    switch.watch(file)
    caplog.clear()
    file.write_bytes(b"\xff perhaps")
    for _ in range(5):
        switch.look()
    assert switch.on is on
    (record,) = caplog.records
    assert "must say `kvmask` or `stock`" in record.getMessage()


def test_a_file_that_cannot_be_read_changes_nothing(switch, tmp_path, caplog):
    switch.watch(tmp_path)
    for _ in range(5):
        switch.look()
    assert switch.on
    (record,) = caplog.records
    assert "cannot be read, it stays as it is" in record.getMessage()


def test_an_internal_error_turns_it_off_for_good(switch, tmp_path, caplog):
    file = tmp_path / "switch"
    file.write_text("kvmask")
    switch.watch(file)

    def own(number):
        raise ZeroDivisionError("a mistake")

    call = switch.guard(own, lambda: lambda number: number + 1, "a function")
    assert [call(1), call(2), call(number=3)] == [2, 3, 4]
    assert (switch.on, switch.failed) == (False, True)
    switch.look()
    assert not switch.on
    switch.trip("another one", ValueError())
    (record,) = caplog.records
    assert "kvmask failed in a function. From now on stock acts" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_an_error_of_the_engine_is_none_of_kvmask(switch):
    def own(number):
        raise TypeError("wrong")

    def stock(number):
        raise KeyError(number)

    call = switch.guard(own, lambda: stock, "a function")
    with pytest.raises(TypeError, match="wrong"):
        call(1)
    assert switch.on


def test_off_means_that_own_is_not_called(switch, tmp_path):
    called = []
    call = switch.guard(called.append, lambda: lambda x: -x, "f")
    call(1)
    switch.on = False
    assert call(2) == -2
    assert called == [1]
