"""Whatever a public name is given: it returns, or raises what it promises, in a bounded message.

The values are nested too deeply to be written out, of thousands of digits, or hostile. The names
and the check are those of the fuzzer (tests/fuzz/public_names.py).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

import public_names

TARGETS = public_names.targets()


@pytest.mark.parametrize("name", TARGETS)
def test_impossible_arguments(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert public_names.sweep(TARGETS[name]) == []


def test_the_fuzzer_runs_what_it_keeps() -> None:
    """Its corpus, and some inputs of its own."""
    inputs = [path.read_bytes() for path in public_names.CORPUS.glob("*")]
    assert len(inputs) > 20
    inputs += [bytes([i, j, 77 * i % 256, 31 * j % 256] * 9) for i in range(12) for j in range(9)]
    before = public_names.counts.copy()
    for data in inputs:
        public_names.run(data)
    assert public_names.counts["returned"] > before["returned"] + 100
    assert public_names.counts["ArgumentError"] > before["ArgumentError"] + 5


def test_an_integer_without_a_limit_can_be_written_out() -> None:
    from kvmask._core import check_integer
    from kvmask.errors import ArgumentError

    assert check_integer((1 << 256) - 1, "n") == (1 << 256) - 1
    with pytest.raises(ArgumentError, match=r"`n` must be below 2\*\*256, got an integer of 257"):
        check_integer(1 << 256, "n")
    assert check_integer(1 << 300, "n", 0, 1 << 300) == 1 << 300


def test_a_number_is_no_file() -> None:
    """It would be read, and closed, as a file that is open already."""
    from kvmask import Contract

    with pytest.raises(TypeError, match="not int"):
        Contract.read(1)  # type: ignore[arg-type]
