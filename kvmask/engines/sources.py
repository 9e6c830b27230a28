"""The source of functions and classes, and a digest of it that comments do not change.

The digest is taken over the lines without comments, docstrings and indentation. It is the same
whether a function is imported, or read from the sources of a release with `Tree`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def plain_function(function: Any) -> Any:
    """The function behind a static method, a class method, a bound method or a property."""
    function = getattr(function, "fget", None) or function
    return inspect.unwrap(getattr(function, "__func__", function))


@dataclass(frozen=True, slots=True)
class Piece:
    """A function or class of a file.

    Attributes:
        node: Its syntax.
        file: All lines of the file.
    """

    node: ast.FunctionDef | ast.ClassDef
    file: list[str]

    @property
    def first(self) -> int:
        """Its first line, decorators included, counted from 1."""
        return min([self.node.lineno, *(d.lineno for d in self.node.decorator_list)])

    @property
    def lines(self) -> list[str]:
        """Its lines."""
        return self.file[self.first - 1 : self.node.end_lineno]

    def digest(self, word: str = "") -> str:
        """Digest of it, or of its lines that name an attribute; empty when none does."""
        if word:
            named = re.compile(rf"\b{re.escape(word)}\b")
            lines = [line.strip() for line in self.lines if named.search(line)]
            found = [line for line in lines if not line.startswith("#")]
            return _digest_of(found) if found else ""
        drop: set[int] = set()
        for node in ast.walk(self.node):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, False):
                text = node.body[0]
                drop.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        numbered = enumerate(self.lines, self.first)
        lines = [line.strip() for number, line in numbered if number not in drop]
        return _digest_of(line for line in lines if line and not line.startswith("#"))


def _digest_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:10]


@functools.cache
def _pieces(path: str) -> dict[int | str, Piece]:
    """A file's functions by their first line, its classes by their full name.

    `inspect.getsource` would read the file once for each of them.
    """
    text = Path(path).read_text()
    lines = text.splitlines()
    found: dict[int | str, Piece] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = Piece(node, lines)
                add(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                piece = Piece(node, lines)
                found[piece.first] = piece
            elif isinstance(node, (ast.If, ast.Try)):
                add([*node.body, *node.orelse, *getattr(node, "finalbody", ())], prefix)

    add(ast.parse(text).body, "")
    return found


def piece_of(function: Any) -> Piece | None:
    """Where a function, method, property or class is written; None when nobody knows."""
    function = plain_function(function)
    try:
        if isinstance(function, type):
            return _pieces(inspect.getfile(function))[function.__qualname__]
        return _pieces(function.__code__.co_filename)[function.__code__.co_firstlineno]
    except (KeyError, AttributeError, OSError, TypeError, SyntaxError, UnicodeDecodeError):
        pass
    try:
        source = textwrap.dedent(inspect.getsource(function))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return None
    return Piece(node, source.splitlines())


def source_digest(function: Any, word: str = "") -> str:
    """Digest of a function's or class's source, or of a constant; empty when it has none.

    Args:
        function: The function, the class or the number, text or bytes.
        word: Only the lines that name this attribute count.
    """
    if isinstance(function, (int, str, bytes)):
        return _digest_of([repr(function)])
    piece = piece_of(function)
    return "" if piece is None else piece.digest(word)


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
                found = ast.parse(text), text.splitlines()
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
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return _digest_of([repr(ast.literal_eval(node.value))])
        return Piece(node, found[1]).digest(word)


def _defines(node: Any, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)
