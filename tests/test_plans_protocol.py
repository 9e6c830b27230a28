"""The one protocol of lookups, saves and loads: one driver runs all three, blocking or not.

What works in a KVTransfer works by hand too: hints, memories, counters, events and the log live in
the plans.
"""

import asyncio
import contextlib
import itertools
import threading

import pytest
from fake_store import FakeStore
from rig import (
    Engine,
    answer_with,
    assert_loaded,
    contract_of,
    digests,
    flat_layout,
    key,
    mooncake_tools,
    pair,
    scheme_of,
)

from kvmask import (
    AbsenceMemo,
    Coordinator,
    FullAttention,
    HitHints,
    LoadPlan,
    LookupPlan,
    Mamba,
    PlanTools,
    PresenceMemo,
    SavePlan,
    SlidingWindow,
    StorePolicy,
    drive,
)
from kvmask.errors import PlanStateError
from kvmask.plans import CALL_FAILED, EXISTS, GET, NOT_TRIED, PUT, WAIT, Call

COORD = Coordinator([FullAttention(16)], 16)
SCHEME = scheme_of(COORD, [flat_layout(64)])
TABLES = [[1, 2, 3, 4]]
HIT = COORD.find_hit([[True] * 4], 64)


class Event:
    """Counts how often it was waited for."""

    def __init__(self, error=None):
        self.waits, self.error = 0, error

    def synchronize(self):
        self.waits += 1
        if self.error is not None:
            raise self.error


def lookup(scheme=SCHEME, **options):
    return LookupPlan(scheme, digests(4), 65, **options)


def save(scheme=SCHEME, **options):
    return SavePlan(scheme, digests(4), TABLES, 64, **options)


def load(scheme=SCHEME, **options):
    return LoadPlan(scheme, digests(4), HIT, TABLES, **options)


PLANS = {"lookup": lookup, "save": save, "load": load}
GOOD = {EXISTS: 0, PUT: 0, GET: 64}


def good(call):
    return None if call.name == WAIT else [GOOD[call.name]] * len(call.args[0])


every_plan = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)


# Order


@every_plan
def test_out_of_order(make):
    """At every step, whatever is not the step to take is refused and changes nothing."""
    plan = make(tools=mooncake_tools(max_pieces=1))
    names = []
    while True:
        with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
            plan.feed([0] * 4)
        with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
            plan.fail(OSError())
        if names:
            with pytest.raises(PlanStateError, match="`result` is there when"):
                plan.result  # noqa: B018
        if (call := plan.next_call()) is None:
            break
        names.append(call.name)
        with pytest.raises(PlanStateError, match="`feed` must be given the answer before the next"):
            plan.next_call()
        with pytest.raises(PlanStateError, match="`result` is there when"):
            plan.result  # noqa: B018
        plan.feed(good(call))
    wanted = {lookup: [EXISTS], save: [EXISTS] + [PUT] * 4, load: [GET] * 4}
    assert names == wanted[make]
    for _ in range(2):
        assert plan.next_call() is None
    assert plan.result == plan.result
    with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
        plan.feed([0])
    with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
        plan.fail(OSError())


@every_plan
def test_a_result_before_the_first_call_is_refused(make):
    with pytest.raises(PlanStateError, match="`result` is there when"):
        make().result  # noqa: B018


@every_plan
def test_an_answer_twice_is_refused(make):
    plan = make()
    call = plan.next_call()
    plan.feed(good(call))
    with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
        plan.feed(good(call))
    with pytest.raises(PlanStateError, match="`feed` must follow a call of `next_call`"):
        plan.fail(OSError())
    assert drive(plan, Answers()) is plan.result or plan.result is not None


class Answers:
    """A store that says yes to everything, or what it is told."""

    def __init__(self, exists=0, error=None):
        self.exists, self.error = exists, error
        self.calls = []

    def _answer(self, name, keys, value):
        self.calls.append((name, list(keys)))
        if self.error is not None:
            raise self.error
        return [value] * len(keys)

    def batch_is_exist(self, keys):
        return self._answer(EXISTS, keys, self.exists)

    def batch_put_from_multi_buffers(self, keys, addresses, sizes):
        return self._answer(PUT, keys, 0)

    def batch_get_into_multi_buffers(self, keys, addresses, sizes):
        return self._answer(GET, keys, 64)


