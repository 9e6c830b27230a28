"""What a terminal can show: its width, colours, and the progress of what takes long.

Piped output has a fixed width, no colours and no progress, so that it is the same everywhere.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

#: Characters per picture where the output is no terminal.
PIPED_WIDTH = 64
_LEAST, _MOST = 16, 240
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person looks at a stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def picture_width(beside: int, stream: TextIO | None = None) -> int:
    """Characters for a picture.

    Args:
        beside: Characters of a line that are not of the picture.
        stream: Where it is printed; stdout by default.
    """
    if not is_terminal(sys.stdout if stream is None else stream):
        return PIPED_WIDTH
    columns = shutil.get_terminal_size((PIPED_WIDTH + beside, 24)).columns
    return min(max(columns - beside, _LEAST), _MOST)


class Paint:
    """Colours text for a terminal, and leaves it as it is elsewhere.

    The environment variable ``NO_COLOR``, set to anything but nothing, turns colours off, and so
    does ``TERM=dumb``.

    Args:
        stream: Where the text is printed; stdout by default.
        on: True or False to decide it.

    >>> Paint(on=True)("ab", "red"), Paint(on=False)("ab", "red")
    ('\\x1b[31mab\\x1b[0m', 'ab')
    """

    def __init__(self, stream: TextIO | None = None, on: bool | None = None) -> None:
        if on is None:
            plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
            on = not plain and is_terminal(sys.stdout if stream is None else stream)
        self.on = on

    def __call__(self, text: str, colour: str) -> str:
        """The text in a colour of `_COLOURS`."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.on and text else text


class Progress:
    """One line on a terminal that says how far a long task is; nothing where it is no terminal.

    The line appears once the task has taken `after` seconds, is written at most five times a
    second, and is gone when the task is done. During a step it is written once a second, so that it
    is seen to be alive.

    Args:
        what: What is counted, as "requests".
        stream: Where the line stands; stderr by default, so that results can be piped.
        after: Seconds until the line appears.

    >>> with Progress("requests") as progress:
    ...     progress(1, 10)
    """

    def __init__(self, what: str, stream: TextIO | None = None, after: float = 2.0) -> None:
        self.what = what
        self._stream = sys.stderr if stream is None else stream
        self._on = is_terminal(self._stream)
        self._started = time.monotonic()
        self._next = self._started + after
        self._shown = False
        self._text = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beat: threading.Thread | None = None

    def __call__(self, done: int, total: int | None = None) -> None:
        """Say that `done` of `total` are done."""
        part = f"{done}" if total is None else f"{done} of {total} ({100 * done // max(total, 1)}%)"
        self._show(f"{self.what}: {part}")

    def step(self, name: str) -> None:
        """Say that a step begins, which can take long."""
        if not self._on:
            return
        self._show(f"{self.what}: {name}")
        if self._beat is None:
            self._beat = threading.Thread(target=self._tick, name="kvmask-progress", daemon=True)
            self._beat.start()

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            self._show(None)

    def _show(self, text: str | None) -> None:
        if not self._on:
            return
        with self._lock:
            self._text = self._text if text is None else text
            now = time.monotonic()
            if now < self._next or self._ended.is_set():
                return
            columns = shutil.get_terminal_size((80, 24)).columns
            line = f"{self._text}, {now - self._started:.0f} s"[: columns - 1]
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
            self._next, self._shown = now + 0.2, True

    def say(self, text: str) -> None:
        """Print a line to stdout, above this one."""
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        """Take the line away. More progress shows it again."""
        with self._lock:
            if self._shown:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
                self._shown = False

    def close(self) -> None:
        """Take the line away for good."""
        self._ended.set()
        self.clear()
        if self._beat is not None:
            self._beat.join()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
