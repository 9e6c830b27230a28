# ruff: noqa: E402
"""kvmask under vllm-ascend's AscendStore: installing, lookups of its own worker, what stays stock.

They need vLLM and the source of vllm-ascend, which `make test-ascend` unpacks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import ascend_world
import pytest

if not ascend_world.wanted():
    pytest.skip("needs KVMASK_ASCEND_VERSION and its source", allow_module_level=True)
ascend_world.modules()

import kvmask.ascend
from kvmask import _plugin
from kvmask.ascend import database, lookup, masks, releases, rules
from kvmask.ascend.install import LISTENERS, REPLACEMENTS
from kvmask.errors import ArgumentError, BlockIdError, UnsupportedReleaseError

pytestmark = pytest.mark.vllm

HYBRID = [
    {"kind": "full", "block_size": 16},
    {"kind": "window", "block_size": 16, "span": 33},
    {"kind": "state", "block_size": 16},
]
IDS = [0, 1, 2]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test begins and ends with stock AscendStore and the default strategy."""
    kvmask.ascend.uninstall()
    yield
    kvmask.ascend.uninstall()
    lookup.set_default("staged")


def digests(n: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % i).digest() for i in range(n)]


def in_place(name: str) -> Any:
    holder, attribute = releases.seams._owner(name)
    return vars(holder)[attribute]


def stock(name: str) -> Any:
    return releases.seams.stock(name)


def test_every_feature_is_put_in_place_and_taken_out() -> None:
    before = {name: in_place(name) for name in REPLACEMENTS}
    kvmask.ascend.install()
    assert {name: in_place(name) for name in REPLACEMENTS} == REPLACEMENTS
    kvmask.ascend.install("exact")
    assert lookup._default["lookup"] == "exact"
    kvmask.ascend.uninstall()
    assert {name: in_place(name) for name in REPLACEMENTS} == before
    with pytest.raises(ArgumentError, match=r"`lookup` must be one of"):
        kvmask.ascend.install("fast")


def test_one_line_says_what_is_in_place(caplog: Any) -> None:
    with caplog.at_level("INFO", logger="vllm.kvmask"):
        releases.logger.propagate = True
        kvmask.ascend.install()
        kvmask.ascend.install()
    lines = [r.getMessage() for r in caplog.records if "kvmask is in place" in r.getMessage()]
    assert len(lines) <= 1  # vLLM's own set-up of logging may keep it from here
    line = releases.fitting().line("vllm-ascend", releases.version())
    assert "lookup, masks, keys, descriptors" in line
    assert "Stock stays" not in line


def test_a_changed_function_keeps_its_feature_stock(monkeypatch: Any) -> None:
    other = dict(releases.seams._stock)
    other["database.prepare_value"] = digests
    monkeypatch.setattr(releases.seams, "_stock", other)
    found = releases.TABLE.fit(releases.seams, "vllm-ascend", "9.9")
    assert [f.name for f in found.features] == ["lookup", "masks", "keys"]
    assert "Stock stays: descriptors (" in found.line("vllm-ascend", "9.9")
    assert "prepare_value has changed" in found.line("vllm-ascend", "9.9")
    assert "database.prepare_value" not in found.seams
    monkeypatch.setattr(releases.seams, "_stock", dict.fromkeys(releases.seams))
    with pytest.raises(UnsupportedReleaseError, match=r"checked against vllm-ascend .*is gone"):
        releases.TABLE.fit(releases.seams, "vllm-ascend", "9.9")


def test_the_release_is_the_one_under_test() -> None:
    assert releases.current().name == ascend_world.VERSION


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("lost", [0, 0.2])
def test_lookup_gives_stocks_hit_from_fewer_keys(text: bool, lost: float) -> None:
    worker = ascend_world.make_worker(HYBRID, tp_size=2, kv_heads=2)
    hashes: list[Any] = digests(200)
    if text:
        hashes = [d.hex() for d in hashes]
    keys = ascend_world.fill_store(
        worker, random.Random(2), hashes, [lambda i: i < 150] * 3, lost=lost
    )
    worker.m_store = ascend_world.ScriptedStore(keys)
    hit = stock("worker.lookup_scheduler")(worker, 3200, hashes, IDS)
    asked = worker.m_store.asked
    kvmask.ascend.install()
    for most in (len(asked) * 0.9, len(asked) * 0.9):
        worker.m_store = ascend_world.ScriptedStore(keys)
        assert worker.lookup_scheduler(3200, hashes, IDS) == hit
        assert set(worker.m_store.asked) <= set(asked)
        assert len(worker.m_store.asked) < most
    kvmask.ascend.install("exact")
    worker.m_store = ascend_world.ScriptedStore(keys)
    assert worker.lookup_scheduler(3200, hashes, IDS) == hit
    assert len(worker.m_store.calls) == 1
    assert worker.m_store.asked == asked


def test_what_the_accelerator_holds_is_not_asked() -> None:
    worker = ascend_world.make_worker(HYBRID)
    hashes = [d.hex() for d in digests(100)]
    keys = ascend_world.fill_store(
        worker, random.Random(2), hashes, [lambda i: i >= 40] * 3, lost=0
    )
    kvmask.ascend.install("exact")
    for held, hit in ((0, 0), (640, 1600), (656, 1600)):
        worker.m_store = ascend_world.ScriptedStore(keys)
        found = worker.lookup_scheduler(1600, hashes, IDS, hbm_hit_tokens=held)
        assert found == hit
        mine = worker.m_store.asked
        worker.m_store = ascend_world.ScriptedStore(keys)
        again = stock("worker.lookup_scheduler")(worker, 1600, hashes, IDS, hbm_hit_tokens=held)
        assert (again, worker.m_store.asked) == (found, mine)


