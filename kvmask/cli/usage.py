"""Wrong usage: errors of the command line itself, in the words of its options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from kvmask.errors import ArgumentError


class UsageError(ArgumentError):
    """An option is missing or wrong, or does not fit what it stands beside: exit status 2."""


def in_words_of_options(text: str, names: Mapping[str, str]) -> str:
    """A message with the names of options for those of arguments.

    >>> in_words_of_options("`alignment` must not be 3", {"alignment": "--alignment"})
    '`--alignment` must not be 3'
    """
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    pattern = f"`({'|'.join(map(re.escape, longest_first))})`"
    return re.sub(pattern, lambda found: f"`{names[found[1]]}`", text)


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Make an error about one of these arguments an error of the option that gave it.

    Errors that name none of them pass: they are about what a file holds.

    Args:
        names: Argument of the library to option. An argument that an option such as ``--set`` names
            itself maps to its own name.
    """
    try:
        yield
    except UsageError:
        raise
    except ArgumentError as error:
        if any(f"`{name}`" in str(error) for name in names):
            raise UsageError(in_words_of_options(str(error), names)) from None
        raise
