"""The seams between kvmask and an engine: what is replaced or relied on, and if it is as known.

A seam is a function of the engine, named by module and path. Its digest is taken over its source
without comments, docstring and indentation. An adapter compares digests with what it knows of each
release, and puts its own functions in place of the engine's only where they are equal.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvmask.errors import UnsupportedReleaseError


def plain_function(function: Any) -> Any:
    """The function behind a static method, a class method or a bound method."""
    return getattr(function, "__func__", function)


def source_digest(function: Any) -> str:
    """Digest of a function's or class's source; empty when it has none."""
    try:
        source = textwrap.dedent(inspect.getsource(plain_function(function)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return ""
    drop: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            text = node.body[0]
            drop.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = (line.strip() for i, line in enumerate(source.splitlines(), 1) if i not in drop)
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:10]


class Seams:
    """The seams of one engine. What stands in the engine when this is made counts as its own.

    Args:
        paths: Seam to ``module:path``.
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
        self._placed: dict[str, Any] = {}
        for name in self._paths:
            place = None if name in self._aliases else self._owner(name)
            if place is not None:
                self._stock[name] = vars(place[0])[place[1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def _owner(self, name: str) -> tuple[Any, str] | None:
        """The object that holds a seam and the seam's attribute; None when it is gone."""
        module, _, path = self._paths[name].partition(":")
        *owners, attribute = path.split(".")
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

    def stock(self, name: str) -> Callable[..., Any]:
        """The engine's own function behind a seam, whatever is in its place now."""
        function: Callable[..., Any] = self._stock[name]
        return function

    def digest(self, name: str) -> str:
        """Digest of a seam's source; empty when the seam is gone or has no source."""
        found = self._stock.get(name)
        return "" if found is None else source_digest(found)

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
                self._stock.setdefault(name, self._stock.get(self._aliases.get(name, name)))
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

    def restore(self) -> list[str]:
        """Put the engine's functions back where kvmask's still are.

        Returns:
            The seams, as messages name them, that somebody else has replaced since.
        """
        others = []
        with self._lock:
            for name, function in list(self._placed.items()):
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
