"""What adapters share: seams, tables of releases, kinds of managers, waiting for an import.

They need no engine: a module made here stands for one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmask.engines import Feature, Seams, Table, after_import, source_digest
from kvmask.engines.features import log_placed
from kvmask.engines.kinds import Kinds
from kvmask.errors import UnsupportedReleaseError

ENGINE = '''
class Worker:
    def ask(self, n):
        """Ask."""
        # one more
        return n + 1

    @classmethod
    def rule(cls):
        return 1

def helper():
    return 2
'''


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    (tmp_path / "kvmask_toy_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kvmask_toy_engine", raising=False)
    importlib.invalidate_caches()
    yield importlib.import_module("kvmask_toy_engine")
    sys.modules.pop("kvmask_toy_engine", None)


PATHS = {
    "ask": "kvmask_toy_engine:Worker.ask",
    "rule": "kvmask_toy_engine:Worker.rule",
    "helper": "kvmask_toy_engine:helper",
    "gone": "kvmask_toy_engine:Worker.gone",
}


def test_digests_leave_out_what_does_nothing(engine: Any) -> None:
    class Same:
        # fmt: off
        def ask(self, n):
            # Another comment.
            return n + 1
        # fmt: on

    assert source_digest(engine.Worker.ask) == source_digest(Same.ask)
    assert source_digest(engine.helper) not in ("", source_digest(Same.ask))
    assert source_digest(len) == ""


def test_functions_are_placed_all_or_none(engine: Any) -> None:
    seams = Seams(PATHS)
    before = engine.Worker.ask
    seams.place({"ask": lambda self, n: -n, "helper": lambda: 3})
    assert (engine.Worker().ask(2), engine.helper()) == (-2, 3)
    assert seams.placed() == {"ask", "helper"}
    assert seams.stock("ask") is before
    seams.restore()
    assert (engine.Worker().ask(2), engine.helper()) == (3, 2)
    assert not seams.placed()
    with pytest.raises(UnsupportedReleaseError, match=r"Worker.gone is gone"):
        seams.place({"helper": lambda: 3, "gone": lambda: 4})
    engine.helper = lambda: 5
    with pytest.raises(UnsupportedReleaseError, match="replaced by somebody else"):
        seams.place({"ask": lambda self, n: 0, "helper": lambda: 3})
    assert (engine.Worker().ask(2), engine.helper()) == (3, 5)


def test_a_feature_fits_where_its_seams_do(engine: Any, caplog: Any) -> None:
    seams = Seams(PATHS, prefix="kvmask_toy_engine:")
    ask, helper = seams.digest("ask"), seams.digest("helper")
    features = (Feature("lookup", ("ask",), ("helper",)), Feature("masks", ("rule",)))
    table = Table(("1.0", "2.0"), f"ask 0 0|{ask}\nhelper - {helper}\nrule - 0", features)
    placed = table.fit(seams, "toy", "2.1")
    assert placed.release == "2.0"
    assert placed.seams == {"ask"}
    assert list(placed.stock) == ["masks"]
    line = placed.line("toy", "2.1")
    assert line == (
        "kvmask is in place in toy 2.1, whose functions are those of 2.0: lookup. "
        "Stock stays: masks (Worker.rule has changed)"
    )
    with caplog.at_level(logging.INFO):
        log_placed(logging.getLogger("kvmask.test"), placed, "toy", "2.1")
    assert [r.getMessage() for r in caplog.records] == [line]
    nothing = Table(("1.0",), "ask 0\nrule 0", features)
    with pytest.raises(UnsupportedReleaseError, match=r"toy 1.0; .* 9 Worker.ask has"):
        nothing.fit(seams, "toy", "9")


def test_a_kind_is_told_by_the_source_of_its_functions() -> None:
    class Full:
        @classmethod
        def find_longest_cache_hit(cls) -> int:
            return 1

        @classmethod
        def reachable_block_mask(cls) -> None:
            return None

    class Same(Full):
        pass

    class Wraps(Full):
        @classmethod
        def find_longest_cache_hit(cls) -> int:
            return super().find_longest_cache_hit()

    class Changed(Full):
        @classmethod
        def reachable_block_mask(cls) -> None:
            raise NotImplementedError

    search = {source_digest(Full.find_longest_cache_hit): "full"}
    rule = {"full": frozenset({source_digest(Full.reachable_block_mask)})}
    wrap = source_digest(vars(Wraps)["find_longest_cache_hit"])
    kinds = Kinds(search, rule, frozenset({wrap}))
    assert [kinds.kind_of(c) for c in (Full, Same, Wraps, Changed)] == ["full"] * 3 + [None]
    assert Kinds(search, rule).kind_of(Wraps) is None
    need = {"full": {"reachable_block_mask": frozenset({"0"})}}
    assert Kinds(search, rule, more=need).kind_of(Full) is None
    assert kinds.kind_of(SimpleNamespace) is None


@pytest.fixture
def late(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """A module that nobody has imported yet."""
    path = tmp_path / "kvmask_late_module.py"
    path.write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before = list(sys.meta_path)
    yield path
    sys.meta_path[:] = before
    sys.modules.pop("kvmask_late_module", None)


def test_something_follows_an_import(late: Path) -> None:
    before = list(sys.meta_path)
    seen: list[Any] = []
    after_import("kvmask_late_module", lambda: seen.append(sys.modules["kvmask_late_module"].value))
    assert not seen
    module = importlib.import_module("kvmask_late_module")
    assert seen == [1]
    assert sys.meta_path == before
    assert type(module.__loader__).__module__ != "kvmask.engines.after_import"
    after_import("kvmask_late_module", lambda: seen.append(2))
    assert seen == [1, 2]


def test_looking_for_a_module_is_no_import(late: Path) -> None:
    seen: list[int] = []
    after_import("kvmask_late_module", lambda: seen.append(1))
    for _ in range(2):
        spec = importlib.util.find_spec("kvmask_late_module")
        assert spec is not None
        assert spec.loader.get_filename("kvmask_late_module") == str(late)
    assert not seen
    importlib.import_module("kvmask_late_module")
    assert seen == [1]


def test_an_import_that_fails_is_tried_again(late: Path) -> None:
    late.write_text("raise ImportError('not yet')\n")
    seen: list[int] = []
    after_import("kvmask_late_module", lambda: seen.append(1))
    for _ in range(2):
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module("kvmask_late_module")
    late.write_text("value = 'later'\n")
    importlib.invalidate_caches()
    importlib.import_module("kvmask_late_module")
    assert seen == [1]


def test_two_follow_one_import(late: Path) -> None:
    seen: list[int] = []
    before = list(sys.meta_path)
    after_import("kvmask_late_module", lambda: seen.append(1))
    after_import("kvmask_late_module", lambda: seen.append(2))
    importlib.import_module("kvmask_late_module")
    assert sorted(seen) == [1, 2]
    assert sys.meta_path == before


def test_a_module_that_is_not_there_stays_away(late: Path) -> None:
    late.unlink()
    importlib.invalidate_caches()
    after_import("kvmask_late_module", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvmask_late_module")


def test_what_somebody_else_put_on_top_stays(engine: Any) -> None:
    seams = Seams(PATHS, prefix="kvmask_toy_engine:")
    seams.place({"ask": lambda self, n: -n, "helper": lambda: 3})
    engine.helper = other = lambda: 5
    assert seams.restore() == ["helper"]
    assert engine.helper is other
    assert engine.Worker().ask(2) == 3
    assert seams.restore() == []
