"""Putting kvmask under the stock connector: what fits of it, and back again."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import kvmask.vllm
from kvmask import _plugin, switch
from kvmask.errors import ArgumentError, UnsupportedReleaseError
from kvmask.vllm import (
    binding,
    connector,
    features,
    layouts,
    lookup,
    options,
    placing,
    releases,
    seams,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test begins and ends with stock vLLM."""
    kvmask.vllm.uninstall()
    strategy = lookup._default["lookup"]
    before = in_place()
    placing._said.clear()
    yield
    kvmask.vllm.uninstall()
    lookup.set_default(strategy)
    assert in_place() == before


def in_place() -> dict[str, Any]:
    """What vLLM has at every seam at the moment."""
    found = {}
    for name in seams.PATHS:
        where = None if "#" in seams.PATHS[name] else seams.SEAMS._owner(name)
        if where is not None:
            found[name] = vars(where[0])[where[1]]
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What kvmask says in vLLM's log: pairs of level and text."""
    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append((r.levelname, r.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("vllm.kvmask")
    log.addHandler(handler)
    monkeypatch.setattr(log, "disabled", False)
    level = log.level
    log.setLevel(logging.INFO)
    yield records
    log.setLevel(level)
    log.removeHandler(handler)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets vLLM be another one: its functions by seam, None where they are gone."""

    def change(**functions: Any) -> None:
        monkeypatch.setattr(releases, "_found", [])
        for name, function in functions.items():
            monkeypatch.setitem(seams.SEAMS._stock, name.replace("__", "."), function)

    return change


# Any seam of each feature that no other one has.
EVERY = {
    "connector__init": None,
    "coordinator__reachable_masks": None,
    "worker__lookup": None,
    "layout__prepare_values": None,
    "core__block_hasher": None,
}


def config(**extra: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_install_and_uninstall() -> None:
    before = in_place()
    wanted = placing.replacements(releases.fitting(), releases.current())
    assert set(releases.fitting().absent) == set(releases.fitting().stock) == set()
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
    ("seam", "now", "message", "stock"),
    [
        ("window.mask", changed_rule, "SlidingWindowManager.reachable_block_mask has changed",
         {"masks", "lookup", "asking", "local", "metrics"}),
        ("worker.lookup", None, "worker.MooncakeStoreWorker.lookup is gone",
         {"lookup", "asking", "local", "metrics"}),
        ("core.replay_boundaries", None, "replay_boundaries is gone",
         {"masks", "lookup", "asking", "local", "metrics"}),
        ("sending.init", changed_rule, "KVCacheStoreSendingThread.__init__ has changed",
         {"saving"}),
        ("layout.prepare_values", changed_rule, "RankLocalStoreLayout.prepare_values has changed",
         {"layouts", "saving", "loading"}),
        ("server.init", changed_rule, "LookupKeyServer.__init__ has changed",
         {"lookup", "asking", "local", "metrics"}),
        ("request.all_token_ids", changed_rule, "_all_token_ids is gone", {"hasher"}),
        ("protocol.encode", changed_rule, "encode_lookup_response has changed",
         {"lookup", "asking", "local", "metrics"}),
        ("metrics.stats", changed_rule, "MooncakeStoreConnectorStats has changed", {"metrics"}),
    ],
)  # fmt: skip
def test_what_does_not_fit_stays_stock(
    unknown: Any, said: Any, seam: str, now: Any, message: str, stock: set[str]
) -> None:
    unknown(**{seam: now})
    before = in_place()
    placed = releases.fitting()
    assert set(placed.stock) == stock
    kvmask.vllm.install()
    after = in_place()
    kept = {n for f in features.FEATURES if f.name not in stock for n in f.replaces}
    assert {n for n in before if before[n] is not after[n]} == kept & set(before)
    errors = [text for level, text in said if level == "ERROR"]
    assert len(errors) == len(stock)
    assert any(message in text for text in errors)
    assert next(text for level, text in said if level == "INFO").startswith(
        f"kvmask {kvmask.__version__} is in place in vLLM"
    )


def test_a_vllm_that_nothing_fits_is_refused(unknown: Any, said: Any) -> None:
    before = in_place()
    unknown(**EVERY)
    with pytest.raises(UnsupportedReleaseError, match=r"checked against vLLM 0\.24, 0\.25, .*gone"):
        kvmask.vllm.install()
    assert in_place() == before
    with pytest.raises(UnsupportedReleaseError, match="checked against"):
        kvmask.vllm.KVMaskStoreConnector(config(on_unknown="refuse"), None, None)
    assert connector._fitting("stock") is None
    assert said[-1][0] == "ERROR"
    assert "vLLM goes on without kvmask" in said[-1][1]


def test_a_connector_may_refuse_what_fits_in_part(unknown: Any) -> None:
    unknown(sending__init=changed_rule)
    with pytest.raises(
        UnsupportedReleaseError, match=r"saving does not fit .*__init__ has changed"
    ):
        connector._fitting("refuse")
    placed = connector._fitting("stock")
    assert placed is not None
    assert not placed.has("saving")
    assert "KVCacheStoreSendingThread" not in connector.classes()
    unknown(sending__init=seams.stock("receiving.init"), connector__init=changed_rule)
    assert connector._fitting("stock") is None
    with pytest.raises(UnsupportedReleaseError, match="KVMaskStoreConnector does not fit"):
        connector._fitting("refuse")


def test_threads_that_stay_stock_are_not_looked_for(unknown: Any) -> None:
    """Releases to 0.26 have other threads."""
    unknown(layout__prepare_values=changed_rule)
    own = connector.classes()["MooncakeStoreWorker"]
    assert own.register_kv_caches is releases.StockWorker.register_kv_caches
    assert own.lookup is lookup.lookup


def test_the_connector_of_an_unknown_vllm_is_stock(
    unknown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown(**EVERY)
    worker = object.__new__(releases.StockWorker)

    def made(self: Any, *args: Any) -> None:
        self.connector_worker, self.connector_scheduler = worker, None

    monkeypatch.setattr(releases.StockConnector, "__init__", made)
    monkeypatch.setattr(releases.StockConnector, "shutdown", lambda self: None)
    found = kvmask.vllm.KVMaskStoreConnector(config(local_aware=True), None, None)
    assert type(found.connector_worker) is releases.StockWorker
    assert not vars(worker)


def test_wrong_entries_of_the_configuration(said: Any) -> None:
    for extra, message in (
        ({"on_unknown": "die"}, "`on_unknown` must be one of .*, got 'die'"),
        ({"lookup": "fast"}, "got 'fast'"),
        ({"lokup": "exact"}, "has no entry 'lokup'; did you mean 'lookup'"),
        ({"localaware": True}, "did you mean 'local_aware'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kvmask.vllm.KVMaskStoreConnector(config(**extra), None, None)


def test_entries_that_nobody_reads_are_named() -> None:
    known = {"lookup": "exact", "load_async": True, "cache_prefix": "", "enable_lookup": True}
    assert options.check_names({**known, "my_proxy_port": 1}) == ["my_proxy_port"]
    assert options.check_names(known) == []
    text = options.said_of(["my_proxy_port", "deadline", "in_scheduler_lookups", "async"])
    assert text.startswith("nobody reads 'my_proxy_port', 'deadline' (did you mean 'lookup_deadli")
    assert "'async'" in text
    assert "'async' (" not in text
    assert text.endswith(", ".join(options.NAMES))
    for name in options.NAMES:
        assert options.said_of([f"{name}_2"]).count(f"(did you mean {name!r}") == 1


def test_an_entry_that_is_far_from_an_option_is_warned_of_with_the_near_ones(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases.StockConnector, "__init__", lambda self, *args: None)
    with pytest.raises(AttributeError):  # vLLM's part of the connector is left out
        kvmask.vllm.KVMaskStoreConnector(config(deadline=5), None, None)
    (text,) = [text for level, text in said if level == "WARNING"]
    assert text.startswith("nobody reads 'deadline' (did you mean 'lookup_deadline_ms'")


def test_a_method_that_somebody_else_replaced_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases.StockSending, "_handle_request", changed_rule)
    before = in_place()
    with pytest.raises(UnsupportedReleaseError, match="_handle_request was replaced by somebody"):
        kvmask.vllm.install()
    assert in_place() == before
    monkeypatch.undo()


def test_uninstall_leaves_what_came_on_top_and_says_so(said: Any) -> None:
    kvmask.vllm.install()
    releases.StockWorker.lookup = changed_rule
    try:
        kvmask.vllm.uninstall()
        assert vars(releases.StockWorker)["lookup"] is changed_rule
        text = "kvmask cannot leave worker.MooncakeStoreWorker.lookup: somebody else has replaced"
        assert [level for level, line in said if line.startswith(text)] == ["WARNING"]
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
    for name in features.RELEASES:
        known = features.TABLE.digests(name)
        release = releases._KNOWN[name]
        own = placing.functions(release)
        for feature in features.FEATURES:
            seen = [seams.ALIASES.get(seam, seam) for seam in feature.replaces]
            if feature.name in features.OFFERS[name] and seen:
                assert set(seen) & set(known), (name, feature.name)
                assert set(feature.replaces) <= set(own)
            assert {*feature.replaces, *feature.relies} <= set(seams.PATHS)
        assert set(known) <= set(seams.PATHS), name
        assert all(len(d) == 10 for d in known.values()), name
    named = {n for f in features.FEATURES for n in (*f.replaces, *f.relies)}
    assert set(seams.PATHS) == named
    assert {n for n, first in features._FIRST.items() if first != "0.24"} == set(features.ABSENT)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (switch.SWITCH, switch.LOOKUP, switch.ALLOWED, switch.RAY_PREFIXES):
        monkeypatch.setenv(name, "")  # so that it is gone again afterwards
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("value", [None, "0", "", "off", "False"])
def test_plugin_acts_only_when_asked(environ: Any, said: Any, value: str | None) -> None:
    if value is not None:
        environ.setenv("KVMASK_VLLM", value)
    _plugin.vllm()
    assert not seams.placed()
    assert not said


@pytest.mark.parametrize("value", ["1", "true", "On"])
def test_plugin_installs(environ: Any, value: str) -> None:
    environ.setenv("KVMASK_VLLM", value)
    environ.setenv("KVMASK_LOOKUP", "exact")
    _plugin.vllm()
    assert seams.placed()
    assert lookup._default["lookup"] == "exact"
    assert os.environ[switch.RAY_PREFIXES] == "KVMASK_"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVMASK_VLLM", "yes please", "KVMASK_VLLM must be 1 or 0, got 'yes please'"),
        ("KVMASK_LOOKUP", "stagged", "`lookup` must be one of .*got 'stagged'"),
    ],
)
def test_a_typing_error_in_the_environment_leaves_vllm_as_it_is(
    environ: Any, said: Any, name: str, value: str, message: str
) -> None:
    environ.setenv("KVMASK_VLLM", "1")
    environ.setenv(name, value)
    _plugin.vllm()
    assert not seams.placed()
    assert [level for level, _ in said] == ["ERROR"]
    assert re.search(message, said[0][1])


def test_plugin_lets_an_unknown_release_go_on(environ: Any, unknown: Any, said: Any) -> None:
    environ.setenv("KVMASK_VLLM", "1")
    unknown(**EVERY)
    _plugin.vllm()
    assert not seams.placed()
    assert "vLLM goes on without kvmask" in said[0][1]
    assert "is gone" in said[0][1]


def test_processes_that_vllm_starts_learn_of_it(environ: Any, said: Any) -> None:
    environ.setenv(switch.RAY_PREFIXES, "MINE_")
    before = dict(os.environ)
    kvmask.vllm.install(lookup="exact")
    told = {n: os.environ[n] for n in (switch.SWITCH, switch.LOOKUP, switch.RAY_PREFIXES)}
    assert told == {"KVMASK_VLLM": "1", "KVMASK_LOOKUP": "exact"} | {
        switch.RAY_PREFIXES: "KVMASK_,MINE_"
    }
    kvmask.vllm.uninstall()
    assert dict(os.environ) == before


def test_what_hides_the_plugin_is_said(environ: Any, said: Any) -> None:
    environ.setenv("VLLM_PLUGINS", "lora,other")
    kvmask.vllm.install()
    kvmask.vllm.install()
    warnings = [text for level, text in said if level == "WARNING"]
    assert len(warnings) == 1
    assert "VLLM_PLUGINS does not list 'kvmask'" in warnings[0]
    said.clear()
    environ.setenv("VLLM_PLUGINS", "kvmask")
    environ.setattr(placing.importlib.metadata, "entry_points", lambda **kwargs: ())
    kvmask.vllm.install()
    assert "its plugin is not installed" in next(t for level, t in said if level == "WARNING")


def run_python(code: str, **environ: str) -> str:
    """What a new Python says."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_plugin_costs_a_process_without_the_connector_nothing() -> None:
    code = """
    import sys
    from kvmask import _plugin
    _plugin.vllm()
    heavy = [m for m in sys.modules if m.partition(".")[0] in ("vllm", "torch")]
    heavy += [m for m in sys.modules if m.startswith("kvmask.vllm")]
    print(heavy)
    import vllm.distributed.kv_transfer.kv_connector.factory as factory
    print("KVMaskStoreConnector" in factory.KVConnectorFactory._registry)
    print([m for m in sys.modules if m.startswith("kvmask.vllm")])
    import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector
    from kvmask.vllm import seams
    print("worker.lookup" in seams.placed(), "engine.block_hasher" in seams.placed())
    import vllm.v1.engine.core
    print("engine.block_hasher" in seams.placed())
    """
    lines = run_python(code, KVMASK_VLLM="1").split("\n")
    assert lines[:4] == ["[]", "True", "[]", "True False"]
    assert lines[4] == "True"


def test_a_process_that_vllm_starts_has_it_too(environ: Any) -> None:
    """As vLLM does it there: its plugins first, then the connector."""
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="kvmask"):
        pytest.skip("kvmask is not installed, so vLLM does not find its plugin")
    code = """
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector
    from kvmask.vllm import lookup, seams
    print("worker.lookup" in seams.placed(), lookup._default["lookup"])
    """
    kvmask.vllm.install(lookup="exact")
    assert run_python(code) == "True exact\n"


def test_plugin_and_connector_together() -> None:
    code = """
    from kvmask import _plugin
    _plugin.vllm()
    import kvmask.vllm
    from kvmask.vllm import seams
    print("worker.lookup" in seams.placed())
    """
    assert run_python(code, KVMASK_VLLM="1") == "True\n"


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


def test_stock_objects_become_kvmasks() -> None:
    """What the connector does to a worker that stock has made."""
    worker = object.__new__(releases.StockWorker)
    worker.token_dbs = [releases.StockDatabase(releases.KeyMetadata("m", 0, 0, 0, 0), 16)]
    worker.coord = object.__new__(releases.StockCoordinator)
    connector.adopt_worker(worker, "exact")
    assert type(worker).lookup is lookup.lookup
    assert binding.state(worker)["strategy"] == "exact"
    assert type(worker.coord) is kvmask.vllm.MooncakeStoreCoordinator
    assert layouts.tables_of(worker.token_dbs[0].store_layout) is not None
    assert isinstance(worker, releases.StockWorker)
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


def test_layouts_of_others_keep_their_own_values() -> None:
    class Theirs(releases.RankLocalLayout):  # type: ignore[misc]
        def prepare_values(self, chunks: Any, block_ids: Any, shard_ids: Any) -> Any:
            return "theirs"

    class Inherits(releases.ShardedLayout):  # type: ignore[misc]
        pass

    metadata = releases.KeyMetadata("m", 0, 0, 0, 0)
    db = kvmask.vllm.ChunkedTokenDatabase(metadata, 16, store_layout=Theirs(metadata, 16, 16))
    assert db.store_layout.prepare_values([(0, 16)], [1], [0]) == "theirs"
    assert layouts.tables_of(db.store_layout) is None
    other = object.__new__(Inherits)
    layouts.adopt_addresses(SimpleNamespace(store_layout=other))
    assert type(other).prepare_values is layouts.sharded_values
    assert isinstance(other, Inherits)


def test_statistics_inside_multi_connector() -> None:
    """vLLM looks the connector up by its name to make its statistics anew."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    made = kvmask.vllm.KVMaskStoreConnector.build_kv_connector_stats()
    made.record_operation("lookup_exists", 0.5, 3)
    found = MultiConnector.build_kv_connector_stats({"KVMaskStoreConnector": made.data})
    assert found.data["KVMaskStoreConnector"].data == made.data
