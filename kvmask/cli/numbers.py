"""Integers on the command line, with the allowed range in the error message."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from kvmask._core import MAX_TOKENS

Number = Callable[[str], int]


def plain_integer(text: str) -> int | None:
    """The integer that a text is; None when it is none, or of 20 digits or more.

    `int` alone would accept underscores and digits of other scripts. For thousands of digits it
    would raise an error with another message.

    >>> plain_integer(" -7"), plain_integer("1_000")
    (-7, None)
    """
    digits = text.strip()
    if re.fullmatch(r"[+-]?\d+", digits, re.ASCII) and len(digits.lstrip("+-0")) < 20:
        return int(digits)
    return None


def number(low: int, high: int) -> Number:
    """Return a converter for argparse, for integers from `low` to `high`.

    Its error message shows the text as it was written.

    >>> number(1, 9)("8")
    8
    """

    def convert(text: str) -> int:
        value = plain_integer(text)
        if value is not None and low <= value <= high:
            return value
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, got {shown}")

    return convert


positive = number(1, MAX_TOKENS)
natural = number(0, MAX_TOKENS)