def test_calls_and_their_arguments():
    """The names are those of the store; the keys come first; bytes are told for puts and gets."""
    store = Answers()
    event = Event()
    calls = answer_with(save(event=event), lambda call: call.run(store))
    assert [call.name for call in calls] == [EXISTS, WAIT, PUT]
    assert [call.num_bytes for call in calls] == [0, 0, 256]
    assert calls[1] == Call(WAIT, (event,))
    assert event.waits == 1
    keys, addresses, sizes = calls[2].args
    assert keys == calls[0].args[0]
    assert addresses == [[(1 << 20) + 64 * i] for i in TABLES[0]]
    assert sizes == [[64]] * 4
    (call,) = answer_with(load(), lambda call: call.run(store))
    assert (call.name, call.args, call.num_bytes) == (GET, (keys, addresses, sizes), 256)
    (call,) = answer_with(lookup(), lambda call: call.run(store))
    assert (call.name, call.args, call.num_bytes) == (EXISTS, (keys,), 0)
    assert [name for name, _ in store.calls] == [EXISTS, PUT, GET, EXISTS]


@every_plan
def test_a_plan_that_needs_no_call_is_done_at_once(make):
    empty = {
        lookup: lambda: LookupPlan(SCHEME, [], 15),
        save: lambda: SavePlan(SCHEME, [], [[]], 15),
        load: lambda: LoadPlan(SCHEME, [], COORD.find_hit([[]], 0), [[]]),
    }
    plan = empty[make]()
    assert plan.next_call() is None
    assert drive(empty[make](), None) == plan.result


# What a call raises


@every_plan
def test_a_call_that_raises_is_a_result_with_the_cause(make):
    gone = OSError("no route")
    result = drive(make(), Answers(error=gone))
    if make is lookup:
        assert (result.length, result.cause, result.answered) == (0, gone, False)
    else:
        assert [(f.code, f.cause) for f in result.failures] == [(CALL_FAILED, gone)] * 4
        assert not result.ok


