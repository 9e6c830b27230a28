"""Shared by all benches: timing of pairs of calls, and one table at the end.

A bench passes kvmask's call and vLLM's to `pair`. They run in turn in one process, so that a busy
machine slows both. CPU time is measured. The ratio is the median of the ratios of all rounds.
pytest-benchmark also keeps its own statistics of kvmask's call.
"""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import vllm_side

BUDGET = 4.0  # seconds of rounds per pair
SAMPLE = 2e-3  # seconds of CPU that one sample of kvmask's call lasts at least
ROUNDS = (5, 31)


@dataclass
class Row:
    """One row of the table. Times are CPU seconds."""

    what: str
    ours: float
    first: float | None = None
    theirs: float | None = None
    ratio: float | None = None
    target: float | None = None
    keys: int | None = None
    max_ns: float | None = None

    @property
    def verdict(self) -> str:
        if self.max_ns is not None and self.keys:
            reached = self.ours / self.keys * 1e9 <= self.max_ns
            return f"{self.max_ns:.0f} ns{'' if reached else ', MISSED'}"
        if self.target is None:
            return ""
        if self.ratio is None:
            return f"{self.target:.0f}x"
        return f"{self.target:.0f}x{'' if self.ratio >= self.target else ', MISSED'}"


ROWS: list[Row] = []


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, including the release of its result."""
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(row: Row, ours: Callable[[], object], theirs: Callable[[], object] | None) -> None:
    """Fill in a row. In each round both sides are timed."""
    once = max(1e-7, min(cpu(ours) for _ in range(3)))
    repeat = max(1, round(SAMPLE / once))
    pairs: list[tuple[float, float, float]] = []
    stop = time.perf_counter() + BUDGET
    while len(pairs) < ROUNDS[0] or (len(pairs) < ROUNDS[1] and time.perf_counter() < stop):
        other = cpu(theirs) if theirs else 0.0
        first = cpu(ours)
        start = time.process_time()
        for _ in range(repeat):
            ours()
        pairs.append((other, (time.process_time() - start) / repeat, first))
    row.ours = statistics.median(mine for _, mine, _ in pairs)
    row.first = statistics.median(first for _, _, first in pairs)
    if theirs:
        row.theirs = statistics.median(other for other, _, _ in pairs)
        row.ratio = statistics.median(other / mine for other, mine, _ in pairs)


@pytest.fixture(scope="session")
def quiet_heap() -> Iterator[None]:
    """Exclude objects that imports created from garbage collection, as a serving engine does."""
    if vllm_side.available():
        vllm_side.engine()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def pair(benchmark: Any, quiet_heap: None) -> Callable[..., None]:
    """Time kvmask's call, and vLLM's if there is one.

    pair(what, ours, theirs=None, target=None, keys=None, max_ns=None): `target` is the ratio to
    reach, `keys` the number of keys of one call, `max_ns` the most CPU time per key.
    """

    def run(
        what: str,
        ours: Callable[[], object],
        theirs: Callable[[], object] | None = None,
        *,
        target: float | None = None,
        keys: int | None = None,
        max_ns: float | None = None,
    ) -> None:
        benchmark.group = what
        benchmark(ours)
        if benchmark.stats is None:  # --benchmark-disable: only the results are checked
            return
        row = Row(what, 0.0, target=target, keys=keys, max_ns=max_ns)
        compare(row, ours, theirs)
        ROWS.append(row)

    return run


def grouped_rows(config: Any) -> list[Row]:
    """Return rows of the benches that time each side in a separate test (parameter `who`)."""
    session = getattr(config, "_benchmarksession", None)
    sides: dict[str, dict[str, float]] = {}
    for bench in session.benchmarks if session else ():
        who = (bench.params or {}).get("who")
        if who and not bench.has_error:
            sides.setdefault(bench.group, {})[who] = bench.stats.median
    rows = []
    for what, times in sides.items():
        if "kvmask" in times:
            row = Row(what, times["kvmask"], theirs=times.get("vllm"))
            if row.theirs:
                row.ratio = row.theirs / row.ours
            if what.startswith("addresses made:"):
                row.target = 4
            rows.append(row)
    return rows


def text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.2f} µs"


def machine() -> str:
    """Describe processor, Python, compiler, vLLM and commit of a run."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    commands = (["git", "describe", "--always", "--dirty"], ["gcc", "-dumpfullversion"])
    found = []
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
            )
            found.append(done.stdout.strip() or "unknown")
        except OSError:
            found.append("unknown")
    return (
        f"{model}; Python {platform.python_version()}; gcc {found[1]}; "
        f"vLLM {vllm_side.version()}; commit {found[0]}"
    )


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    rows = ROWS + grouped_rows(config)
    if not rows:
        return
    lines = [["", "kvmask", "first call", "per key", "vLLM", "ratio", "target"]]
    for row in rows:
        lines.append(
            [
                row.what,
                text(row.ours),
                text(row.first),
                f"{row.ours / row.keys * 1e9:.0f} ns" if row.keys else "",
                text(row.theirs),
                "" if row.ratio is None else f"{row.ratio:.1f}x",
                row.verdict,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    terminalreporter.write_sep("=", "kvmask beside vLLM, CPU time, medians")
    terminalreporter.write_line(machine())
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())
    missed = sum("MISSED" in row.verdict for row in rows)
    aimed = sum(bool(row.verdict) for row in rows)
    terminalreporter.write_line(f"{aimed - missed} of {aimed} targets reached")
