"""The switch in vLLM: its own functions act again, after a word in a file or an internal error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from test_vllm_jobs import load, plain_case, receiver, save, sender

from kvmask import Bitset
from kvmask.errors import ArgumentError
from kvmask.vllm import acting, coordinator, layouts, loading, saving
from kvmask.vllm.acting import ACTING

pytestmark = pytest.mark.vllm

IDS = [1, 2, 3, 4, 5, 6]


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("a mistake")


def masks_of(coord: Any) -> Any:
    return coord.load_mask([b"x" * 32] * 6, 24)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "kvmask" in r.getMessage()]


@pytest.fixture
def caplog_all(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ACTING, "_log", logging.getLogger("test.acting"))
    return caplog


def test_a_file_puts_stock_back_and_kvmask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog_all: Any
) -> None:
    file = tmp_path / "switch"
    monkeypatch.setenv(acting.FILE, str(file))
    acting.watch()
    coord = pair.coordinator(plain_case(), "kvmask")
    assert type(masks_of(coord)[0]) is Bitset
    file.write_text("stock")
    ACTING.look()
    assert type(masks_of(coord)[0]) is list
    store = pair.Script(1, set())
    monkeypatch.setattr(loading, "thread_plans", broken)
    monkeypatch.setattr(saving, "thread_plans", broken)
    thread = receiver(store)
    load(thread, IDS, [bytes([i]) * 32 for i in range(6)])
    assert thread.get_and_clear_finished_requests() == {"r"}
    assert save(sender(store)) is None
    assert [name for name, *_ in store.calls] == ["get", "exist", "put"]
    file.write_text("kvmask")
    ACTING.look()
    assert type(masks_of(coord)[0]) is Bitset
    assert not ACTING.failed
    assert len(said(caplog_all)) == 2


@pytest.mark.gives_up
def test_an_error_in_a_mask_puts_stock_back(
    monkeypatch: pytest.MonkeyPatch, caplog_all: Any
) -> None:
    coord = pair.coordinator(plain_case(), "kvmask")
    own = masks_of(coord)
    monkeypatch.setattr(coordinator, "rules_of", broken)
    assert [list(m) for m in masks_of(coord)] == [list(m) for m in own]
    assert type(masks_of(coord)[0]) is list
    assert coord.store_mask(24) == pair.coordinator(plain_case(), "stock").store_mask(24)
    (line,) = said(caplog_all)
    assert "kvmask failed in coordinator." in line
    assert "ZeroDivisionError: a mistake" in line


@pytest.mark.gives_up
@pytest.mark.parametrize("where", ["thread_plans", "_tails"])
def test_an_error_before_a_load_leaves_it_to_stock(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(loading, where, broken)
    store = pair.Script(1, set())
    thread = receiver(store)
    load(thread, IDS, [bytes([i]) * 32 for i in range(6)])
    assert [name for name, *_ in store.calls] == ["get"]
    assert thread.get_and_clear_finished_requests() == {"r"}
    assert thread.get_and_clear_block_ids_with_load_errors() == set()
    assert ACTING.failed


@pytest.mark.gives_up
def test_an_error_within_a_load_is_reported_and_the_next_is_stocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "_plan", broken)
    store = pair.Script(1, set())
    thread = receiver(store)
    hashes = [bytes([i]) * 32 for i in range(6)]
    load(thread, IDS, hashes)
    assert thread.get_and_clear_block_ids_with_load_errors() == set(IDS)
    assert ACTING.failed
    load(thread, IDS, hashes)
    assert [name for name, *_ in store.calls] == ["get"]
    assert thread.get_and_clear_block_ids_with_load_errors() == set()


@pytest.mark.gives_up
def test_an_error_of_a_save_is_reported_and_the_next_is_stocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "SavePlan", broken)
    store = pair.Script(1, set())
    assert save(sender(store)) == "ZeroDivisionError"
    assert store.calls == []
    assert ACTING.failed
    thread = sender(store)
    assert save(thread) is None
    assert [name for name, *_ in store.calls] == ["exist", "put"]


def test_a_load_without_digests_is_no_internal_error() -> None:
    thread = receiver(pair.Script(1, set()))
    load(thread, IDS, [])
    assert thread.get_and_clear_block_ids_with_load_errors() == set(IDS)
    assert ACTING.on


@pytest.mark.gives_up
def test_addresses_come_from_stock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain_case()
    (db,) = pair.databases(case, 2)
    layouts.adopt_addresses(db)
    place = getattr(db, "store_layout", None) or db
    args = ([(0, 4), (4, 8)], IDS, [0, 0])
    own = place.prepare_values(*args)
    monkeypatch.setattr(layouts, "_rank_local", broken)
    assert [list(x) for x in place.prepare_values(*args)] == [list(x) for x in own]
    assert ACTING.failed


@pytest.mark.parametrize("value", [3, "", "a\0b", True])
def test_a_path_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="`switch_file`"):
        acting.check_file(value)
