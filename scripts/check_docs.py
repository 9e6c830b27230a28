"""Check README, CONTRIBUTING and docs/: links lead somewhere, commands exist, examples run.

Links to files of the project must exist, `make x` must name a target, `kvmask x` a subcommand, and
every ``>>>`` example in a ```python fence must print what it says.
"""

import doctest
import re
import sys
from pathlib import Path

from kvmask.cli import build_parser

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"(?:^|`)make ([a-z][a-z-]*)", re.MULTILINE)
KVMASK = re.compile(r"(?:^|`)kvmask ([a-z]+)", re.MULTILINE)


def check(path: Path, targets: set[str], commands: set[str]) -> list[str]:
    """Return one line per mistake of a page."""
    text = path.read_text(encoding="utf-8")
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        if not (path.parent / target.partition("#")[0]).exists():
            wrong.append(f"link to {target}, which does not exist")
    wrong += [f"make {t}, which is no target" for t in MAKE.findall(text) if t not in targets]
    wrong += [f"kvmask {c}, which is no command" for c in KVMASK.findall(text) if c not in commands]
    examples = "\n".join(b for lang, b in FENCE.findall(text) if lang == "python" and ">>>" in b)
    if examples:
        test = doctest.DocTestParser().get_doctest(examples, {}, path.name, str(path), 0)
        said: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, out=said.append)
        wrong += said
    return wrong


def main() -> int:
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md"))]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    commands = {name for action in build_parser()._actions for name in (action.choices or ())}
    mistakes = 0
    for page in pages:
        for line in check(page, targets, commands):
            print(f"{page.relative_to(ROOT)}: {line}")
            mistakes += 1
    print(f"{len(pages)} pages, {mistakes} mistakes")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
