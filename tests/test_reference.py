"""The API reference: it lists every public name, and each docstring says what a caller needs."""

import ast
import dataclasses
import importlib.util
import inspect
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

import kvmask
from kvmask import errors, hashing, keys, mooncake, payload, plans

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "build_docs.py"
if not SCRIPT.exists():
    pytest.skip("the scripts are not beside the tests", allow_module_level=True)

spec = importlib.util.spec_from_file_location("build_docs", SCRIPT)
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

NAMES = [name for listed in build.REFERENCE.values() for name in listed]
# What a summary begins with that says what is done, and not what is returned.
VERBS = {
    *("add", "append", "connect", "drop", "fill", "load", "make", "measure", "pack", "read"),
    *("remember", "round", "run", "save", "take", "tell", "write"),
}
MADE_FOR_ONE = re.compile(r"made by `|Create it with `|as `\w+` yields it", re.I)


def members(owner):
    """(name, function or property) of what users can call of a class, its own bases included."""
    seen = {}
    for cls in owner.__mro__:
        if not cls.__module__.startswith("kvmask"):
            continue
        for name, value in vars(cls).items():
            inner = getattr(value, "__func__", value)
            called = inspect.isroutine(inner) or isinstance(inner, property)
            if called and not name.startswith("_") and name not in seen:
                seen[name] = inner
    return seen.items()


def docstring(item):
    """A docstring without the signature that the compiler writes at its head."""
    return re.sub(r"\A[\w.]+\(.*\)\n+", "", inspect.getdoc(item) or "")


def documented():
    """(shown name, object, docstring) of everything in the reference."""
    for path in NAMES:
        item = build.resolve(path)
        yield path, item, docstring(item)
        if inspect.isclass(item):
            for name, member in members(item):
                yield f"{path}.{name}", member, docstring(member)


EVERYTHING = {shown: (item, text) for shown, item, text in documented()}


def section(text, *titles):
    """The entries of sections such as "Args:", as one text; None when there is none."""
    found = [m[1] for t in titles for m in re.finditer(rf"^{t}:\n((?:[ ]+.*\n?|\n)+)", text, re.M)]
    return "\n".join(found) if found else None


def entries(text, *titles):
    """Names that sections describe, each with its description."""
    body = section(text, *titles)
    if body is None:
        return {}
    body = textwrap.dedent(body)
    rows = re.findall(r"^([\w, *]+?):\s*(.*(?:\n[ ]+.*)*)", body, re.M)
    return {name.strip(" *"): said for names, said in rows for name in names.split(",")}


def parameters(item):
    """Names of what a caller passes; None where nothing tells them."""
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError):
        return None
    return [p.name for p in signature.parameters.values() if p.name not in ("self", "cls")]


def inherited(shown):
    """What the bases of a method's class say of its parameters."""
    path, _, name = shown.rpartition(".")
    bases = build.resolve(path).__mro__[1:] if path in NAMES else ()
    texts = [docstring(vars(base)[name]) for base in bases if name in vars(base)]
    return {k: v for text in reversed(texts) for k, v in entries(text, "Args").items()}


def raised(item):
    """Exceptions that the body of a function raises itself."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    except (OSError, TypeError):
        return set()
    calls = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    names = {c.func.id for c in calls if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
    return {name for name in names if name.endswith("Error") and name != "TypeError"}


def test_every_public_name_is_listed_once():
    listed = [build.resolve(path) for path in NAMES]
    assert len({id(item) for item in listed}) == len(NAMES)
    lacking = []
    for module in (kvmask, keys, hashing, plans, mooncake, payload, errors):
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for name in names:
            item = getattr(module, name)
            own = inspect.isclass(item) or inspect.isroutine(item)
            if own and not any(item is other for other in listed):
                lacking.append(f"{module.__name__}.{name}")
    assert lacking == ["kvmask.payload.check_facts", "kvmask.payload.tensor_facts"]


@pytest.mark.parametrize("shown", EVERYTHING)
def test_a_docstring_says_what_a_caller_needs(shown):
    item, text = EVERYTHING[shown]
    assert text, "it has no docstring"
    summary = text.partition("\n\n")[0]
    assert summary[-1] in ".:", f"it does not begin with a sentence: {summary}"
    if inspect.isclass(item):
        if issubclass(item, Exception):
            return
        said = entries(text, "Args", "Attributes")
        wanted = (
            [f.name for f in dataclasses.fields(item) if not f.name.startswith("_")]
            if dataclasses.is_dataclass(item)
            else parameters(item) or []
        )
        # Nobody else makes these.
        if MADE_FOR_ONE.search(text) or issubclass(item, mooncake.Code):
            wanted = []
        if getattr(item, "_is_protocol", False):
            wanted = []
    elif isinstance(item, property):
        said, wanted = {}, []
    else:
        said, wanted = entries(text, "Args"), parameters(item)
        said = {**inherited(shown), **said}
    assert [name for name in wanted or () if name not in said] == [], "undescribed parameters"
    assert [name for name, words in said.items() if len(words.split()) < 2] == []
    known = entries(text, "Raises")
    function = item.fget if isinstance(item, property) else item
    own = raised(function.__init__ if inspect.isclass(item) else function)
    bases = {name: {b.__name__ for b in getattr(errors, name).__mro__} for name in own}
    assert {name for name in own if not bases[name] & known.keys()} == set(), "unsaid errors"


@pytest.mark.parametrize("shown", EVERYTHING)
def test_a_docstring_says_what_is_returned(shown):
    item, text = EVERYTHING[shown]
    if not inspect.isroutine(item) or "Args:" not in text:
        return
    annotation = getattr(item, "__annotations__", {}).get("return")
    if annotation in ("None", None) or "Returns:" in text or "Yields:" in text:
        return
    summary = text.partition("\n\n")[0].lower()
    assert summary.split()[0] not in VERBS or " return " in summary


@pytest.mark.parametrize("warned", [False, True])
def test_a_warning_is_an_error(tmp_path, warned):
    pytest.importorskip("sphinx")
    (tmp_path / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    body = "Page\n====\n\n.. autoclass:: kvmask.Hit\n" + ("   :nothing:\n" if warned else "")
    (tmp_path / "index.rst").write_text(body)
    command = build.command(tmp_path, tmp_path, tmp_path / "out")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert (done.returncode != 0) == warned, done.stderr


def test_links_of_a_page():
    path = ROOT / "docs" / "page.md"
    text = "[a](b.md#c) [code](../kvmask/_core.pyx) [x](https://e.org/y) [e](../examples/engine.py)"
    assert build.page(text, path) == (
        "[a](b.md#c) code [x](https://e.org/y) [e](../examples/engine.py)"
    )
