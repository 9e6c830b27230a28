"""The scheduler's side of a lookup: its deadline, late answers, requests that are gone."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvmask.errors import ArgumentError
from kvmask.plans import Breaker
from kvmask.vllm import local
from kvmask.vllm.asking import Asking
from kvmask.vllm.places import OverTheWire
from kvmask.vllm.releases import LOOKUP_MSG, StockClient, current
from kvmask.vllm.scheduling import Options

pytestmark = pytest.mark.vllm
# Seconds. A deadline that a stuck lookup passes; a busy machine starts a thread within it.
SHORT = 0.2


class Place:
    """Answers with the number of tokens, when it is let."""

    def __init__(self):
        self.breaker = Breaker()
        self.gate = threading.Event()
        self.gate.set()
        self.asked = []
        self.over = []
        self.forgotten = 0
        self.closed = False
        self.error = None

    def ask(self, num_tokens, local_tokens, block_hashes):
        self.asked.append((num_tokens, local_tokens, block_hashes))
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return current().lookup_result(num_tokens, ()), lambda: self.over.append(num_tokens)

    def forget(self):
        self.forgotten += 1

    def close(self):
        self.closed = True


@pytest.fixture
def place():
    made = Place()
    yield made
    made.gate.set()


class Forgetful(list):
    """Keeps nothing."""

    def append(self, item):
        pass


def asking(place, deadline=30.0):
    client = SimpleNamespace(_reset=lambda: True, close=lambda: None)
    return Asking(client, lambda: place, deadline)


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_the_digests_are_the_requests_own(place):
    asks, digests = asking(place), [b"a", b"b"]
    assert asks.lookup("r", 32, digests).hit_length == 32
    assert place.asked[0][2] is digests
    until(lambda: place.over == [32])


def test_without_a_thread_a_request_is_a_miss_and_the_next_one_tries_again(place, monkeypatch):
    asks = asking(place)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        for waits in (True, False):
            assert asks.lookup("r", 32, [b"a"], non_block=not waits).hit_length == 0
        with pytest.raises(RuntimeError, match="can't start"):
            asks.reset()
    assert asks.lookup("r", 32, [b"a"]).hit_length == 32
    assert len(place.asked) == 1


def test_past_the_deadline_a_request_is_a_miss_and_so_are_the_next_ones(place):
    asks = asking(place, SHORT)
    place.gate.clear()
    assert asks.lookup("a", 32, [b"a"]).hit_length == 0
    for name in ("b", "c"):  # nobody waits behind the call that is stuck
        assert asks.lookup(name, 32, [b"a"]).hit_length == 0
        assert asks.lookup(name, 32, [b"a"], non_block=True).hit_length == 0
    assert len(place.asked) == 1
    assert asks.late == 5
    place.gate.set()
    until(lambda: place.over == [32])  # the late answer was taken to its end
    asks._deadline = 60.0
    assert asks.lookup("d", 48, [b"a"]).hit_length == 48
    assert asks.late == 5


def test_a_lookup_that_waits_in_the_queue_is_not_made_for_nobody(place):
    asks = asking(place, SHORT)
    place.gate.clear()
    assert asks.lookup("a", 16, [b"a"], non_block=True) is None
    assert asks.lookup("b", 32, [b"a"], non_block=True) is None
    until(lambda: len(place.asked) == 1)
    time.sleep(1.5 * SHORT)
    assert asks.lookup("b", 32, [b"a"], non_block=True).hit_length == 0
    assert asks.lookup("a", 16, [b"a"], non_block=True).hit_length == 0
    place.gate.set()
    until(lambda: place.over == [16])
    asks._deadline = 60.0
    assert asks.lookup("c", 48, [b"a"]).hit_length == 48
    assert [n for n, _, _ in place.asked] == [16, 48]


def test_many_lookups_that_each_answer_in_time_are_not_late(place):
    asks = asking(place, 30.0)
    names = [f"r{i}" for i in range(50)]
    place.gate.clear()
    assert all(asks.lookup(n, 16, [b"a"], non_block=True) is None for n in names)
    place.gate.set()
    until(lambda: len(place.over) == 50)
    assert all(asks.lookup(n, 16, [b"a"], non_block=True).hit_length == 16 for n in names)
    assert asks.late == 0


def test_a_request_that_ends_while_its_lookup_runs(place):
    asks = asking(place)
    place.gate.clear()
    digests = [b"a"]
    assert asks.lookup("a", 16, digests, non_block=True) is None
    assert asks.lookup("b", 32, digests, non_block=True) is None
    until(lambda: len(place.asked) == 1)
    asks.discard("a")
    asks.discard("b")
    asks.discard("never asked")
    assert not asks._jobs
    place.gate.set()
    until(lambda: place.over == [16])
    # The same id again is another request.
    assert asks.lookup("a", 64, digests).hit_length == 64
    assert [n for n, _, _ in place.asked] == [16, 64]


def test_while_the_store_is_known_to_be_silent_the_next_try_holds_nobody_up(place):
    asks = asking(place, 40.0)
    place.breaker.failed(RuntimeError("gone"), 0)
    assert asks._patience() == 4.0
    assert asks.lookup("a", 16, [b"a"]).hit_length == 16
    place.breaker.answered(1)
    assert asks._patience() == 40.0


def test_what_raises_is_a_miss(place):
    asks = asking(place)
    place.error = RuntimeError("no such store")
    assert asks.lookup("a", 16, [b"a"]).hit_length == 0
    place.error = None
    assert asks.lookup("a", 16, [b"a"]).hit_length == 16


def test_a_hit_that_rests_on_tokens_that_are_gone_is_none(place):
    asks = asking(place)
    asks.tell(128)
    place.gate.clear()
    assert asks.lookup("r", 300, [b"ab"], non_block=True) is None
    place.gate.set()
    until(lambda: place.over)
    asks.tell(64)  # the GPU has let go of a block meanwhile
    assert asks.lookup("r", 300, [b"ab"], non_block=True).hit_length == 0
    assert place.asked[0][1] == 128
    asks.tell(128)
    assert asks.lookup("r", 300, [b"ab"]).hit_length == 300


def test_reset_forgets_and_empties(place):
    asks = asking(place)
    assert asks.reset() is True
    assert place.forgotten == 1
    asks.client._reset = lambda: False
    assert asks.reset() is False


def test_close_ends_the_thread(place):
    asks = asking(place)
    asks.lookup("a", 16, [b"a"])
    thread = asks._thread._thread
    until(lambda: asks._thread.running is None)
    asks.close()
    thread.join(60)
    assert not thread.is_alive()
    assert place.closed


def test_close_leaves_what_a_running_lookup_uses(place):
    asks = asking(place, SHORT)
    place.gate.clear()
    asks.lookup("a", 16, [b"a"])
    asks.close()
    assert not place.closed
    place.gate.set()
    asks._thread._thread.join(60)
    assert not asks._thread._thread.is_alive()
    assert place.closed


def test_close_chooses_nothing(place):
    chosen = []
    closed = []
    client = SimpleNamespace(close=lambda: closed.append(True))
    asks = Asking(client, lambda: chosen.append(place) or place, 1.0)
    asks.close()
    assert (chosen, closed, place.closed) == ([], [True], False)


def test_close_closes_nothing_under_a_lookup_that_is_about_to_begin(place):
    """The thread has taken the job and is held up before it runs."""
    asks = asking(place)
    place.gate.clear()
    taken, go = threading.Event(), threading.Event()
    begun = []

    class Queue(type(asks._thread._jobs)):
        def get(self, *args, **more):
            job = super().get(*args, **more)
            taken.set()
            assert go.wait(60)
            return job

    asks._thread._jobs = Queue()
    ask = place.ask
    place.ask = lambda *args: begun.append(place.closed) or ask(*args)
    assert asks.lookup("a", 16, [b"a"], non_block=True) is None
    assert taken.wait(60)
    closer = threading.Thread(target=asks.close)
    closer.start()
    closer.join(0.2)
    go.set()
    closer.join(60)
    place.gate.set()
    asks._thread._thread.join(60)
    assert True not in begun
    assert place.closed


def test_what_follows_lookups_waits_until_there_is_none_to_make(place):
    asks, told = asking(place), []
    ask = place.ask
    place.ask = lambda tokens, *more: (ask(tokens, *more)[0], lambda: told.append(tokens))
    for i in range(40):
        asks.lookup(str(i), i, [b"a"], non_block=i % 2 == 1) or asks.lookup(str(i), i, [b"a"])
    until(lambda: len(told) == 40)
    assert told == list(range(40))
    asks.lookup("last", 41, [b"a"])
    asks.close()
    asks._thread._thread.join(60)
    assert told[-1] == 41


def test_a_lookup_that_waits_is_made_before_what_follows_another(place):
    asks, order = asking(place), []
    ask = place.ask

    def asked(tokens, *more):
        order.append(tokens)
        return ask(tokens, *more)[0], lambda: order.append(-tokens)

    place.ask = asked
    place.gate.clear()
    for tokens in (1, 2):
        assert asks.lookup(str(tokens), tokens, [b"a"], non_block=True) is None
    place.gate.set()
    until(lambda: len(order) == 4)
    assert order == [1, 2, -1, -2]


def test_what_follows_a_lookup_may_fail(place):
    asks = asking(place)
    ask = place.ask
    place.ask = lambda *args: (ask(*args)[0], lambda: 1 / 0)
    for name in "ab":
        assert asks.lookup(name, 16, [b"a"]).hit_length == 16
        time.sleep(0.01)


def test_a_lookup_that_fails_leaves_no_cycle_that_holds_digests(place):
    class Digests(list):
        pass

    asks, digests = asking(place), Digests([b"a"])
    place.asked = Forgetful()
    place.error = RuntimeError("gone")
    known = weakref.ref(digests)
    gc.collect()
    gc.disable()
    try:
        assert asks.lookup("a", 16, digests).hit_length == 0
        until(lambda: asks._thread.running is None)
        place.error = None
        del digests
        assert known() is None
    finally:
        gc.enable()


class Wire:
    """A socket that keeps what is sent and answers with a hit."""

    def __init__(self, hit):
        self.hit = hit
        self.frames = []

    def send_multipart(self, frames, copy):
        self.frames.append(frames)

    def recv(self):
        return self.hit.to_bytes(4, "big")


def test_what_goes_over_the_wire():
    client = object.__new__(StockClient)
    client.socket = Wire(192)
    wire = OverTheWire(client)
    assert wire.ask(300, 0, [b"ab", b"cd"])[0].hit_length == 192
    assert client.socket.frames.pop() == (LOOKUP_MSG, (300).to_bytes(4, "big"), b"\0\2", b"abcd")
    assert wire.ask(300, 64, [b"ab", b"cd"])[0].hit_length == 192
    message, tokens, size, blob = client.socket.frames.pop()
    assert (message, size, blob) == (LOOKUP_MSG, b"\0\2", b"abcd")
    assert local.unpack(int.from_bytes(tokens, "big")) == (300, 64)
    wire.forget()
    assert int.from_bytes(client.socket.frames.pop()[1], "big") == local.FORGET


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("lookup_in", "somewhere", r"`lookup_in` must be one of .*, got 'somewhere'"),
        ("lookup_deadline_ms", 0, "above 0 and at most 600000, got 0"),
        ("lookup_deadline_ms", True, "got True"),
        ("lookup_deadline_ms", "200", "got '200'"),
        ("lookup_deadline_ms", float("nan"), "got nan"),
        ("hasher", "false", "`hasher` must be true or false, got 'false'"),
        ("local_aware", 1, "`local_aware` must be true or false, got 1"),
        ("lookup", "fast", "got 'fast'"),
    ],
)
def test_options_are_checked(name, wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Options.of({name: wrong})


def test_options():
    assert Options.of({"load_async": True}) == Options("staged", False, "scheduler", 0.2, True)
    given = {"lookup_in": "worker", "lookup_deadline_ms": 50, "hasher": False, "lookup": "exact"}
    assert Options.of(given) == Options("exact", False, "worker", 0.05, False)