class Answers:
    """A backend that answers every call with the same thing, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def exists(self, keys: list[str]) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer", [ConnectionError("gone"), TypeError("no"), None, [], [1], [1] * 5000, "1"]
)
def test_a_backend_without_an_answer_gives_no_hit(answer: Any) -> None:
    worker = ascend_world.make_worker(HYBRID)
    worker.m_store = Answers(answer)
    hashes = [d.hex() for d in digests(100)]
    assert lookup.lookup_scheduler(worker, 1600, hashes, IDS) == 0


def test_any_backend_with_exists_will_do() -> None:
    for package, name in (
        ("mooncake_backend", "MooncakeBackend"),
        ("memcache_backend", "MemcacheBackend"),
        ("yuanrong_backend", "YuanrongBackend"),
    ):
        path = (
            ascend_world.source()
            / "vllm_ascend"
            / ascend_world.PACKAGE.partition(".")[2].replace(".", "/")
        )
        text = (path / "backend" / f"{package}.py").read_text()
        assert f"class {name}(" in text
        assert "def exists(self, keys: list[str]) -> list[int]:" in text


def test_an_unknown_manager_stays_stock(monkeypatch: Any) -> None:
    worker = ascend_world.make_worker(HYBRID)
    coord = worker.cache_coordinator
    assert rules.rules_of(coord) is not None

    class Other(coord.attention_groups[0][2]):  # type: ignore[misc,name-defined]
        @classmethod
        def find_longest_cache_hit(cls, **kwargs: Any) -> Any:
            return super().find_longest_cache_hit(**kwargs)

    spec, ids, _ = coord.attention_groups[0]
    coord.attention_groups = [(spec, ids, Other), *coord.attention_groups[1:]]
    assert rules.rules_of(coord) is None
    mask = masks.store_mask(coord, 160)
    assert mask == stock("coordinator.store_mask")(coord, 160)
    worker.m_store = ascend_world.ScriptedStore(set())
    assert lookup.lookup_scheduler(worker, 160, [d.hex() for d in digests(10)], IDS) == 0
    assert len(worker.m_store.calls) == 3


def test_a_mask_of_no_whole_blocks_is_refused_as_stock_does() -> None:
    coord = ascend_world.make_worker(HYBRID).cache_coordinator
    for name in ("store_mask", "lookup_mask"):
        with pytest.raises(AssertionError, match="must be a multiple"):
            getattr(masks, name)(coord, 161)


@pytest.mark.parametrize("retention", [None, 0, 64, 48, 4096])
@pytest.mark.parametrize("eagle", [False, True])
def test_masks_follow_the_retention_interval(retention: int | None, eagle: bool) -> None:
    groups = [
        {"kind": "full", "block_size": 64},
        {"kind": "window", "block_size": 16, "span": 33},
        {"kind": "window", "block_size": 8, "span": 66},
        {"kind": "state", "block_size": 16},
    ]
    worker = ascend_world.make_worker(groups, retention=retention, eagle=eagle, hash_block_size=8)
    coord = worker.cache_coordinator
    for tokens in (0, 64, 640):
        assert masks.lookup_mask(coord, tokens) == stock("coordinator.lookup_mask")(coord, tokens)
        for prompt in (None, 0, 1, 63, 64, 65, 600, 700):
            mine = masks.store_mask(coord, tokens, prompt)
            assert mine == stock("coordinator.store_mask")(coord, tokens, prompt), prompt


def test_a_negative_block_id_is_refused() -> None:
    db = ascend_world.make_worker(HYBRID).token_database
    db.set_group_buffers({0: [4096]}, {0: [64]})
    with pytest.raises(BlockIdError):
        database.prepare_value(db, 0, 16, [-1])


def test_new_buffers_make_new_tables() -> None:
    db = ascend_world.make_worker(HYBRID).token_database
    db.set_group_buffers({0: [4096]}, {0: [64]})
    assert database.prepare_value(db, 16, 32, [1, 2]) == ([4096 + 128], [64], 2)
    db.set_group_buffers({0: [8192]}, {0: [32]}, {0: [48]})
    assert database.prepare_value(db, 16, 24, [1, 2]) == ([8192 + 96], [16], 2)
    assert database.prepare_value(db, 16, 24, [1, 2], cache_role="state") == ([], [], 2)


def test_the_plugin_acts_only_when_it_is_switched_on(monkeypatch: Any) -> None:
    monkeypatch.delenv("KVMASK_ASCEND", raising=False)
    _plugin.ascend()
    assert not releases.seams.placed()
    monkeypatch.setenv("KVMASK_ASCEND", "1")
    monkeypatch.setenv("KVMASK_LOOKUP", "exact")
    _plugin.ascend()  # the worker's module is there already
    assert releases.seams.placed() == REPLACEMENTS.keys() | LISTENERS.keys()
    assert lookup._default["lookup"] == "exact"


def test_the_plugin_leaves_an_unknown_release_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(releases, "_found", [])
    monkeypatch.setattr(releases.seams, "_stock", dict.fromkeys(releases.seams))
    monkeypatch.setenv("KVMASK_ASCEND", "1")
    _plugin.ascend()
    assert not releases.seams.placed()
