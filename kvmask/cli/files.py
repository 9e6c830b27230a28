"""What a command says of a file that it cannot read or write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvmask._core import shown
from kvmask.errors import ArgumentError


def why(error: Exception) -> str:
    """What is wrong, without the number of the error and the name of the file."""
    return str(getattr(error, "strerror", None) or error)


def unusable(name: str, rule: str, path: str | os.PathLike[str], error: Exception) -> ArgumentError:
    """The error of an option that names a file.

    Args:
        name: The option.
        rule: What follows "must".
        path: The file.
        error: What opening or reading it raised.

    >>> print(unusable("--svg", "name a file", "a.svg", FileNotFoundError(2, "No such file")))
    `--svg` must name a file, got 'a.svg': No such file
    """
    return ArgumentError(f"`{name}` must {rule}, got {shown(os.fspath(path))}: {why(error)}")


def read_input(name: str, rule: str, path: str) -> str:
    """The text of a file, or of standard input for "-".

    Args:
        name: The option that names it.
        rule: What follows "must" in an error.
        path: The file.

    Raises:
        ArgumentError: It cannot be read, or is no UTF-8.
    """
    if path == "-" and sys.stdin is None:
        raise ArgumentError(f"`{name}` must be readable, got - and a closed standard input")
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(name, rule, path, error) from None
