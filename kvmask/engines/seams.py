"""The seams between kvmask and an engine: what is replaced or relied on, and if it is as known.

A seam is a function, a class or a constant of the engine, named by module and path. Its digest is
taken over its source without comments, docstring and indentation. An adapter compares digests with
what it knows of each release, and puts its own functions in place of the engine's only where they
are equal.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmask.errors import UnsupportedReleaseError


def plain_function(function: Any) -> Any:
    """The function behind a static method, a class method, a bound method or a property."""
    function = getattr(function, "fget", None) or function
    return inspect.unwrap(getattr(function, "__func__", function))


@functools.cache
def _texts(path: str) -> dict[int | str, str]:
    """Sources of a file's functions by their first line, of its classes by their full name.

    `inspect.getsource` would read the file once for each of them.
    """
    text = Path(path).read_text()
    lines = text.splitlines(keepends=True)
    found: dict[int | str, str] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source = "".join(lines[first - 1 : node.end_lineno])
                if isinstance(node, ast.ClassDef):
                    found[prefix + node.name] = source
                    add(node.body, f"{prefix}{node.name}.")
                else:
                    found[first] = source
            elif isinstance(node, (ast.If, ast.Try)):
                add([*node.body, *node.orelse, *getattr(node, "finalbody", ())], prefix)

    add(ast.parse(text).body, "")
    return found


def _source(function: Any) -> str:
    """The source of a function or class; raises OSError or TypeError when it has none."""
    try:
        if isinstance(function, type):
            return _texts(inspect.getfile(function))[function.__qualname__]
        return _texts(function.__code__.co_filename)[function.__code__.co_firstlineno]
    except (KeyError, AttributeError, OSError, SyntaxError, UnicodeDecodeError):
        return inspect.getsource(function)


def text_digest(source: str) -> str:
    """Digest of the source text of a function or class, however far it is indented."""
    source = textwrap.dedent(source)
    drop: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            text = node.body[0]
            drop.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = (line.strip() for i, line in enumerate(source.splitlines(), 1) if i not in drop)
    return _digest_of(line for line in lines if line and not line.startswith("#"))


def word_digest(source: str, word: str) -> str:
    """Digest of the lines that name an attribute; empty when none does."""
    named = re.compile(rf"\b{re.escape(word)}\b")
    lines = [line.strip() for line in source.splitlines()]
    found = [line for line in lines if named.search(line) and not line.startswith("#")]
    return _digest_of(found) if found else ""


def _digest_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:10]


def source_digest(function: Any, word: str = "") -> str:
    """Digest of a function's or class's source, or of a constant; empty when it has none.

    Args:
        function: The function, the class or the number, text or bytes.
        word: Only the lines that name this attribute count.
    """
    if isinstance(function, (int, str, bytes)):
        return _digest_of([repr(function)])
    try:
        source = _source(plain_function(function))
        return word_digest(source, word) if word else text_digest(source)
    except (OSError, TypeError, SyntaxError):
        return ""


class Tree:
    """The sources of one release, read without importing them.

    Args:
        root: The folder that the packages lie in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, tuple[ast.Module, list[str]] | None] = {}

    def _module(self, name: str) -> tuple[ast.Module, list[str]] | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            found = None
            if path.is_file():
                text = path.read_text()
                found = ast.parse(text), text.splitlines(keepends=True)
            self._modules[name] = found
        return self._modules[name]

    def digest(self, seam: str) -> str:
        """Digest of ``module:path`` or ``module:path#word``; empty when it is not there."""
        module, _, path = seam.partition(":")
        path, _, word = path.partition("#")
        found = self._module(module)
        if found is None:
            return ""
        node: Any = found[0]
        for part in path.split("."):
            # Of several definitions the last one stands.
            node = next((n for n in reversed(node.body) if _defines(n, part)), None)
            if node is None:
                return ""
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            return _digest_of([repr(ast.literal_eval(node.value or ast.Constant(None)))])
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        text = "".join(found[1][first - 1 : node.end_lineno])
        return word_digest(text, word) if word else text_digest(text)


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


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
