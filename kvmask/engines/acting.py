"""Switch: whether kvmask acts in this process, or the engine's own functions do.

Two things put the engine's own functions back while it runs: a file that says so, which is read
again every few seconds, and an internal error of kvmask, which does it for good. Both are said in
the log once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERVAL = 2.0
# What the file may say. An empty file, or none, leaves kvmask on.
WORDS = {"": True, "kvmask": True, "stock": False}
_MOST_BYTES = 4096


class Switch:
    """Whether kvmask acts. One per process and engine.

    Args:
        engine: How the log calls the engine's own functions.
        log: Where changes are said.

    Attributes:
        on: kvmask acts. Read it as often as you like: it is a plain attribute.
        failed: An internal error has turned it off, and it stays off.
    """

    def __init__(self, engine: str, log: logging.Logger) -> None:
        self.on = True
        self.failed = False
        self._engine = engine
        self._log = log
        self._lock = threading.Lock()
        self._paths: set[Path] = set()
        self._strange: set[str] = set()

    def watch(self, path: str | Path) -> None:
        """Obey a file from now on: it is read at once, then every `INTERVAL` seconds.

        The word ``stock`` turns kvmask off, ``kvmask`` turns it on. With several files it is on
        when none of them says ``stock``.
        """
        file = Path(path)
        with self._lock:
            if file in self._paths:
                return
            self._paths.add(file)
            first = len(self._paths) == 1
        try:
            self.look()
            if first:
                threading.Thread(target=self._watch, name="kvmask-switch", daemon=True).start()
        except BaseException:  # such as no thread: nobody reads the file again
            with self._lock:
                self._paths.discard(file)
            raise

    def look(self) -> None:
        """Read the files now."""
        wanted = all(self._says(file) for file in sorted(self._paths))
        with self._lock:
            if self.failed or wanted == self.on:
                return
            self.on = wanted
        self._log.warning(
            "kvmask is %s: %s",
            "on again" if wanted else f"off, {self._engine} acts",
            ", ".join(map(str, sorted(self._paths))),
        )

    def trip(self, where: str, error: BaseException) -> None:
        """Turn kvmask off for good, because of an internal error.

        Args:
            where: The function that failed.
            error: What it raised.
        """
        with self._lock:
            if self.failed:
                return
            self.failed = True
            self.on = False
        self._log.error(
            "kvmask failed in %s. From now on %s acts in this process. Please report this: %s: %s",
            where,
            self._engine,
            type(error).__name__,
            str(error)[:500],
            exc_info=error,
        )

    def reset(self) -> None:
        """Forget files and failures. For tests."""
        with self._lock:
            self._paths.clear()
            self._strange.clear()
            self.on, self.failed = True, False

    def guard(
        self,
        own: Callable[..., Any],
        stock: Callable[[], Callable[..., Any]],
        where: str,
        refusals: tuple[type[Exception], ...] = (),
    ) -> Callable[..., Any]:
        """A function that calls ``own`` while kvmask is on, and else the engine's.

        When ``own`` raises and the engine's function does not for the same arguments, that is an
        internal error. So ``own`` must have no effect that a second call would repeat.

        Args:
            own: kvmask's function.
            stock: Gives the engine's function.
            where: How the log names it.
            refusals: What ``own`` raises for arguments that it refuses although the engine's
                function may take them.
        """

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return stock()(*args, **kwargs)
            try:
                return own(*args, **kwargs)
            except refusals:
                raise
            except Exception as error:
                try:
                    result = stock()(*args, **kwargs)
                except Exception:
                    raise error from None  # the arguments were wrong
                self.trip(where, error)
                return result

        # It is the function in every respect: who compares or unwraps functions finds this one.
        del call.__dict__["__wrapped__"]
        call.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        return call

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            if not self._paths:
                return
            try:
                self.look()
            except Exception as error:  # the thread must go on
                self._log.warning("the switch of kvmask cannot be read: %r", error)

    def _says(self, file: Path) -> bool:
        """What a file says; what it said cannot be known when it is unreadable: then on."""
        try:
            with file.open("rb") as source:
                text = source.read(_MOST_BYTES).decode("utf-8", "replace").strip().lower()
        except FileNotFoundError:
            return True
        except OSError as error:
            self._once(f"{file}: {error}", "kvmask's switch cannot be read, it stays as it is: %s")
            return self.on or self.failed
        if text not in WORDS:
            self._once(
                f"{file} says {text[:40]!r}",
                "kvmask's switch must say `kvmask` or `stock`, it stays as it is: %s",
            )
            return self.on or self.failed
        return WORDS[text]

    def _once(self, what: str, message: str) -> None:
        if what not in self._strange:
            self._strange.add(what)
            self._log.warning(message, what)
