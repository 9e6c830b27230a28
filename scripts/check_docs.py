"""Check README, CONTRIBUTING and docs/: links, commands and names exist, and examples run.

- Files that links point to must exist.
- `make x` must name a target, and `kvmask x` a subcommand.
- `kvmask.x` must be a name that can be imported.
- Every ``>>>`` example in a ```python fence must print the output that the page shows. All examples
  of a page run in one namespace.
"""

import doctest
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvmask.cli import build_parser

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"^make ([a-z][a-z0-9-]*)", re.MULTILINE)
KVMASK = re.compile(r"^kvmask ([a-z]+)", re.MULTILINE)
NAME = re.compile(r"\bkvmask(?:\.[A-Za-z_]\w*)+")


def pages() -> list[Path]:
    """Return the pages: README and the others of its folder, then docs/."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]


def fences(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks of one language."""
    return [body for lang, body in FENCE.findall(text) if lang == language]


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {
        name
        for line in re.findall(r"^([a-z][a-z0-9 -]*):", makefile, re.MULTILINE)
        for name in line.split()
    }


def subcommands() -> set[str]:
    """Return the subcommands of `kvmask`."""
    return {name for action in build_parser()._actions for name in (action.choices or ())}


def exists(dotted: str) -> bool:
    """True when a dotted name is a module, or an attribute of one."""
    for room, engine in (("kvmask.vllm", "vllm"), ("kvmask.ascend", "vllm_ascend")):
        if dotted.startswith(room) and importlib.util.find_spec(engine) is None:
            return True
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def run_examples(text: str, name: str) -> list[str]:
    """Return the failures of the ``>>>`` examples of a page."""
    examples = "\n".join(b for b in fences(text, "python") if ">>>" in b)
    if not examples:
        return []
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(examples, {}, name, name, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return said


def mistakes(path: Path) -> Iterator[str]:
    """Yield one line per mistake of a page. Does not run the examples."""
    text = path.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    shell = "\n".join(fences(text, "sh"))
    code = "\n".join([shell, *INLINE.findall(prose)])
    for target in LINK.findall(prose):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        if not (path.parent / target.partition("#")[0]).exists():
            yield f"link to {target}, which does not exist"
    yield from (f"make {t}, which is no target" for t in MAKE.findall(code) if t not in TARGETS)
    yield from (f"kvmask {c}, which is no command" for c in KVMASK.findall(code) if c not in KNOWN)
    named = "\n".join([*INLINE.findall(prose), *fences(text, "python")])
    for name in sorted(set(NAME.findall(named))):
        if not exists(name):
            yield f"{name}, which does not exist"


TARGETS = make_targets()
KNOWN = subcommands()


def check(path: Path) -> list[str]:
    """Return one line per mistake or failed example of a page."""
    return [*mistakes(path), *run_examples(path.read_text(encoding="utf-8"), path.name)]


def main() -> int:
    found = 0
    for page in pages():
        for line in check(page):
            print(f"{page.relative_to(ROOT)}: {line}")
            found += 1
    print(f"{len(pages())} pages, {found} mistakes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
