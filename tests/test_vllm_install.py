"""Putting kvmask under the stock connector: all of it or nothing, and back again."""

from __future__ import annotations

import importlib
import inspect
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import kvmask.vllm
from kvmask import _plugin
from kvmask.errors import ArgumentError, UnsupportedReleaseError
from kvmask.vllm import connector, lookup, releases, seams

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test begins and ends with stock vLLM."""
    kvmask.vllm.uninstall()
    strategy = lookup._default["lookup"]
    before = in_place()
    yield
    kvmask.vllm.uninstall()
    lookup.set_default(strategy)
    assert in_place() == before


def in_place() -> dict[str, Any]:
    """What vLLM has at every seam at the moment."""
    found = {}
    for name in seams.PATHS:
        where = seams.SEAMS._owner(name)
        if where is not None:
            found[name] = vars(where[0])[where[1]]
    return found


def test_install_and_uninstall() -> None:
    before = in_place()
    wanted = connector.replacements(releases.current())
    kvmask.vllm.install()
    after = in_place()
    assert {n for n in before if before[n] is not after[n]} == set(wanted)
    assert all(after[n] is f for n, f in wanted.items())
    assert seams.placed()
    kvmask.vllm.uninstall()
    assert in_place() == before
    assert not seams.placed()


def test_installing_again_only_changes_the_strategy() -> None:
    kvmask.vllm.install()
    first = in_place()
    assert lookup._default["lookup"] == "staged"
    kvmask.vllm.install(lookup="exact")
    assert in_place() == first
    assert lookup._default["lookup"] == "exact"
    kvmask.vllm.uninstall()
    kvmask.vllm.uninstall()


def test_an_unknown_strategy_touches_nothing() -> None:
    before = in_place()
    with pytest.raises(ArgumentError, match=r"`lookup` must be one of .*, got 'all'"):
        kvmask.vllm.install(lookup="all")
    assert in_place() == before
    assert lookup._default["lookup"] != "all"


def changed_rule(cls: Any) -> None:
    """A method of a newer release."""


@pytest.mark.parametrize(
    ("seam", "now", "message"),
    [
        ("window.mask", changed_rule, r"SlidingWindowManager.reachable_block_mask has changed"),
        ("worker.lookup", None, r"worker.MooncakeStoreWorker.lookup is gone"),
        ("core.replay_boundaries", None, r"replay_boundaries is gone"),
        ("sending.init", changed_rule, r"KVCacheStoreSendingThread.__init__ has changed"),
    ],
)
def test_an_unknown_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, seam: str, now: Any, message: str
) -> None:
    before = in_place()
    monkeypatch.setattr(releases, "_current", [])
    if now is None:
        monkeypatch.delitem(seams.SEAMS._stock, seam)
    else:
        monkeypatch.setitem(seams.SEAMS._stock, seam, now)
    with pytest.raises(UnsupportedReleaseError, match=message) as caught:
        kvmask.vllm.install()
    assert "kvmask was checked against vLLM 0.24, 0.28, 0.32, 0.33" in str(caught.value)
    assert in_place() == before
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    with pytest.raises(UnsupportedReleaseError, match=message):
        kvmask.vllm.KVMaskStoreConnector(config, None, None)


def test_a_method_that_somebody_else_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases.StockSending, "_handle_request", changed_rule)
    before = in_place()
    with pytest.raises(UnsupportedReleaseError, match="_handle_request was replaced by somebody"):
        kvmask.vllm.install()
    assert in_place() == before
    monkeypatch.undo()


def test_uninstall_leaves_what_came_on_top() -> None:
    kvmask.vllm.install()
    releases.StockWorker.lookup = changed_rule
    try:
        kvmask.vllm.uninstall()
        assert vars(releases.StockWorker)["lookup"] is changed_rule
    finally:
        releases.StockWorker.lookup = seams.stock("worker.lookup")


def test_a_failure_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = in_place()
    put = seams.SEAMS._put

    def stubborn(name: str, function: Any) -> None:
        if name == "receiving.handle_request":
            raise TypeError("cannot set attribute")
        put(name, function)

    monkeypatch.setattr(seams.SEAMS, "_put", stubborn)
    with pytest.raises(TypeError):
        kvmask.vllm.install()
    assert in_place() == before
    assert not seams.placed()


def test_every_release_has_digests_of_all_it_replaces() -> None:
    for name in releases.RELEASES:
        known = releases.digests(name)
        replaced = set(connector.replacements(releases._KNOWN[name]))
        replaced = {seams.ALIASES.get(seam, seam) for seam in replaced}
        assert replaced <= set(known), name
        assert set(known) <= set(seams.PATHS), name
        assert all(len(d) == 10 for d in known.values()), name


def test_a_digest_does_not_depend_on_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(x: int) -> int:
        return x + 1

    def told(x: int) -> int:
        """Add one."""
        # because
        return x + 1

    def other(x: int) -> int:
        return x + 2

    found = []
    for f in (plain, told, other):
        monkeypatch.setitem(seams.SEAMS._stock, "window.mask", f)
        monkeypatch.setattr(
            inspect, "getsource", lambda f, get=inspect.getsource: rename(get(f)), raising=True
        )
        found.append(seams.digest("window.mask"))
        monkeypatch.undo()
    assert found[0] == found[1] != found[2]
    assert all(found)


def rename(source: str) -> str:
    for name in ("plain", "told", "other"):
        source = source.replace(f"def {name}(", "def f(")
    return source


def test_plugin_acts_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0", ""):
        if value is None:
            monkeypatch.delenv("KVMASK_VLLM", raising=False)
        else:
            monkeypatch.setenv("KVMASK_VLLM", value)
        _plugin.vllm()
        assert not seams.placed()
    monkeypatch.setenv("KVMASK_VLLM", "1")
    monkeypatch.setenv("KVMASK_LOOKUP", "exact")
    _plugin.vllm()
    assert seams.placed()
    assert lookup._default["lookup"] == "exact"


def test_plugin_lets_an_unknown_release_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVMASK_VLLM", "1")
    monkeypatch.setattr(releases, "_current", [])
    monkeypatch.setitem(seams.SEAMS._stock, "full.find", changed_rule)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append(r.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.kvmask")
    log.addHandler(handler)
    try:
        _plugin.vllm()
    finally:
        log.removeHandler(handler)
    assert not seams.placed()
    assert "find_longest_cache_hit has changed" in records[0]


def test_entry_point_is_declared() -> None:
    path = Path(__file__).parent.parent / "pyproject.toml"
    if not path.exists():
        pytest.skip("no project file beside the tests")
    entry = tomllib.loads(path.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = entry["kvmask"].partition(":")
    assert getattr(importlib.import_module(module), name) is _plugin.vllm


@pytest.mark.parametrize(
    "name",
    [
        "MooncakeStoreCoordinator",
        "ExternalCachedBlockPool",
        "ChunkedTokenDatabase",
        "PoolKey",
        "KeyMetadata",
        "BlobBlockHashes",
        "chunk_hashes_for_block_size",
    ],
)
def test_names_take_vllms_arguments(name: str) -> None:
    module = (
        "coordinator" if name in ("MooncakeStoreCoordinator", "ExternalCachedBlockPool") else "data"
    )
    theirs = getattr(importlib.import_module(releases._STORE + module), name)
    ours = getattr(kvmask.vllm, name)
    if inspect.isfunction(theirs):
        assert ours is theirs
        return
    assert issubclass(ours, theirs)
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        if method.startswith("_") and method != "__init__":
            continue
        mine = getattr(ours, method)
        if method == "__init__" and ours.__init__ is not theirs.__init__:
            assert theirs.__init__ in {c.__init__ for c in ours.__mro__}
            continue
        assert [*inspect.signature(mine).parameters] == [*inspect.signature(function).parameters]


def test_database_places_blocks_from_the_core() -> None:
    metadata = kvmask.vllm.KeyMetadata("m", 0, 0, 0, 0)
    db = kvmask.vllm.ChunkedTokenDatabase(metadata, 16)
    db.set_kv_caches_base_addr([1 << 40, 1 << 41])
    db.set_block_len([256, 512])
    addresses, sizes, ids = db.store_layout.prepare_values([(0, 16), (32, 48)], [3, 0, 7], [0, 0])
    assert addresses == [
        [(1 << 40) + 3 * 256, (1 << 41) + 3 * 512],
        [(1 << 40) + 7 * 256, (1 << 41) + 7 * 512],
    ]
    assert sizes == [[256, 512]] * 2
    assert ids == [3, 7]


def test_connector_checks_its_strategy_first() -> None:
    extra = {"lookup": "fast"}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    with pytest.raises(ArgumentError, match="got 'fast'"):
        kvmask.vllm.KVMaskStoreConnector(config, None, None)


def test_stock_objects_become_kvmasks() -> None:
    """What the connector does to a worker that stock has made."""
    worker = object.__new__(releases.StockWorker)
    worker.token_dbs = [releases.StockDatabase(releases.KeyMetadata("m", 0, 0, 0, 0), 16)]
    worker.coord = object.__new__(releases.StockCoordinator)
    connector.adopt_worker(worker, "exact")
    assert type(worker).lookup is lookup.lookup
    assert worker._kvmask_lookup == "exact"
    assert type(worker.coord) is kvmask.vllm.MooncakeStoreCoordinator
    assert "prepare_values" in vars(type(worker.token_dbs[0].store_layout))
    # A coordinator of somebody else's stays what it is.
    theirs = type("Theirs", (releases.StockCoordinator,), {})
    worker.coord = object.__new__(theirs)
    connector.adopt_worker(worker, "exact")
    assert type(worker.coord) is theirs


def test_the_engine_hashes_blocks_with_it_while_it_is_installed() -> None:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core

    stock = kv_cache_utils.get_request_block_hasher
    kvmask.vllm.install()
    assert core.get_request_block_hasher is kvmask.vllm.request_block_hasher
    kvmask.vllm.uninstall()
    assert core.get_request_block_hasher is stock is kv_cache_utils.get_request_block_hasher
