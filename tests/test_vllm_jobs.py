"""Jobs of the transfer threads that cannot be done: each is reported, whatever went wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from vllm_oracle import digest, engine

from kvmask.groups import FullAttention
from kvmask.vllm import loading, saving, schemes
from kvmask.vllm.acting import ACTING

pytestmark = pytest.mark.vllm


def plain_case(blocks: int = 6) -> Any:
    """One full-attention group of blocks of 4."""
    from test_vllm_differential import full_case

    case = full_case(random.Random(5))
    fields = dict(case.__dict__) | {"hash_blocks": blocks, "present": ((True,) * blocks,)}
    assert fields["groups"] == (FullAttention(4),)
    return type(case)(**fields)


def receiver(store: Any, **options: Any) -> Any:
    case = plain_case()
    return pair.receiving(
        case,
        "kvmask",
        pair.databases(case, 1),
        store,
        pair.coordinator(case, "kvmask"),
        tp_rank=0,
        **options,
    )


def load(thread: Any, block_ids: list[int], hashes: Any, cached: int = 0) -> None:
    data = engine().data
    spec = data.LoadSpec(
        vllm_cached_tokens=cached, kvpool_cached_tokens=24, can_load=True, token_len=24
    )
    meta = data.ReqMeta("r", 24, (block_ids,), hashes, load_spec=spec)
    thread.request_queue.put(meta)
    thread._handle_request(thread.request_queue.get())


HASHES = [digest(i) for i in range(6)]


@pytest.mark.parametrize("hashes", [[], HASHES[:5]])
def test_a_load_without_digests_fails(hashes: list[bytes]) -> None:
    """Nothing is read, so nothing of it may be used."""
    store = pair.Script(1, set())
    thread = receiver(store)
    load(thread, [1, 2, 3, 4, 5, 6], hashes)
    assert store.calls == []
    assert thread.get_and_clear_finished_requests() == {"r"}
    assert thread.get_and_clear_block_ids_with_load_errors() == {1, 2, 3, 4, 5, 6}
    assert thread.request_queue.unfinished_tasks == 0


@pytest.mark.gives_up
def test_the_null_block_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no plan")

    monkeypatch.setattr(loading, "_plan", broken)
    thread = receiver(pair.Script(1, set()))
    load(thread, [0, 0, 3, 4, 5, 6], HASHES, cached=4)
    assert thread.get_and_clear_finished_requests() == {"r"}
    assert thread.get_and_clear_block_ids_with_load_errors() == {3, 4, 5, 6}


@pytest.mark.gives_up
def test_a_load_whose_thread_cannot_be_read_is_left_to_stock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any) -> Any:
        raise AttributeError("tp_rank")

    monkeypatch.setattr(loading, "thread_plans", broken)
    store = pair.Script(1, set())
    thread = receiver(store)
    load(thread, [1, 2, 3, 4, 5, 6], HASHES)
    assert [name for name, *_ in store.calls] == ["get"]
    assert thread.get_and_clear_finished_requests() == {"r"}
    assert thread.get_and_clear_block_ids_with_load_errors() == set()


def sender(store: Any) -> Any:
    case = plain_case()
    return pair.sending(
        case,
        "kvmask",
        pair.databases(case, 1),
        store,
        pair.coordinator(case, "kvmask"),
        tp_rank=0,
        group_put_steps=[1],
        enable_kv_event=True,
    )


def save(thread: Any) -> str | None:
    meta = engine().data.ReqMeta(
        "r", 24, ([1, 2, 3, 4, 5, 6],), HASHES, can_save=True, store_job_id=7
    )
    return pair.run_job(thread, meta)


@pytest.mark.gives_up
@pytest.mark.parametrize("what", ["token length", "plans"])
def test_a_save_that_fails_early_is_reported(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Else the scheduler keeps its blocks for the rest of the run."""

    def broken(*args: Any) -> Any:
        raise ValueError("an unreadable thread")

    store = pair.Script(1, set())
    thread = sender(store)
    name = "_token_len" if what == "token length" else "thread_plans"
    monkeypatch.setattr(saving, name, broken)
    assert save(thread) is None
    assert thread.take_completed_saves() == {7: 1}
    assert thread.stored_requests == {"r": set()}
    assert thread.request_queue.unfinished_tasks == 0
    assert [name for name, *_ in store.calls] == ["exist", "put"]


def test_a_job_that_stock_cannot_take_either_is_no_internal_error() -> None:
    """Stock reports the save and raises; kvmask goes on with the next one."""
    store = pair.Script(1, set())
    thread = sender(store)
    data = engine().data
    meta = data.ReqMeta("r", None, ([1],), HASHES, can_save=True, store_job_id=7)
    assert pair.run_job(thread, meta) == "TypeError"
    assert thread.take_completed_saves() == {7: 1}
    assert thread.request_queue.unfinished_tasks == 0
    assert store.calls == []
    assert ACTING.on
    thread = receiver(store)
    meta = data.ReqMeta("r", 24, ([1],), HASHES, load_spec=None)
    assert pair.run_job(thread, meta) is not None
    assert ACTING.on


def test_a_save_whose_records_fail_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no room for records")

    thread = sender(pair.Script(1, set()))
    thread._update_retry_token_ids = broken
    assert save(thread) == "RuntimeError"
    assert thread.take_completed_saves() == {7: 1}
    assert thread.request_queue.unfinished_tasks == 0


def test_state_of_a_thread_is_in_one_place() -> None:
    thread = sender(pair.Script(1, set()))
    before = set(vars(thread))
    save(thread)
    assert set(vars(thread)) - before == {"_kvmask_state"}
    assert schemes.participates(thread) == [True]
