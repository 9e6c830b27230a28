"""The asyncio driver of docs/contract.md: short, and as good as the loop of KVTransfer."""

import ast
import asyncio
import re
import threading
from pathlib import Path

import pytest
from fake_store import EXIST, GET, PUT, FakeStore

import kvmask
from kvmask import AbsenceMemo, FullAttention, KVLayout, PlanTools, PresenceMemo, SlidingWindow
from kvmask.errors import PlanStateError
from kvmask.mooncake import MooncakePolicy

np = pytest.importorskip("numpy")
PAGE = Path(__file__).parent.parent / "docs" / "contract.md"
if not PAGE.exists():
    pytest.skip("the pages are not beside the tests", allow_module_level=True)

TABLES = {"full": range(1, 5), "swa": range(1, 17)}
FRESH = {"full": range(5, 9), "swa": range(17, 33)}


def driver_source():
    """The lines of the driver, as the page shows them."""
    (example,) = re.findall(
        r"^>>> (async def drive\(.*\n(?:\.\.\. .*\n)+)", PAGE.read_text(encoding="utf-8"), re.M
    )
    return re.sub(r"^\.\.\. ", "", example, flags=re.M)


@pytest.fixture(scope="module")
def drive():
    names = {"asyncio": asyncio}
    exec(compile(driver_source(), str(PAGE), "exec"), names)
    return names["drive"]


class Event:
    """Stands for a CUDA event."""

    def __init__(self, error=None):
        self.waits = 0
        self.error = error

    def synchronize(self):
        self.waits += 1
        if self.error is not None:
            raise self.error


class Engine:
    """A cache, a store, and all tools that plans can have."""

    def __init__(self):
        pick = np.random.default_rng(1)
        self.full = pick.integers(0, 256, (9, 64, 2), np.uint8)
        self.swa = pick.integers(0, 256, (33, 16, 2), np.uint8)
        layouts = {
            "full": KVLayout.from_tensors([self.full], num_blocks=9),
            "swa": KVLayout.from_tensors([self.swa], num_blocks=33),
        }
        groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
        self.contract = kvmask.Contract(
            groups, 16, kvmask.StrictKeys("m"), kvmask.Hashing(seed="0"), payload=layouts
        )
        self.bound = self.contract.bind(layouts)
        self.request = self.contract.request(range(257))
        self.store = FakeStore()
        for row in self.bound.layouts:
            for layout in row:
                for address, size in layout.storages:
                    self.store.register_buffer(address, size)
        self.tools = PlanTools(
            MooncakePolicy(max_pieces=4),
            hints=True,
            memo=PresenceMemo(60.0),
            failed_loads=AbsenceMemo(60.0),
        )

    def plans(self, saving, loading):
        """The plans of one request, each made when the one before is done."""
        request, bound, tools = self.request, self.bound, self.tools
        request.saved((yield request.save_plan(bound, TABLES, 256, saving, tools)))
        hit = yield request.lookup_plan(tools=tools)
        yield request.load_plan(bound, hit, FRESH, loading, tools)
        yield request.lookup_plan(tools=tools)

    def counters(self):
        return {k: v for k, v in self.tools.stats.snapshot().items() if "seconds" not in k}


def run(engine, one, saving=None, loading=None):
    """All plans of an engine by a driver, which is called with each."""
    plans, results = engine.plans(saving, loading), []
    plan = next(plans)
    while True:
        results.append(one(plan, engine.store))
        try:
            plan = plans.send(results[-1])
        except StopIteration:
            return results


def test_it_is_short():
    (function,) = ast.parse(driver_source()).body
    assert isinstance(function, ast.AsyncFunctionDef)
    assert len(driver_source().splitlines()) <= 10


def test_it_does_what_the_loop_of_the_library_does(drive):
    events, theirs = [Event() for _ in range(4)], Engine()
    expected = run(theirs, kvmask.drive, events[0], events[1])
    mine = Engine()
    results = run(mine, lambda *args: asyncio.run(drive(*args)), events[2], events[3])
    assert results == expected
    assert [event.waits for event in events] == [1, 1, 1, 1]
    assert mine.counters() == theirs.counters()
    saved, hit, loaded, again = results
    assert (saved.stored, saved.mark, hit.length, loaded.loaded) == (12, 256, 256, 6)
    assert again.length == 256
    # The save told the memo, so no lookup asks the store, and the hints know the prefix.
    assert mine.counters()["asked_keys"] == 0
    assert mine.counters()["memo_keys"] == 12
    hashes = mine.request.hashes
    assert mine.tools.hints.predict(hashes, 16, 64, 256) == 256
    assert np.array_equal(mine.full[5:9], mine.full[1:5])
    assert np.array_equal(mine.swa[31:33], mine.swa[15:17])


def test_what_failed_is_absent_for_the_next_lookup(drive):
    engine = Engine()
    engine.store.fail(GET, -800)
    saved, hit, loaded, again = run(engine, lambda *args: asyncio.run(drive(*args)))
    assert saved.ok
    assert (hit.length, again.length) == (256, 0)
    assert {failure.code for failure in loaded.failures} == {-800}
    assert engine.counters()["avoided_keys"] > 0


def test_a_call_that_raises_fails_its_keys(drive):
    engine = Engine()
    error = ConnectionError("gone")
    engine.store.fail(PUT, error, whole=True)
    plan = engine.request.save_plan(engine.bound, TABLES, 256, None, engine.tools)
    result = asyncio.run(drive(plan, engine.store))
    assert (result.stored, len(result.failures), result.mark) == (0, 12, 0)
    assert {failure.cause for failure in result.failures} == {error}


def test_an_event_that_raises_fails_what_was_to_be_moved(drive):
    engine = Engine()
    wait = Event(RuntimeError("lost device"))
    plan = engine.request.save_plan(engine.bound, TABLES, 256, wait, engine.tools)
    result = asyncio.run(drive(plan, engine.store))
    assert {str(failure.cause) for failure in result.failures} == {"lost device"}
    assert engine.store.pool == {}


def test_a_wrong_call_is_raised_with_what_was_done(drive):
    engine = Engine()
    engine.store.fail(EXIST, TypeError("wrong"), whole=True)
    plan = engine.request.save_plan(engine.bound, TABLES, 256, None, engine.tools)
    with pytest.raises(TypeError, match="wrong") as caught:
        asyncio.run(drive(plan, engine.store))
    assert len(caught.value.partial_result.failures) == 12


def test_a_task_that_is_cancelled_ends_its_plan(drive):
    engine = Engine()
    plan = engine.request.lookup_plan(tools=engine.tools)
    begun, over = threading.Event(), threading.Event()

    def slow(store, name, keys):
        begun.set()
        assert over.wait(30)

    engine.store.hooks.append(slow)

    async def cancelled():
        task = asyncio.create_task(drive(plan, engine.store))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            over.set()

    asyncio.run(cancelled())
    assert plan.next_call() is None
    with pytest.raises(PlanStateError):
        plan.feed([])


def test_plans_of_one_engine_run_beside_each_other(drive):
    engine = Engine()
    run(engine, kvmask.drive)

    async def many():
        requests = [engine.contract.request(hashes=engine.request.hashes) for _ in range(8)]
        plans = [r.lookup_plan(strategy="exact") for r in requests]
        return await asyncio.gather(*(drive(plan, engine.store) for plan in plans))

    assert {hit.length for hit in asyncio.run(many())} == {192}
