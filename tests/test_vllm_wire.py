"""Only digests that a worker lacks travel to it."""

import random

import pytest

pytest.importorskip("vllm")

import vllm_world as world
from test_vllm_path import digests_of, fill, own, shared  # noqa: F401

from kvmask.vllm import places
from kvmask.vllm.binding import state
from kvmask.vllm.lookup import lookups_of
from kvmask.vllm.releases import BlobBlockHashes, StockWorker, fitting
from kvmask.vllm.wire import KEPT, PROBE, STEP, Received, Sent, is_thrifty

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not fitting().has("local"), reason="lookups answer with a length alone"),
]
SIZE = 8


def told(sent, received, digests, number=7):
    """One message: (the digests that the worker has then, how many travelled)."""
    whole, few = sent.message(number, digests)
    assert is_thrifty(whole) or whole == number
    blob = memoryview(b"".join(few))
    back, view = received.whole(whole, BlobBlockHashes(blob, SIZE))
    assert back == number
    return (None if view is None else [bytes(d) for d in view]), len(few)


def conversation(rng):
    """Digests as chains give them: lists that are equal up to somewhere, and nowhere after it."""
    base = [rng.randbytes(SIZE) for _ in range(rng.randrange(1, 3 * STEP))]
    while True:
        cut = rng.randrange(len(base) + 1)
        if rng.random() < 0.5:
            base = base + [rng.randbytes(SIZE) for _ in range(rng.randrange(2 * STEP))]
        elif rng.random() < 0.5 and cut:
            base = base[:cut]
        else:
            base = base[:cut] + [rng.randbytes(SIZE) for _ in range(1 + rng.randrange(2 * STEP))]
        yield base


@pytest.mark.parametrize("seed", range(20))
def test_every_list_arrives(seed):
    rng = random.Random(seed)
    sent, received = Sent(), Received()
    talks = [conversation(rng) for _ in range(rng.choice([1, 3, 2 * KEPT]))]
    for step in range(300):
        if step and rng.random() < 0.05:
            received = Received()  # the worker is another one
        if step and rng.random() < 0.03:
            sent = Sent()
        digests = next(rng.choice(talks))
        got, _ = told(sent, received, digests)
        if got is None:
            sent.clear()
            got, travelled = told(sent, received, digests)
            assert travelled == len(digests)
        assert got == digests
        assert len(received._lists) <= KEPT
        assert len(sent._lists) <= KEPT


def test_what_travels():
    rng = random.Random(1)
    sent, received = Sent(), Received()
    digests = [rng.randbytes(SIZE) for _ in range(1000)]
    assert told(sent, received, digests)[1] == 1000
    assert told(sent, received, digests)[1] == 1  # the one that proves the rest
    longer = [*digests, *(rng.randbytes(SIZE) for _ in range(10))]
    assert told(sent, received, longer)[1] == 11
    assert len(sent._lists) == len(received._lists) == 1  # the longer list takes its place
    branch = [*digests[:500], *(rng.randbytes(SIZE) for _ in range(10))]
    common = 500 // STEP * STEP
    assert told(sent, received, branch)[1] == 510 - common + 1
    assert told(sent, received, longer)[1] == 1
    assert told(sent, received, digests[:512])[1] == 1


def test_a_worker_that_has_another_list_of_that_name_asks_for_all():
    rng = random.Random(2)
    digests, others = ([rng.randbytes(SIZE) for _ in range(200)] for _ in range(2))
    sent, received, stranger = Sent(), Received(), Sent()
    told(sent, received, digests)
    told(stranger, received, others)
    assert told(sent, received, digests)[0] is None
    assert received._lists == {}


def test_a_worker_that_knows_the_protocol_asks_for_all_of_a_probe():
    assert is_thrifty(PROBE)
    assert Received().whole(PROBE, BlobBlockHashes(memoryview(b""), 0)) == (0, None)


def over_the_wire(own):  # noqa: F811
    pair = own.pair(apart=True, handshake=False)
    place = pair.asking.place
    assert type(place) is places.OverTheWire
    sizes = []
    send = pair.asking.client.socket.send_multipart

    def counted(frames, **more):
        sizes.append(sum(map(len, frames)))
        return send(frames, **more)

    pair.asking.client.socket = Proxy(pair.asking.client.socket, counted)
    return pair, place, sizes


class Proxy:
    def __init__(self, real, send):
        self._real = real
        self.send_multipart = send

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_hits_are_the_same_and_less_travels(own):  # noqa: F811
    pair, place, sizes = over_the_wire(own)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    for _ in range(3):
        assert pair.hit(world.request(800, digests)) == 768
    probe, first, *later = sizes
    assert probe < 64
    assert first > len(digests) * len(digests[0])
    assert all(size < 2 * len(digests[0]) + 64 for size in later)
    state(pair.worker)["received"].clear()  # as a worker that was made anew
    assert pair.hit(world.request(800, digests)) == 768
    assert pair.scheduler_side.reset_cache() is True
    assert state(pair.worker)["received"]._lists == {}
    assert pair.hit(world.request(800, digests)) == 0
    assert place._sent is not None
    assert lookups_of(pair.worker).stats.lookups == 5


def test_a_worker_whose_lookups_are_vllms_is_sent_all(own):  # noqa: F811
    pair, place, sizes = over_the_wire(own)
    pair.worker.__class__ = StockWorker
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    for _ in range(3):
        assert pair.hit(world.request(800, digests)) == 768
    assert place._sent is None
    assert min(sizes[1:]) > len(digests) * len(digests[0])


def test_kvmask_turned_off_in_the_worker_answers_all_the_same(own, monkeypatch):  # noqa: F811
    from kvmask.vllm.acting import ACTING

    pair, _, _ = over_the_wire(own)
    digests = digests_of(768)
    fill(pair.worker, 768, digests)
    assert pair.hit(world.request(800, digests)) == 768
    monkeypatch.setattr(ACTING, "on", False)
    assert pair.hit(world.request(800, digests)) == 768
