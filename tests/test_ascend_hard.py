# ruff: noqa: E402
"""kvmask under AscendStore where it is hard: failing pools, odd arguments, threads, install orders.

They need vLLM and the source of vllm-ascend, which `make test-ascend` unpacks.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ascend_world
import pytest

if not ascend_world.wanted():
    pytest.skip("needs KVMASK_ASCEND_VERSION and its source", allow_module_level=True)
ascend_world.modules()

import kvmask.ascend
from kvmask import _plugin
from kvmask.ascend import database, lookup, masks, releases
from kvmask.errors import UnsupportedReleaseError

install = importlib.import_module("kvmask.ascend.install")  # the package has a function there

pytestmark = pytest.mark.vllm

HYBRID = [
    {"kind": "full", "block_size": 16},
    {"kind": "window", "block_size": 16, "span": 33},
    {"kind": "state", "block_size": 16},
]
IDS = [0, 1, 2]
HASHES = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(100)]
ALL = install.REPLACEMENTS | install.LISTENERS


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    kvmask.ascend.uninstall()
    yield
    kvmask.ascend.uninstall()
    lookup.set_default("staged")


def stock(name: str) -> Any:
    return releases.seams.stock(name)


def holder(name: str) -> tuple[Any, str]:
    found = releases.seams._owner(name)
    assert found is not None
    return found


def in_place(name: str) -> Any:
    owner, attribute = holder(name)
    return vars(owner)[attribute]


class Pool:
    """Answers by a function of whether it has each key."""

    def __init__(self, keys: set[str], answer: Callable[[list[int]], Any]) -> None:
        self.keys = keys
        self.answer = answer

    def exists(self, keys: list[str]) -> Any:
        return self.answer([int(key in self.keys) for key in keys])


def filled(groups: list[dict[str, Any]] = HYBRID, blocks: int = 60) -> tuple[Any, set[str]]:
    worker = ascend_world.make_worker(groups)
    share = [lambda i: i < blocks] * len(groups)
    return worker, ascend_world.fill_store(worker, random.Random(1), HASHES, share, lost=0)


def failing(answers: list[int]) -> Any:
    raise ConnectionError("gone")


ANSWERS: dict[str, Callable[[list[int]], Any]] = {
    "a tuple": tuple,
    "bools": lambda a: [bool(x) for x in a],
    "errors for what is missing": lambda a: [x or -1 for x in a],
    "an error for one key in ninety": lambda a: [-1 if i % 90 == 5 else x for i, x in enumerate(a)],
    "numbers that mean nothing": lambda a: [x * 2 for x in a],
    "an array": lambda a: ascend_world.modules().torch.tensor(a).numpy(),
    "a failure": failing,
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("strategy", ["staged", "exact"])
def test_a_pools_answers_read_as_stock_reads_them(name: str, strategy: str) -> None:
    worker, keys = filled()
    worker.m_store = Pool(keys, ANSWERS[name])
    lookup.set_default(strategy)
    want = stock("worker.lookup_scheduler")(worker, 1600, HASHES, IDS)
    for _ in range(2):
        assert lookup.lookup_scheduler(worker, 1600, HASHES, IDS) == want


ARGUMENTS: list[tuple[Any, ...]] = [
    (None, HASHES, IDS),
    ("1600", HASHES, IDS),
    (1600.0, HASHES, IDS),
    (-5, HASHES, IDS),
    (0, [], IDS),
    (1600, [], IDS),
    (1600, None, IDS),
    (1600, "ab" * 50, IDS),
    (1600, [b""] * 100, IDS),
    (1600, [""] * 100, IDS),
    (1600, [None] * 100, IDS),
    (1600, [*HASHES[:50], b"x", *HASHES[51:]], IDS),
    (1 << 40, HASHES, IDS),
    (1 << 70, HASHES, IDS),
    (1605, HASHES, IDS),
    (1600, HASHES, 5),
    (1600, HASHES, [0, 1, 7]),
    (1600, HASHES, [-1]),
    (1600, HASHES, ["0"]),
    (1600, HASHES, (2, 1, 0)),
    (1600, HASHES, IDS, False, 1 << 70),
    (1600, HASHES, IDS, False, 17),
    (1600, HASHES, IDS, False, None),
    (1600, HASHES, IDS, False, "1"),
    (1600, HASHES, IDS, False, 16 * 99),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_lookup_never_raises(arguments: tuple[Any, ...]) -> None:
    worker, keys = filled()
    worker.m_store = Pool(keys, list)
    want = stock("worker.lookup_scheduler")(worker, *arguments)
    assert lookup.lookup_scheduler(worker, *arguments) == want


@pytest.mark.parametrize("held", [-1, -5, -500, -(1 << 70)])
def test_less_than_nothing_on_the_accelerator_is_nothing(held: int) -> None:
    worker, keys = filled()
    worker.m_store = Pool(keys, list)
    assert lookup.lookup_scheduler(worker, 1600, HASHES, IDS, hbm_hit_tokens=held) == 960


def test_a_worker_without_a_pool_gives_no_hit() -> None:
    worker, keys = filled()
    worker.m_store = None
    assert lookup.lookup_scheduler(worker, 1600, HASHES, IDS) == 0
    worker.m_store = Pool(keys, list)  # it connects late
    assert lookup.lookup_scheduler(worker, 1600, HASHES, IDS) == 960


def test_a_scheduler_asks_over_the_real_socket(tmp_path: Any, monkeypatch: Any) -> None:
    """vllm-ascend's own server and client, with one thread that must survive everything."""
    server = importlib.import_module(ascend_world.PACKAGE + "ascend_store_connector")
    scheduler = importlib.import_module(ascend_world.PACKAGE + "pool_scheduler")
    monkeypatch.setattr(scheduler.envs, "VLLM_RPC_BASE_PATH", str(tmp_path))
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"lookup_rpc_port": 1}),
        parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_rank_local=0),
    )
    worker, keys = filled()
    digests = [bytes.fromhex(text) for text in HASHES]
    answering = server.LookupKeyServer(worker, config)
    client = scheduler.LookupKeyClient(config)
    client.socket.setsockopt(scheduler.zmq.RCVTIMEO, 20_000)
    try:
        seen = []
        for put in (False, True):
            if put:
                kvmask.ascend.install()
            found = []
            for tokens, held, answer in (
                (1600, 0, list),
                (1600, 320, list),
                (1599, 0, list),
                (1600, 0, failing),
                (1600, 0, lambda a: "no answer"),
                (1616, 0, list),  # more tokens than digests
                (1600, 0, list),
            ):
                worker.m_store = Pool(keys, answer)
                found.append(client.lookup(tokens, digests, IDS, held))
            seen.append(found)
        assert seen[0] == seen[1]
        assert seen[1][:5] == [960, 960, 960, 0, 0]
    finally:
        answering.running = False
        answering.thread.join(0.5)
        if answering.thread.is_alive():
            client.lookup(0, [], IDS)  # it waits for one more request
        answering.thread.join(20)
        assert not answering.thread.is_alive()
        for end in (client, answering):
            end.close()
            end.ctx.term()


