"""What kvmask calls and reads of vLLM, recorded while it works, against the table of its seams."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import test_vllm_differential as differential
import vllm
import vllm_pair as pair
from test_vllm_hashing import make
from vllm.v1.request import Request
from vllm_oracle import engine

import kvmask.vllm
from kvmask import versions
from kvmask.engines.sources import piece_of
from kvmask.vllm import features, layouts, releases, seams

pytestmark = pytest.mark.vllm

HERE = Path(kvmask.vllm.__file__).parent
THERE = Path(vllm.__file__).parent
# The features that a module of the adapter works for. What it touches is in the table of each of
# them; of `EITHER`, in that of one.
MODULES = {
    "connector": ("connector",),
    "coordinator": ("masks",),
    "hashing": ("hasher",),
    "layouts": ("layouts",),
    "loading": ("loading",),
    "local": ("local",),
    "lookup": ("lookup",),
    "policy": ("saving", "loading"),
    "releases": ("masks", "lookup"),
    "rules": ("masks", "lookup"),
    "saving": ("saving",),
    "schemes": ("saving", "loading"),
}
EITHER = {"policy"}
# What is no rule of vLLM's Mooncake connector.
GENERAL = {
    "vllm.envs:__getattr__": "settings of vLLM",
    "vllm.envs:<lambda>": "settings of vLLM",
    "vllm.envs:environment_variables": "settings of vLLM",
    "vllm.logger:": "the log",
    "vllm.distributed.kv_transfer.kv_connector.factory:": "a connector's name",
}
PLACES = {name: path for name, path in seams.PATHS.items() if name not in seams.ALIASES}


class Recorded:
    """What modules of the adapter have touched.

    Attributes:
        calls: (module of kvmask, function of vLLM as ``module:path``).
        reads: (module of kvmask, attribute of an object of vLLM's).
    """

    def __init__(self) -> None:
        self.calls: set[tuple[str, str]] = set()
        self.reads: set[tuple[str, str]] = set()

    def on_call(self, frame: Any, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        module, path = own_module(caller), Path(frame.f_code.co_filename)
        if module and path.is_relative_to(THERE):
            parts = path.relative_to(THERE.parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            self.calls.add((module, f"{name}:{frame.f_code.co_qualname}"))

    def on_read(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while own_module(frame) == "binding":  # it reads for others
            frame = frame.f_back
        module = own_module(frame)
        if module and not name.startswith("__") and "kvmask" not in name:
            self.reads.add((module, name))


def own_module(frame: Any) -> str:
    """The module of the adapter that a frame runs, or nothing."""
    path = Path(frame.f_code.co_filename)
    return path.stem if path.parent == HERE else ""


@contextmanager
def recording() -> Iterator[Recorded]:
    """Records calls of this thread, and reads of vLLM's objects."""
    recorded = Recorded()
    watched = [
        releases.StockWorker,
        releases.StockCoordinator,
        releases.StockSending,
        releases.StockReceiving,
        releases.StockDatabase,
        releases.RankLocalLayout,
        releases.ShardedLayout,
        engine().data.ReqMeta,
        engine().data.LoadSpec,
        releases.ExternalCachedBlockPool,
        releases.BlobBlockHashes,
        engine().coordinator.StoreSpecGroup,
        engine().specs.KVCacheSpec,
        engine().specs.KVCacheGroupSpec,
        Request,
    ]

    def watch(self: Any, name: str) -> Any:
        recorded.on_read(name)
        return object.__getattribute__(self, name)

    before = sys.getprofile()
    try:
        for cls in watched:
            cls.__getattribute__ = watch
        sys.setprofile(recorded.on_call)
        yield recorded
    finally:
        sys.setprofile(before)
        for cls in watched:
            del cls.__getattribute__


def table(feature: str) -> set[str]:
    """The seams of a feature."""
    found = [n for f in features.FEATURES if f.name == feature for n in (*f.replaces, *f.relies)]
    return {seams.ALIASES.get(name, name) for name in found}


def covers_call(names: set[str], function: str) -> bool:
    paths = [PLACES[name] for name in names]
    return any(function == path or function.startswith(path + ".") for path in paths)


def covers_read(names: set[str], attribute: str) -> bool:
    """Whether a seam has this attribute in its source, or is it."""
    word = re.compile(rf"\b{re.escape(attribute)}\b")
    for name in names:
        path, _, only = PLACES[name].partition("#")
        if only == attribute or path.rpartition(".")[2] == attribute:
            return True
        if not only and word.search(text_of(name)):
            return True
    return False


def text_of(name: str, kept: dict[str, str] = {}) -> str:  # noqa: B006
    if name not in kept:
        piece = piece_of(seams.SEAMS._seen(name))
        kept[name] = "" if piece is None else "\n".join(piece.lines)
    return kept[name]


def missing(recorded: Recorded, without: str = "") -> set[tuple[str, str, str]]:
    """(module, feature, what is not in its table)."""
    found = set()
    for covers, touched in ((covers_call, recorded.calls), (covers_read, recorded.reads)):
        for module, what in touched:
            if any(what.startswith(general) for general in GENERAL):
                continue
            told = {f: covers(table(f) - {without}, what) for f in MODULES.get(module, ("?",))}
            if module not in EITHER or not any(told.values()):
                found |= {(module, f, what) for f, ok in told.items() if not ok}
    return found


@pytest.fixture(scope="module")
def work() -> Recorded:
    """Everything that the adapter does, on some random cases."""
    with pytest.MonkeyPatch.context() as patch, recording() as recorded:
        differential.forget_outages(patch)
        for rng, case in differential.cases(77, 40):
            hashes = differential.hashes_of(case, rng.random() < 0.5)
            worker = pair.lookup_worker(
                case, "kvmask", pair.Script(1, pair.present_keys(case)), "staged"
            )
            worker.lookup(case.num_tokens, hashes)
            exists = {(0, h) for h in map(bytes, hashes)}
            differential.told_by(worker.coord, case, hashes, exists, True)
            databases = lambda c=case: pair.databases(c, 2)  # noqa: E731
            differential.save_differences(random.Random(rng.random()), case, databases)
            differential.load_differences(random.Random(rng.random()), case, databases)
        for held in (1, 2):
            rng = random.Random(held)
            case = differential.full_case(rng)
            shared = lambda h=held: pair.shared_databases(4, False, h)  # noqa: E731
            differential.save_differences(rng, case, shared, top=60)
            differential.load_differences(rng, case, shared, top=60)
        db = kvmask.vllm.ChunkedTokenDatabase(kvmask.vllm.KeyMetadata("m", 0, 0, 0, 0), 16)
        layouts.adopt_addresses(db)
        db.store_layout.prepare_values([(0, 16)], [1], [0])
        hash_something()
    return recorded


def hash_something() -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    make(list(range(64)), kvmask.vllm.request_block_hasher(4, sha256), cache_salt="salt")


def test_the_table_has_all_that_is_touched(work: Recorded) -> None:
    assert {m for m, _ in work.calls | work.reads} >= {
        *("lookup", "rules", "coordinator", "saving", "loading", "schemes", "layouts", "hashing"),
    }
    found = sorted(missing(work))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("seam", "module", "what"),
    [
        ("sending.is_live", "saving", "KVCacheStoreSendingThread.is_live_store_job"),
        ("sending.mark_skipped", "saving", "_mark_request_skipped_for_pressure"),
        ("request.all_token_ids", "hashing", "_all_token_ids"),
        ("receiving.report", "loading", "_report_load_error"),
        ("core.extra_keys", "hashing", "generate_block_hash_extra_keys"),
    ],
)
def test_what_the_table_lacks_is_found(work: Recorded, seam: str, module: str, what: str) -> None:
    assert any(m == module and w.endswith(what) for m, _, w in missing(work, without=seam))


