"""The seams between kvmask and an engine: what is replaced or relied on, and if it is as known.

A seam is a function, a class or a constant of the engine, named by module and path. Its digest is
taken over its source without comments, docstring and indentation. An adapter compares digests with
what it knows of each release, and puts its own functions in place of the engine's only where they
are equal.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvmask.engines.sources import source_digest
from kvmask.errors import UnsupportedReleaseError

_UNSEEN = object()


class Seams:
    """The seams of one engine. What stands there when a seam is first looked at is the engine's.

    Args:
        paths: Seam to ``module:path``. With ``#word`` behind it, only the lines that name this
            attribute count for the digest, and the seam cannot be replaced.
        aliases: Seams that are another module's name for a seam. Their module is heavy, and is only
            looked at when something is put in place.
        prefix: Left out of the names in messages.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        aliases: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> None:
        self._paths = dict(paths)
        self._aliases = dict(aliases or {})
        self._prefix = prefix
        self._lock = threading.Lock()
        self._stock: dict[str, Any] = {}
        self._digests: dict[str, tuple[Any, str]] = {}
        self._placed: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def _owner(self, name: str) -> tuple[Any, str] | None:
        """The object that holds a seam and the seam's attribute; None when it is gone."""
        module, _, path = self._paths[name].partition(":")
        *owners, attribute = path.partition("#")[0].split(".")
        try:
            holder: Any = importlib.import_module(module)
            for part in owners:
                holder = getattr(holder, part)
        except (ImportError, AttributeError):
            return None
        return (holder, attribute) if attribute in vars(holder) else None

    def shown(self, name: str) -> str:
        """How messages name a seam."""
        return self._paths[name].replace(self._prefix, "").replace(":", ".")

    def _seen(self, name: str) -> Any:
        """The engine's own function, looked up once; None when the seam is gone.

        An alias is looked at only where it is placed.
        """
        found = self._stock.get(name, _UNSEEN)
        if found is _UNSEEN and name not in self._aliases:
            place = self._owner(name)
            found = None if place is None else vars(place[0])[place[1]]
            self._stock[name] = found
        return None if found is _UNSEEN else found

    def stock(self, name: str) -> Callable[..., Any]:
        """The engine's own function behind a seam, whatever is in its place now."""
        function: Callable[..., Any] = self._seen(name)
        return function

    def digest(self, name: str) -> str:
        """Digest of a seam's source; empty when the seam is gone or has no source."""
        found = self._seen(name)
        if found is None:
            return ""
        known = self._digests.get(name)
        if known is None or known[0] is not found:
            known = (found, source_digest(found, self._paths[name].partition("#")[2]))
            self._digests[name] = known
        return known[1]

    def differences(self, known: Mapping[str, str]) -> list[str]:
        """Seams that are not as known, each with what is the matter.

        Args:
            known: Seam to its digest, or to several that will do, joined by ``|``.
        """
        out = []
        for name, expected in known.items():
            found = self.digest(name)
            if found not in expected.split("|"):
                out.append(f"{self.shown(name)} {'has changed' if found else 'is gone'}")
        return out

    def place(self, replacements: Mapping[str, Any]) -> None:
        """Put functions in place of the engine's, all or none.

        Raises:
            UnsupportedReleaseError: Somebody else has replaced one of them already.
        """
        with self._lock:
            for name in replacements:
                where = self._owner(name)
                if where is None:
                    raise UnsupportedReleaseError(f"{self._paths[name]} is gone")
                now = vars(where[0])[where[1]]
                if name in self._aliases:
                    self._stock.setdefault(name, self._seen(self._aliases[name]))
                self._seen(name)
                if now is not self._stock[name] and now is not self._placed.get(name):
                    raise UnsupportedReleaseError(
                        f"{self._paths[name]} was replaced by somebody else"
                    )
            done: list[str] = []
            try:
                for name, function in replacements.items():
                    self._put(name, function)
                    done.append(name)
            except BaseException:
                for name in done:
                    self._put(name, self._placed.get(name, self._stock[name]))
                raise
            self._placed.update(replacements)

    def _put(self, name: str, function: Any) -> None:
        where = self._owner(name)
        if where is not None:
            setattr(where[0], where[1], function)

    def restore(self, names: Iterable[str] | None = None) -> list[str]:
        """Put the engine's functions back where kvmask's still are.

        Args:
            names: The seams; None: all.

        Returns:
            The seams, as messages name them, that somebody else has replaced since.
        """
        others = []
        with self._lock:
            for name in list(self._placed) if names is None else names:
                function = self._placed.get(name)
                if function is None:
                    continue
                where = self._owner(name)
                if where is not None and vars(where[0])[where[1]] is function:
                    self._put(name, self._stock[name])
                elif where is not None:
                    others.append(self.shown(name))
                del self._placed[name]
        return others

    def placed(self) -> frozenset[str]:
        """The seams where kvmask's functions are."""
        return frozenset(self._placed)

    def report(self) -> str:
        """One line per seam with its digest, as the tables of known releases hold them."""
        return "\n".join(f"{name} {self.digest(name) or '-'}" for name in self._paths)
