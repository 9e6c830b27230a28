# ruff: noqa: E402
"""What kvmask leaves to AscendStore: the result is stock's, and the log says it once.

They need vLLM and the source of vllm-ascend, which `make test-ascend` unpacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import ascend_world
import pytest

if not ascend_world.wanted():
    pytest.skip("needs KVMASK_ASCEND_VERSION and its source", allow_module_level=True)
ascend_world.modules()

import kvmask.ascend
from kvmask.ascend import database, lookup, masks, releases, said

pytestmark = pytest.mark.vllm

FULL = [{"kind": "full", "block_size": 16}]
HYBRID = [
    {"kind": "full", "block_size": 16},
    {"kind": "window", "block_size": 16, "span": 33},
    {"kind": "state", "block_size": 16},
]
OLD = releases.current().digests_digests
DIGESTS = [hashlib.sha256(b"%d" % i).digest() for i in range(20)]
HASHES: list[Any] = [digest.hex() for digest in DIGESTS]
MINE = {
    "worker.lookup_scheduler": lookup.lookup_scheduler,
    "coordinator.store_mask": masks.store_mask,
    "coordinator.lookup_mask": masks.lookup_mask,
    "coordinator.load_mask": masks.load_mask,
    "database.key_strings": database.key_strings,
    "database.key_strings_with_ids": database.key_strings_with_ids,
    "database.prepare_value": database.prepare_value,
    "worker.register": lookup.register_kv_caches,
}

# What a case calls: the seam, the object, and its arguments.
Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class Log:
    """Stands for a logger and keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str, *args: Any) -> None:
        self.lines.append(text % args)


@pytest.fixture(autouse=True)
def log(monkeypatch: Any) -> Iterator[Log]:
    """The log of a process that has said nothing yet."""
    lines = Log()
    monkeypatch.setattr(said, "logger", lines)
    said.times.clear()
    yield lines
    said.times.clear()


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A result, all of an iterator, or the type of an exception."""
    try:
        result = function(*args, **kwargs)
        return list(result) if hasattr(result, "__next__") else result
    except Exception as error:
        return type(error)


def worker(groups: list[dict[str, Any]] = HYBRID, **more: Any) -> Any:
    made = ascend_world.make_worker(groups, **more)
    made.m_store = ascend_world.ScriptedStore(set())
    return made


def strange_worker() -> Any:
    """One of whose managers is nobody's."""
    made = worker()
    coord = made.cache_coordinator

    class Stranger(coord.attention_groups[0][2]):  # type: ignore[misc,name-defined]
        @classmethod
        def find_longest_cache_hit(cls, **kwargs: Any) -> Any:
            return super().find_longest_cache_hit(**kwargs)

    spec, ids, _ = coord.attention_groups[0]
    coord.attention_groups = [(spec, ids, Stranger), *coord.attention_groups[1:]]
    return made


def small_window_worker() -> Any:
    return worker([FULL[0], {"kind": "window", "block_size": 16, "span": 1}])


def ask(made: Any, *args: Any, **more: Any) -> Call:
    ids = list(range(made.num_kv_cache_groups))
    given = args + (160, HASHES, ids)[len(args) :]
    return "worker.lookup_scheduler", made, given, more


def mask(name: str, made: Any, *args: Any, **more: Any) -> Call:
    return f"coordinator.{name}", made.cache_coordinator, args, more


def odd_blocks() -> Any:
    """Keys of blocks that are no whole hash blocks."""
    made = worker(FULL)
    made.token_database.hash_block_size = 12
    return made.token_database


def no_alignment() -> Any:
    made = worker(FULL)
    made.cache_transfer_granularity = 24
    return made


def with_state_alone() -> Any:
    return worker([{"kind": "state", "block_size": 16}])


def buffers(bases: list[int], lengths: list[int]) -> Any:
    db = worker().token_database
    db.set_group_buffers({0: bases}, {0: lengths})
    return db


