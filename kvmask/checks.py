"""Checks of arguments that several modules share. The core checks integers itself."""

from __future__ import annotations

import math
from typing import Any

from kvmask._core import shown
from kvmask.errors import ArgumentError


def check_number(value: Any, name: str) -> None:
    """Refuse what is no real number: text, None, a bool.

    Args:
        value: The argument.
        name: Its name in the message.

    Raises:
        TypeError: It is no number.

    >>> check_number(0.5, "share")
    """
    if type(value) is float or type(value) is int:
        return
    from numbers import Real  # what NumPy's numbers are too; rarely needed, so imported here

    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")


def check_function(value: Any, name: str) -> None:
    """Refuse what cannot be called.

    Args:
        value: The argument.
        name: Its name in the message.

    Raises:
        TypeError: It cannot be called.

    >>> check_function(len, "clock")
    """
    if not callable(value):
        raise TypeError(f"`{name}` must be a function, got {type(value).__name__}")


def check_timeout(timeout: Any) -> None:
    """Refuse what is no time to wait.

    Args:
        timeout: Seconds.

    Raises:
        ArgumentError: It is no number above 0, or there is no end to it.

    >>> check_timeout(0.5)
    """
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < math.inf:
        raise ArgumentError(f"`timeout` must be a number of seconds above 0, got {shown(timeout)}")