@every_plan
@pytest.mark.parametrize(
    "error",
    [
        TypeError("x"),
        AttributeError("x"),
        NameError("x"),
        NotImplementedError("x"),
        AssertionError("x"),
        KeyboardInterrupt(),
        SystemExit(),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
    ids=repr,
)
def test_what_belongs_to_the_caller_is_raised_and_ends_the_plan(make, error):
    store = Answers(error=error)
    plan = make(tools=mooncake_tools(max_pieces=1))
    with pytest.raises(type(error)) as caught:
        drive(plan, store)
    assert caught.value is error
    assert len(store.calls) == 1
    partial = error.partial_result
    assert plan.next_call() is None
    assert plan.result == partial
    if make is lookup:
        assert (partial.length, partial.cause) == (0, error)
    else:
        assert len(partial.failures) == 4
        assert {f.cause for f in partial.failures} == {error}
        codes = [f.code for f in partial.failures]
        assert codes.count(CALL_FAILED) == (4 if make is save else 1)
        assert codes.count(NOT_TRIED) == (0 if make is save else 3)


@pytest.mark.parametrize("make", [save, load], ids=["save", "load"])
def test_an_event_that_fails_and_one_that_is_interrupted(make):
    lost = RuntimeError("device lost")
    store = Answers()
    result = drive(make(event=Event(lost)), store)
    assert [(f.code, f.cause) for f in result.failures] == [(CALL_FAILED, lost)] * 4
    with pytest.raises(KeyboardInterrupt) as caught:
        drive(make(event=Event(KeyboardInterrupt())), store)
    assert len(caught.value.partial_result.failures) == 4
    assert {name for name, _ in store.calls} <= {EXISTS}


@pytest.mark.parametrize("make", [save, load], ids=["save", "load"])
def test_a_plan_that_is_dropped_leaves_nothing_behind(make):
    """An adapter need not finish a plan: no lock, nothing counted."""
    tools = PlanTools()
    plan = make(tools=tools)
    plan.next_call()
    del plan
    assert tools.stats.saves == tools.stats.loads == 0
    assert drive(make(tools=tools), Answers()).ok


# Stopping


@pytest.mark.parametrize("make", [save, load], ids=["save", "load"])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("on_its_way", [False, True])
@pytest.mark.parametrize("how", ["feed", "fail"])
def test_a_plan_that_is_stopped_makes_no_further_call(make, steps, on_its_way, how):
    """At any step, also while a call is on its way: every key is still accounted for."""
    plan = make(tools=mooncake_tools(max_pieces=1, log=None), event=Event())
    made = []
    for _ in range(steps):
        if (call := plan.next_call()) is None:
            break
        made.append(call)
        plan.feed(good(call))
    call = plan.next_call() if on_its_way else None
    cause = OSError("enough")
    plan.stop(-77, cause)
    if call is not None:
        made.append(call)
        plan.feed(good(call)) if how == "feed" else plan.fail(OSError("gone"))
    assert plan.next_call() is None
    result = plan.result
    moved = result.stored if make is save else result.loaded
    tried = sum(c.name in (PUT, GET) for c in made)
    lost = on_its_way and how == "fail" and call is not None
    assert moved + len(result.failures) == 4
    if lost and call.name == EXISTS:
        assert {f.code for f in result.failures} == {CALL_FAILED}
    else:
        failed = lost and call.name in (PUT, GET)
        assert moved == tried - failed
        assert [f.code for f in result.failures].count(-77) == 4 - tried
        assert {f.cause for f in result.failures if f.code == -77} <= {cause}
    assert len({f.key for f in result.failures}) == len(result.failures)


def test_a_load_that_is_stopped_renews_no_lease():
    plan = load(tools=mooncake_tools())
    plan.next_call()
    plan.stop()
    plan.feed([-707] * 4)
    assert plan.next_call() is None
    assert [f.code for f in plan.result.failures] == [-707] * 4
    plan = load(tools=mooncake_tools())
    plan.next_call()
    plan.feed([-707] * 4)
    assert plan.next_call().name == EXISTS
    plan.stop()
    plan.fail(OSError("gone"))
    assert plan.next_call() is None
    assert [f.code for f in plan.result.failures] == [NOT_TRIED] * 4


class Stops(StorePolicy):
    """The first get that fails ends the load; two keys per call."""

    stops_after_failure = True

    def cut_put(self, num_bytes, sizes):
        n = len(num_bytes)
        return [(i, min(i + 2, n)) for i in range(0, n, 2)], []


@pytest.mark.parametrize("how", ["code", "raise", "short"])
def test_a_policy_that_ends_a_load_at_its_first_failure(how):
    plan = load(tools=PlanTools(Stops(), log=None))
    plan.next_call()
    if how == "raise":
        plan.fail(OSError("gone"))
    else:
        told = plan.feed([64, -800 if how == "code" else 63])
        assert [f.block for f in told] == [1]
    call = plan.next_call()
    if how == "short":  # too few bytes refuse one key, not the store's service
        plan.feed([64, 64])
        call = plan.next_call()
        assert [f.code for f in plan.result.failures] == [63]
    else:
        first = [CALL_FAILED] * 2 if how == "raise" else [-800]
        assert [f.code for f in plan.result.failures] == first + [NOT_TRIED] * 2
    assert call is None
    # A save goes on: what it can store is of use by itself.
    plan = save(tools=PlanTools(Stops(), log=None))
    plan.next_call()
    plan.feed([0] * 4)
    plan.next_call()
    plan.feed([-800] * 2)
    assert plan.next_call() is not None


# What the plans keep: hints, memories, counters, events, log


def test_hints_work_by_hand():
    hints = HitHints()
    costs_one = scheme_of(Coordinator([FullAttention(16), SlidingWindow(16, window=32)], 16))
    # Hints tell digests apart by their first bytes.
    hashes = [digest[::-1] for digest in digests(4096)]
    tools = PlanTools(hints=hints)
    stored = 2000

    def there(call):
        numbers = [int.from_bytes(bytes.fromhex(k[-32:]), "little") for k in call.args[0]]
        return [int(number <= stored) for number in numbers]

    first = LookupPlan(costs_one, hashes, 65536, tools=tools)
    cold = answer_with(first, there)
    again = LookupPlan(costs_one, hashes, 65536, tools=tools)
    warm = answer_with(again, there)
    assert first.result == again.result
    assert first.result.length == stored * 16
    assert len(warm) == 1 < len(cold)
    exact = LookupPlan(costs_one, hashes, 65536, tools=tools, strategy="exact")
    assert len(answer_with(exact, there)) == 1
    assert exact.result == first.result
    # A save teaches too.
    tools = PlanTools(hints=True)
    plan = save(scheme_of(COORD, [flat_layout(64)]), tools=tools)
    answer_with(plan, good)
    assert tools.hints.predict(plan._hashes, 16, 16, 64) == 0  # steps of 256 tokens
    many = SavePlan(SCHEME, digests(64), [list(range(64))], 1024, tools=PlanTools(
        hints=hints, null_block=None))  # fmt: skip
    answer_with(many, good)
    assert hints.predict(many._hashes, 16, 16, 1024) == 1024


def test_memories_and_counters_work_by_hand():
    now = [0.0]
    tools = PlanTools(
        memo=PresenceMemo(clock=lambda: now[0]), failed_loads=AbsenceMemo(clock=lambda: now[0])
    )
    store = Answers()
    saved = drive(save(tools=tools), store)
    assert saved.stored == 4
    hit = drive(lookup(tools=tools), store)
    assert (hit.length, hit.asked, hit.probes) == (64, 0, 0)
    assert [name for name, _ in store.calls] == [EXISTS, PUT]  # the lookup asked nothing
    plan = load(tools=tools)
    answer_with(plan, lambda call: [64, 64, -800, 64])
    hit = drive(lookup(tools=tools), store)
    assert (hit.length, hit.asked, hit.probes) == (32, 0, 0)
    now[0] = 100.0
    store.exists = 1
    hit = drive(lookup(tools=tools), store)
    assert (hit.length, hit.asked, hit.probes, hit.present) == (64, 4, 1, 4)
    stats = tools.stats.snapshot()
    assert {name: n for name, n in stats.items() if n and "seconds" not in name} == {
        "lookups": 3,
        "asked_keys": 4,
        "present_keys": 4,
        "exact_keys": 12,
        "memo_keys": 7,
        "avoided_keys": 1,
        "probes": 1,
        "hit_tokens": 160,
        "saves": 1,
        "stored_keys": 4,
        "stored_bytes": 256,
        "loads": 1,
        "loaded_keys": 3,
        "loaded_bytes": 192,
        "load_failed_keys": 1,
        "load_quarantined_blocks": 1,
    }
    assert PlanTools(stats=False).stats is None


def test_the_log_of_a_plan_by_hand(caplog):
    drive(save(), Answers(error=OSError("no route")))
    (record,) = caplog.records
    assert "SavePlan: 4 with codes [-900] (OSError('no route'))" in record.getMessage()
    caplog.clear()
    drive(save(tools=PlanTools(log=None)), Answers(error=OSError("no route")))
    drive(lookup(tools=PlanTools(log=None)), Answers(error=OSError("no route")))
    drive(load(), Answers())
    assert not caplog.records
    # However many, the text stays short.
    scheme = scheme_of(COORD, [flat_layout(1 << 14)])
    plan = SavePlan(scheme, digests(10_000), [list(range(1, 10_001))], 160_000)
    drive(plan, Answers(error=OSError("x" * 100_000)))
    (record,) = caplog.records
    assert len(record.getMessage()) < 2000


def test_events_wait_by_hand_only_where_memory_is_touched():
    event = Event()
    assert drive(save(event=event), Answers(exists=1)).present == 4
    drive(LoadPlan(SCHEME, digests(4), HIT, TABLES, held=64, event=event), Answers())
    assert event.waits == 0
    drive(save(event=event), Answers())
    drive(load(event=event), Answers())
    assert event.waits == 2


# What enters beside the block tables


def test_states_that_an_engine_hands_over_are_found():
    """R4: a state group whose table does not keep states, in a contract that says so."""
    groups = {"full": FullAttention(16), "state": Mamba(16)}
    source, target = pair(groups, 16, 64, states="handoff")
    request = source.request(digests(4))
    first = source.kv.save(request, source.tables, 64)
    assert (first.stored, first.mark) == (4, 64)
    assert target.lookup(digests(5), 65).length == 0
    request.hand_over("state", 64, source.tables[1][3])
    second = source.kv.save(request, source.tables, 64)
    assert (second.stored, second.present, second.mark) == (1, 0, 64)
    assert source.kv.save(request, source.tables, 64).stored == 0  # it was handed over once
    hit = target.lookup(digests(5), 65)
    assert (hit.length, hit.masks[1].indices()) == (64, [3])
    result = target.load(digests(4), hit)
    assert result.ok
    assert assert_loaded(source, target, hit) == result.loaded == 5


def test_a_state_inside_a_block_is_handed_over_under_its_own_boundary():
    groups = {"full": FullAttention(64), "state": Mamba(64)}
    source, target = pair(groups, 16, 64, states="handoff", partial_hits=True)
    request = source.request(digests(4))
    request.hand_over("state", 48, source.tables[1][0])
    result = source.kv.save(request, source.tables, 48)
    assert result.ok
    assert key(source, 1, digests(3)[2]) in source.store.pool
    hit = target.lookup(digests(4), 64)
    assert (hit.length, hit.tail_tokens) == (48, (48, 48))
    assert target.load(digests(4), hit).ok
    assert_loaded(source, target, hit)


def test_what_was_handed_over_is_for_one_save():
    """A block may hold something else by the next save: the engine hands it over again itself."""
    groups = {"full": FullAttention(16), "state": Mamba(16)}
    source, _ = pair(groups, 16, 64, states="handoff")
    request = source.request(digests(4))
    request.hand_over(1, 64, source.tables[1][3])
    source.store.fail("batch_put_from_multi_buffers", -200, times=1)
    result = source.kv.save(request, source.tables, 64)
    assert (result.stored, len(result.failures), result.mark) == (0, 5, 0)
    assert {f.name for f in result.failures} == {"full", "state"}
    result = source.kv.save(request, source.tables, 64)
    assert (result.stored, result.mark, result.ok) == (4, 64, True)
    request.hand_over(1, 64, source.tables[1][3])
    assert source.kv.save(request, source.tables, 64).stored == 1


def test_a_handed_over_block_that_the_table_has_too_is_put_once():
    groups = {"full": FullAttention(16), "state": Mamba(16)}
    source, _ = pair(groups, 16, 64)
    request = source.request(digests(4))
    request.hand_over("full", 64, source.tables[0][3])
    result = source.kv.save(request, source.tables, 64)
    assert (result.stored, result.present, result.ok) == (8, 1, True)


def test_handed_over_blocks_belong_to_one_writer():
    coord = Coordinator([FullAttention(16), Mamba(16)], 16)
    owners = []
    for writer in range(4):
        scheme = scheme_of(
            coord, [flat_layout(64)] * 2, writers=[4, 4], writer=writer, states=False
        )
        from kvmask.plans import Handoff

        handoffs = [Handoff("group1", 64, 9)]
        plan = SavePlan(scheme, digests(4), TABLES * 2, 64, handoffs=handoffs)
        owners += [writer] * sum("group:1" in k for k in plan.keys)
    assert len(owners) == 1


# Drivers


async def run(plan, store):
    """Ten lines: a driver for an event loop. The calls run in threads."""
    while (call := plan.next_call()) is not None:
        try:
            answer = await asyncio.to_thread(call.run, store)
        except BaseException as error:
            plan.fail(error)
        else:
            plan.feed(answer)
    return plan.result


def test_an_asyncio_driver():
    """Requests of one event loop share the tools; each plan is its own."""
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
    source, target = pair(groups, 16, 640, layers=1)
    tools = mooncake_tools(hints=True, memo=PresenceMemo(), max_pieces=8)
    threads = set()
    target.store.hooks.append(lambda *_: threads.add(threading.get_ident()))
    source.store.hooks.append(lambda *_: threads.add(threading.get_ident()))

    async def serve(salt):
        request = source.request(digests(40, salt), 640)
        saved = request.saved(
            await run(
                request.save_plan(source.bound, source.tables, 640, tools=tools), source.store
            )
        )
        again = await run(
            request.save_plan(source.bound, source.tables, 640, tools=tools), source.store
        )
        hit = await run(
            target.request(digests(41, salt), 641).lookup_plan(tools=tools), target.store
        )
        return saved, again, hit

    async def main():
        results = await asyncio.gather(*(serve(salt) for salt in range(8)))
        event = Event()
        plan = target.request(digests(40)).load_plan(
            target.bound, results[0][2], target.tables, event, tools
        )
        return results, await run(plan, target.store), event.waits

    results, loaded, waits = asyncio.run(main())
    for saved, again, hit in results:
        assert saved.ok
        assert saved.stored > 0
        assert (saved.mark, again.stored, again.present) == (640, 0, 0)
        assert hit.length == 640
    assert loaded.ok
    assert waits == 1
    assert_loaded(source, target, results[0][2])
    assert threading.get_ident() not in threads
    assert tools.stats.lookups == 8
    assert tools.stats.saves == 16
    assert tools.stats.memo_keys > 0


def test_a_task_that_is_cancelled_accounts_for_every_key():
    """The call may still be under way: its keys have failed, and no other is tried."""
    coord = Coordinator([FullAttention(16)], 16)
    plan = LoadPlan(
        scheme_of(coord, [flat_layout(64)]), digests(4), HIT, TABLES,
        tools=mooncake_tools(max_pieces=1, log=None),
    )  # fmt: skip
    inside, go = threading.Event(), threading.Event()

    class Slow(Answers):
        def batch_get_into_multi_buffers(self, keys, addresses, sizes):
            if len(self.calls) == 1:
                inside.set()
                assert go.wait(30)
            return super().batch_get_into_multi_buffers(keys, addresses, sizes)

    async def main():
        task = asyncio.create_task(run(plan, Slow()))
        assert await asyncio.to_thread(inside.wait, 30)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        go.set()

    asyncio.run(main())
    result = plan.result
    assert (result.loaded, len(result.failures)) == (1, 3)
    assert sorted(f.code for f in result.failures) == sorted([CALL_FAILED, NOT_TRIED, NOT_TRIED])
    assert all(isinstance(f.cause, asyncio.CancelledError) for f in result.failures)
    assert result.usable_tokens == 16


def test_a_transfer_and_a_driver_by_hand_make_the_same_calls():
    groups = {"full": FullAttention(64), "swa": SlidingWindow(16, window=32)}
    contract = contract_of(groups, 16)
    logs = []
    for by_hand in (False, True):
        store = FakeStore()
        engine = Engine(store, contract, 640, seed=5, max_pieces=5)
        request = engine.request(digests(40), 641)
        if by_hand:
            tools, store_ = engine.kv.tools, engine.store
            request.saved(
                drive(request.save_plan(engine.bound, engine.tables, 320, tools=tools), store_)
            )
            request.saved(
                drive(request.save_plan(engine.bound, engine.tables, 640, tools=tools), store_)
            )
            hit = drive(request.lookup_plan(64, tools=tools), store_)
            loaded = drive(request.load_plan(engine.bound, hit, engine.tables, tools=tools), store_)
        else:
            engine.kv.save(request, engine.tables, 320)
            engine.kv.save(request, engine.tables, 640)
            hit = engine.kv.lookup(request, 64)
            loaded = engine.kv.load(request, hit, engine.tables)
        assert loaded.ok
        logs.append([(c.name, c.keys) for c in store.log if c.keys])
        stats = {k: v for k, v in engine.kv.stats.snapshot().items() if "seconds" not in k}
        logs.append([hit, request.mark, loaded, stats])
    assert logs[0] == logs[2]
    assert logs[1] == logs[3]


# A request


def test_a_request_grows_and_saves_from_its_mark():
    from kvmask import Contract, Hashing, StrictKeys

    contract = Contract(
        [FullAttention(16)], 16, StrictKeys("m"), Hashing("sha256", seed="s"), facts={"dtype": "up"}
    )
    engine = Engine(FakeStore(), contract, 160, seed=1)
    request = contract.request(list(range(40)))
    assert (request.num_tokens, request.num_prompt_tokens, len(request.hashes)) == (40, 40, 2)
    assert engine.kv.save(request, engine.tables, 40).stored == 2
    for token in range(40, 100):
        request.extend([token])
    assert (request.num_tokens, request.num_prompt_tokens) == (100, 40)
    whole = contract.request(list(range(100)))
    assert list(request.hashes) == list(whole.hashes)
    result = engine.kv.save(request, engine.tables, 100)
    assert (result.stored, result.present, request.mark) == (4, 0, 96)
    assert engine.kv.lookup(whole).length == 96
    assert whole.hit.length == 96


@pytest.mark.parametrize("shape", ["list", "function"])
def test_extra_keys_of_a_request(shape):
    from kvmask import Contract, Hashing, StrictKeys

    contract = Contract(
        [FullAttention(16)], 16, StrictKeys("m"), Hashing("sha256", seed="s"), facts={"dtype": "up"}
    )
    extra = [("salt",)] + [None] * 5

    def made(first, count):
        return extra[first : first + count]

    given = extra if shape == "list" else made
    salted = contract.request(list(range(96)), extra_keys=given)
    plain = contract.request(list(range(96)))
    assert not set(salted.hashes) & set(plain.hashes)
    growing = contract.request(list(range(5)), extra_keys=given)
    for chunk in (
        itertools.batched(range(5, 96), 7)
        if hasattr(itertools, "batched")
        else (range(i, min(i + 7, 96)) for i in range(5, 96, 7))
    ):
        growing.extend(list(chunk))
    assert list(growing.hashes) == list(salted.hashes)


def test_a_request_from_digests_grows_with_all_of_them():
    contract = contract_of([FullAttention(16)], 16)
    request = contract.request(hashes=digests(2), num_tokens=40)
    request.extend(hashes=digests(4), num_tokens=70)
    assert (request.num_tokens, len(request.hashes)) == (70, 4)
    request.extend(hashes=digests(5))
    assert request.num_tokens == 80