def test_the_last_block_counts_when_ids_are_counted_from_the_right() -> None:
    """A compressed block without a whole row is not moved, and still has a place in the table."""
    groups = [{"kind": "full", "block_size": 16}]
    for family, ratio in (("c4", 4), ("c128", 128)):
        worker = ascend_world.make_worker(groups, families=[family], hybrid=False)
        db = worker.token_database
        unit = 16 * (ratio if releases.current().scales_families else 1)
        db.hash_block_size = unit
        for tokens, table in itertools.product((unit + 1, unit + 3, 2 * unit), ([5], [5, 6])):
            args = (tokens, HASHES, table)
            want = list(stock("database.key_strings_with_ids")(db, *args))
            assert list(database.key_strings_with_ids(db, *args)) == want, (family, args)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 160, 161, 1600, 1 << 50, -3])
@pytest.mark.parametrize("start", [0, 1, 16, 31, 1 << 40, -7])
def test_keys_of_odd_ranges(tokens: int, start: int) -> None:
    db = ascend_world.make_worker(HYBRID).token_database
    for hashes in (HASHES, [bytes.fromhex(text) for text in HASHES[:7]]):
        for keep in (None, lambda at: at % 32 == 0):
            args = (tokens, hashes, start, 1, keep)
            want = list(stock("database.key_strings")(db, *args))
            assert list(database.key_strings(db, *args)) == want
            for shard in ((0, 1), (1, 2), (2, 2), (-1, 3), (0, 0), (None, 2)):
                more = (tokens, hashes, [0, 4, 0, 7], start, 1, True, keep, *shard)
                want = list(stock("database.key_strings_with_ids")(db, *more))
                assert list(database.key_strings_with_ids(db, *more)) == want


def test_descriptors_of_odd_ranges() -> None:
    db = ascend_world.make_worker(HYBRID).token_database
    db.set_group_buffers({0: [4096, 1 << 40]}, {0: [96, 7]}, {0: [128, 64]})
    for start, end, block in itertools.product((0, 16, 17, 320), (0, 16, 20, 33), (None, 0, 9)):
        args = (start, end, [3, 1, 0], 0, "kv", block)
        want = stock("database.prepare_value")(db, *args)
        assert database.prepare_value(db, *args) == want, args


