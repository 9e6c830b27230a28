"""A store that does not answer: lookups, saves and loads of a process know it of each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm_pair as pair
from test_vllm_jobs import HASHES, load, plain_case, receiver
from vllm_oracle import digest, engine

from kvmask import SlidingWindow
from kvmask.vllm.outages import breaker_of

pytestmark = pytest.mark.vllm


class Silent(pair.Script):
    """A store that raises, or answers with the code of a call that did not get through."""

    def __init__(self, raises: bool) -> None:
        super().__init__(0, set())
        self.raises = raises
        self.dead = True

    def _say(self, name: str, keys: Any) -> list[int] | None:
        if not self.dead:
            return None
        self.calls.append((name, list(keys)))
        if self.raises:
            raise ConnectionError("the master is gone")
        return [-900] * len(keys)

    def batch_is_exist(self, keys: Any) -> list[int]:
        said = self._say("exist", keys)
        return super().batch_is_exist(keys) if said is None else said

    def batch_put_from_multi_buffers(self, keys: Any, *args: Any) -> list[int]:
        said = self._say("put", keys)
        return super().batch_put_from_multi_buffers(keys, *args) if said is None else said

    def batch_get_into_multi_buffers(self, keys: Any, *args: Any) -> list[int]:
        said = self._say("get", keys)
        return super().batch_get_into_multi_buffers(keys, *args) if said is None else said


class Engine:
    """A worker's lookup and its threads, on one store."""

    def __init__(self, store: Silent) -> None:
        case = plain_case()
        self.store = store
        self.worker = pair.lookup_worker(case, "kvmask", store)
        self.receiver = receiver(store)
        self.sender = pair.sending(
            case,
            "kvmask",
            pair.databases(case, 1),
            store,
            pair.coordinator(case, "kvmask"),
            tp_rank=0,
            group_put_steps=[1],
        )

    def lookup(self) -> None:
        self.worker.lookup(25, HASHES)

    def save(self) -> None:
        data = engine().data
        meta = data.ReqMeta(
            "r", 24, ([1, 2, 3, 4, 5, 6],), HASHES, can_save=True, store_job_id=1,
            prefill_end_tokens=24,
        )  # fmt: skip
        pair.run_job(self.sender, meta)

    def load(self) -> None:
        load(self.receiver, [1, 2, 3, 4, 5, 6], HASHES)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The outages that the log tells of."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append(r.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.kvmask")
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


STEPS: dict[str, Callable[[Engine], None]] = {
    "lookup": Engine.lookup,
    "save": Engine.save,
    "load": Engine.load,
}


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("first", STEPS)
def test_an_outage_costs_one_call_whoever_meets_it(
    first: str, raises: bool, said: list[str]
) -> None:
    store = Silent(raises)
    one = Engine(store)
    STEPS[first](one)
    assert len(store.calls) == 1
    for _ in range(3):
        for step in STEPS.values():
            step(one)
    assert len(store.calls) == 1
    # What was to be loaded may not be used, what was to be saved is not taken for saved.
    assert one.receiver.get_and_clear_block_ids_with_load_errors() == {1, 2, 3, 4, 5, 6}
    assert one.receiver.get_and_clear_finished_requests() == {"r"}
    assert one.sender._saved_offset.get("r", 0) == 0
    assert one.sender.take_completed_saves()  # the jobs are over, and let go of their blocks
    assert one.sender.request_queue.unfinished_tasks == 0
    assert sum("does not answer" in text for text in said) == 1

    store.dead = False
    breaker_of(store)._until = 0.0  # the time is over
    one.save()
    assert one.sender._saved_offset["r"] == 24
    assert worker_hit(one) == 24
    one.load()
    assert not one.receiver.get_and_clear_block_ids_with_load_errors()
    assert sum("answers again" in text for text in said) == 1


def worker_hit(one: Engine) -> int:
    found: int = one.worker.lookup(25, HASHES).hit_length
    return found


@pytest.mark.parametrize("raises", [True, False])
def test_a_lookup_of_windows_alone_makes_one_call_too(raises: bool) -> None:
    """Without full attention a lookup goes on past every block that is absent."""
    case = plain_case()
    blocks = 512
    fields = {
        "groups": (SlidingWindow(4, window=8),),
        "hash_blocks": blocks,
        "present": ((False,) * blocks,),
    }
    case = type(case)(**dict(case.__dict__) | fields)
    hashes = [digest(i) for i in range(blocks)]
    calls = {}
    for dead in (False, True):
        store = Silent(raises)
        store.dead = dead
        worker = pair.lookup_worker(case, "kvmask", store, "staged")
        for _ in range(3):
            assert worker.lookup(4 * blocks + 1, hashes).hit_length == 0
        calls[dead] = len(store.calls)
    assert calls[False] > 3
    assert calls[True] == 1


def test_stores_do_not_share_outages() -> None:
    silent, other = Silent(True), Silent(True)
    other.dead = False
    Engine(silent).lookup()
    assert breaker_of(silent).open
    assert not breaker_of(other).open
    Engine(other).save()
    assert len(other.calls) == 2