CASES: dict[str, tuple[str, Callable[[], Call]]] = {
    "layerwise transfer": ("lookups", lambda: ask(worker(), use_layerwise=True)),
    "it is asked for some of the cache groups": (
        "lookups",
        lambda: ask(worker(), 160, HASHES, [0, 1]),
    ),
    "manager, Stranger, kvmask does not know": ("lookups", lambda: ask(strange_worker())),
    "a window of one token": ("lookups", lambda: ask(small_window_worker())),
    "recurrent states without a coordinator": (
        "lookups",
        lambda: ask(worker([{"kind": "state", "block_size": 16}], hybrid=False)),
    ),
    "a cache group that is named twice": (
        "lookups",
        lambda: ask(worker(FULL, hybrid=False), 160, HASHES, [0, 0]),
    ),
    "block sizes that do not divide each other": ("lookups", lambda: ask(no_alignment())),
    "block hashes that are no list": ("lookups", lambda: ask(worker(), 160, tuple(HASHES))),
    "its digests do not cover": ("lookups", lambda: ask(worker(), 16 * 21)),
    "arguments that raise TypeError": ("lookups", lambda: ask(worker(), None)),
    "block hashes that raise HashInputError": (
        "lookups",
        lambda: ask(worker(), 160, [text.upper() for text in HASHES]),
    ),
    "Stranger, kvmask does not know": (
        "store masks",
        lambda: mask("store_mask", strange_worker(), 160, 100),
    ),
    "is no multiple of the alignment": (
        "store masks",
        lambda: mask("store_mask", worker(), 161),
    ),
    "Stranger, kvmask does not": ("lookup masks", lambda: mask("lookup_mask", strange_worker(), 0)),
    "no multiple of the alignment": (
        "lookup masks",
        lambda: mask("lookup_mask", worker(), -16),
    ),
    "Stranger, kvmask": ("load masks", lambda: mask("load_mask", strange_worker(), HASHES, 160)),
    "that its digests do not cover": (
        "load masks",
        lambda: mask("load_mask", worker(), HASHES, 16 * 21),
    ),
    "block hashes in a tuple": (
        "keys",
        lambda: ("database.key_strings", worker().token_database, (99, tuple(HASHES)), {}),
    ),
    "not all bytes or all text": (
        "keys",
        lambda: (
            "database.key_strings_with_ids",
            worker().token_database,
            (160, [*HASHES[:3], DIGESTS[3], *HASHES[4:]], list(range(10))),
            {},
        ),
    ),
    "all bytes or all text": (
        "keys",
        lambda: (
            "database.key_strings",
            worker().token_database,
            (160, [*DIGESTS[:3], HASHES[3], *DIGESTS[4:]]),
            {},
        ),
    ),
    "blocks that are not whole hash blocks": (
        "keys",
        lambda: ("database.key_strings", odd_blocks(), (160, HASHES), {}),
    ),
    "the cache role state": (
        "descriptors",
        lambda: (
            "database.prepare_value",
            buffers([4096], [64]),
            (0, 16, [3], 0, "state"),
            {},
        ),
    ),
    "a cache group without buffers": (
        "descriptors",
        lambda: ("database.prepare_value", buffers([], []), (0, 16, [3]), {}),
    ),
    "a region that is empty": (
        "descriptors",
        lambda: ("database.prepare_value", buffers([4096, 8192], [64, 0]), (0, 16, [3]), {}),
    ),
}
if OLD:
    CASES |= {
        "blocks of several hash blocks have digests of their own": (
            "keys",
            lambda: (
                "database.key_strings",
                worker(FULL, hash_block_size=8).token_database,
                (160, HASHES),
                {},
            ),
        ),
        "several hash blocks have digests of their own": (
            "lookups",
            lambda: ask(worker(HYBRID, hash_block_size=8)),
        ),
        "a compressed cache family without a coordinator": (
            "lookups",
            lambda: ask(worker(FULL, families=["c4"], hybrid=False)),
        ),
        "a cache of grouped hashes": (
            "load masks",
            lambda: mask("load_mask", worker(), HASHES, 160, grouped_hash_cache={}),
        ),
    }


@pytest.mark.parametrize("why", CASES)
def test_the_result_is_stocks_and_the_log_says_why(why: str, log: Log) -> None:
    what, make = CASES[why]
    seam, target, args, more = make()
    want = outcome(releases.seams.stock(seam), target, *args, **more)
    for _ in range(3):
        assert outcome(MINE[seam], target, *args, **more) == want
    seam, target, args, more = make()  # another worker of the same process
    assert outcome(MINE[seam], target, *args, **more) == want
    assert len(log.lines) == 1, log.lines
    assert log.lines[0].startswith(f"kvmask leaves {what} to AscendStore: ")
    assert why in log.lines[0]


def test_what_kvmask_answers_is_not_said(log: Log) -> None:
    made = worker()
    assert lookup.lookup_scheduler(made, 160, HASHES, [0, 1, 2]) == 0
    coord, db = made.cache_coordinator, made.token_database
    masks.store_mask(coord, 160, 100)
    masks.lookup_mask(coord, 160)
    masks.load_mask(coord, HASHES, 160)
    for empty in ([], HASHES):
        list(database.key_strings(db, 160, empty))
        list(database.key_strings_with_ids(db, 160, empty, [1, 2, 3]))
    database.prepare_value(buffers([4096], [64]), 0, 16, [3])
    assert log.lines == []


def test_a_layerwise_worker_says_so_when_it_gets_its_caches(log: Log, monkeypatch: Any) -> None:
    got = []

    def stock(self: Any, caches: Any) -> str:
        got.append((self, caches))
        return "registered"

    monkeypatch.setitem(releases.seams._stock, "worker.register", stock)
    made = worker()
    assert not made.use_layerwise
    assert lookup.register_kv_caches(made, {"a": 1}) == "registered"
    assert log.lines == []
    made.use_layerwise = True
    lookup.register_kv_caches(made, {"a": 1})
    lookup.register_kv_caches(made, kv_caches := {"b": 2})
    assert got[-1] == (made, kv_caches)
    assert log.lines == [
        "kvmask leaves lookups, keys and descriptors to AscendStore: layerwise transfer"
    ]


def test_a_worker_takes_its_caches_with_kvmask_in_place(log: Log) -> None:
    torch = ascend_world.modules().torch
    made = worker(FULL)
    made.m_store.register_buffer = lambda *args: None
    made._start_kv_transfer_threads = lambda *args: None
    cache = torch.zeros(64, 16, 1, 8)
    kvmask.ascend.install()
    try:
        made.register_kv_caches({"model.layers.0.attn": (cache, cache.clone())})
    finally:
        kvmask.ascend.uninstall()
    db = made.token_database
    assert db.group_kv_caches_base_addr[0][0] == cache.data_ptr()
    assert database.prepare_value(db, 0, 16, [3])[0][0] == cache[3].data_ptr()
    assert log.lines == []


def test_reasons_without_end_are_one(log: Log) -> None:
    for i in range(said.MOST * 3):
        said.stays("lookups", f"reason {i}")
    assert len(log.lines) == said.MOST + 1
    assert log.lines[-1].endswith(said.OTHER)
    assert said.times.total() == said.MOST * 3