def test_threads_get_what_one_thread_gets() -> None:
    worker, keys = filled()
    worker.m_store = Pool(keys, list)
    db, coord = worker.token_database, worker.cache_coordinator
    db.set_group_buffers({0: [4096, 1 << 40]}, {0: [96, 7]})
    calls: list[Callable[[], Any]] = [
        lambda: worker.lookup_scheduler(1600, HASHES, IDS),
        lambda: worker.lookup_scheduler(800, HASHES, IDS, hbm_hit_tokens=320),
        lambda: coord.store_mask(1600, 1000),
        lambda: coord.lookup_mask(1600),
        lambda: coord.load_mask(HASHES, 960),
        lambda: list(db.process_token_key_strings(1600, HASHES, 32, 1)),
        lambda: list(
            db.process_token_key_strings_with_block_ids(1600, HASHES, list(range(100)), 0, 2)
        ),
        *[lambda i=i: db.prepare_value(16 * i, 16 * i + 16, list(range(99))) for i in range(8)],
    ]
    want = [call() for call in calls]
    stop = threading.Event()

    def flip() -> None:
        """Put kvmask in place and take it out, while others call."""
        while not stop.is_set():
            kvmask.ascend.install("staged")
            kvmask.ascend.install("exact")
            kvmask.ascend.uninstall()

    def use(seed: int) -> list[str]:
        rng = random.Random(seed)
        wrong = []
        for _ in range(400):
            i = rng.randrange(len(calls))
            if calls[i]() != want[i]:
                wrong.append(f"call {i}")
        return wrong

    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    flipper = threading.Thread(target=flip)
    flipper.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            assert [bad for result in threads.map(use, range(4)) for bad in result] == []
    finally:
        stop.set()
        flipper.join()
        sys.setswitchinterval(was)


def test_install_and_uninstall_in_every_order() -> None:
    before = {name: in_place(name) for name in ALL}
    for order in itertools.product((True, False), repeat=4):
        for put in order:
            if put:
                kvmask.ascend.install()
            else:
                kvmask.ascend.uninstall()
            now = {name: in_place(name) for name in ALL}
            assert now == (ALL if put else before)
    kvmask.ascend.uninstall()
    assert {name: in_place(name) for name in ALL} == before


def test_somebody_elses_function_underneath_is_left_alone(monkeypatch: Any) -> None:
    def other(self: Any, *args: Any, **kwargs: Any) -> int:
        return 7

    owner, attribute = holder("worker.lookup_scheduler")
    monkeypatch.setattr(owner, attribute, other)
    with pytest.raises(UnsupportedReleaseError, match=r"lookup_scheduler was replaced by somebody"):
        kvmask.ascend.install()
    assert in_place("worker.lookup_scheduler") is other
    assert in_place("coordinator.store_mask") is stock("coordinator.store_mask")
    kvmask.ascend.uninstall()
    assert in_place("worker.lookup_scheduler") is other
    monkeypatch.setenv("KVMASK_ASCEND", "1")
    _plugin.ascend()  # the log says it; the engine goes on
    assert in_place("worker.lookup_scheduler") is other


def test_somebody_elses_function_on_top_stays(monkeypatch: Any) -> None:
    kvmask.ascend.install()
    owner, attribute = holder("worker.lookup_scheduler")
    mine = in_place("worker.lookup_scheduler")

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mine(self, *args, **kwargs)

    setattr(owner, attribute, other)
    try:
        kvmask.ascend.install("exact")  # only the strategy
        assert in_place("worker.lookup_scheduler") is other
        assert lookup._default["lookup"] == "exact"
        lines = []
        monkeypatch.setattr(
            install,
            "logger",
            type("Log", (), {"warning": lambda self, t, *a: lines.append(t % a)})(),
        )
        kvmask.ascend.uninstall()
        assert in_place("worker.lookup_scheduler") is other
        assert in_place("coordinator.store_mask") is stock("coordinator.store_mask")
        assert lines == [
            "kvmask cannot leave pool_worker.KVPoolWorker.lookup_scheduler: "
            "somebody else has replaced it since"
        ]
        worker, keys = filled()
        worker.m_store = Pool(keys, list)
        assert worker.lookup_scheduler(1600, HASHES, IDS) == 960  # it still works
        with pytest.raises(UnsupportedReleaseError, match="replaced by somebody else"):
            kvmask.ascend.install()
    finally:
        setattr(owner, attribute, stock("worker.lookup_scheduler"))


def test_a_wrong_switch_leaves_the_engine_alone(monkeypatch: Any) -> None:
    monkeypatch.setenv("KVMASK_ASCEND", "1")
    monkeypatch.setenv("KVMASK_LOOKUP", "fastest")
    _plugin.ascend()
    assert not releases.seams.placed()
    for value in ("", "0", "false", "no", "2"):
        monkeypatch.setenv("KVMASK_ASCEND", value)
        monkeypatch.setenv("KVMASK_LOOKUP", "staged")
        _plugin.ascend()
        assert not releases.seams.placed()


def test_a_part_of_a_known_release_gets_its_features(monkeypatch: Any) -> None:
    changed = dict(releases.seams._stock)
    changed["database.iter_chunks"] = test_a_wrong_switch_leaves_the_engine_alone
    monkeypatch.setattr(releases.seams, "_stock", changed)
    monkeypatch.setattr(releases, "_found", [])
    kvmask.ascend.install()
    names = {name for name in ALL if in_place(name) is ALL[name]}
    assert names == {
        "coordinator.store_mask",
        "coordinator.lookup_mask",
        "coordinator.load_mask",
        "database.prepare_value",
        "worker.register",
    }
    assert masks.store_mask(ascend_world.make_worker(HYBRID).cache_coordinator, 160)