def test_the_digests_are_those_of_the_releases() -> None:
    """Where the sources are at hand, as after the suites."""
    root = Path(os.environ.get("KVMASK_VLLM_SOURCES", HERE.parent.parent / "build" / "vllm-src"))
    scripts = HERE.parent.parent / "scripts"
    sys.path.insert(0, str(scripts))
    try:
        import vllm_digests
    finally:
        sys.path.remove(str(scripts))
    trees = vllm_digests.trees_in(root)
    if not trees:
        pytest.skip("no sources of vLLM releases in build/vllm-src")
    found = vllm_digests.digests(trees)
    for version in trees:
        release = versions.release_of(version)
        known = features.TABLE.digests(release)
        now = {name: by_version[version] for name, by_version in found.items()}
        assert {n: d for n, d in now.items() if d} == known, version


def test_the_page_of_releases() -> None:
    """docs/vllm.md has the features of each release as the table has them."""
    page = HERE.parent.parent / "docs" / "vllm.md"
    if not page.is_file():
        pytest.skip("no documents beside the package")
    text = page.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| 0.")]
    head = next(line for line in text.splitlines() if line.startswith("| release | masks"))
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert names == [f.name for f in features.FEATURES if f.name != "connector"]
    told: dict[str, frozenset[str]] = {}
    for line in lines:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for release in first.split(", "):
            told[release] = frozenset(n for n, c in zip(names, cells, strict=True) if c != "-")
            eagle = cells[names.index("lookup")]
            known = releases._KNOWN[release]
            assert eagle == (
                "keys only" if not known.rules else "yes" if known.eagle_peeks else "without EAGLE"
            )
    assert told == {r: offers - {"connector"} for r, offers in features.OFFERS.items()}
