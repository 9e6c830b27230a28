"""The documentation, run: examples, commands, links, names, and tables against what they list."""

import enum
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvmask
from kvmask import errors, mooncake
from kvmask.cli import main
from kvmask.errors import KVMaskError
from kvmask.plans.metrics import COUNTERS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "check_docs.py"
if not SCRIPT.exists():
    pytest.skip("the pages are not beside the tests", allow_module_level=True)

spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs)

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {str(page.relative_to(ROOT)): page for page in docs.pages()}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def table(text, heading):
    """First cells of the table whose head begins with `heading`, backticks taken off."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    assert cells
    return cells


def commands(text):
    """Every command line of the shell fences."""
    for fence in docs.fences(text, "sh"):
        yield from (line for line in fence.splitlines() if line and not line.startswith("#"))


@pytest.mark.parametrize("name", PAGES)
def test_links_commands_and_names(name):
    assert list(docs.mistakes(PAGES[name])) == []


def test_names_in_docstrings_exist():
    """The reference is made from them, and Sphinx does not resolve a name in backticks."""
    sources = Path(kvmask.__file__).parent.rglob("*.py")
    names = {
        name
        for source in sources
        for name in re.findall(r"`(kvmask(?:\.\w+)+)`", source.read_text(encoding="utf-8"))
    }
    assert len(names) > 20
    assert [name for name in sorted(names) if not docs.exists(name)] == []


@pytest.mark.parametrize("name", PAGES)
def test_examples_that_show_their_output(name):
    text = PAGES[name].read_text(encoding="utf-8")
    if "import numpy" in text and ">>> " in text:
        pytest.importorskip("numpy")
    assert docs.run_examples(text, name) == []


def test_the_examples_are_found():
    # A fence written differently would leave a page unchecked.
    for name in ("contract", "semantics", "keys", "lookup", "transfer"):
        name = f"docs/{name}.md"
        fences = docs.fences(read(name), "python")
        assert fences
        assert all(">>> " in fence for fence in fences)
        assert read(name).count("```python") == len(fences)
    wrong = "```python\n>>> 1 + 1\n3\n```\n"
    assert len(docs.run_examples(wrong, "wrong")) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](nowhere.md)", "link to nowhere.md, which does not exist"),
        ("`make nothing`", "make nothing, which is no target"),
        ("```sh\nkvmask nothing --x\n```\n", "kvmask nothing, which is no command"),
        ("`kvmask.Nothing`", "kvmask.Nothing, which does not exist"),
        ("```python\nkvmask.keys.Nothing()\n```\n", "kvmask.keys.Nothing, which does not exist"),
    ],
)
def test_mistakes_are_found(tmp_path, text, said):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n", encoding="utf-8")
    assert list(docs.mistakes(page)) == [said]


def other_pages():
    """Pages whose examples show no output: README, and what is added beside the tested ones."""
    for name, page in PAGES.items():
        fences = docs.fences(page.read_text(encoding="utf-8"), "python")
        if any(">>> " not in fence for fence in fences):
            yield name


@pytest.mark.store
def test_the_library_in_ten_lines(master, capfd):
    np = pytest.importorskip("numpy")
    (example,) = docs.fences(README, "python")
    assert len(example.splitlines()) <= 16
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capfd.readouterr().out.splitlines()
    hit, (full, window) = names["hit"], names["caches"].values()
    assert printed == [
        "saved up to token 256: 12 keys stored (6144 bytes), 0 present, failed: none",
        "6 keys loaded (4608 bytes), 256 tokens usable, failed: none",
    ]
    assert hit.length == 256
    assert [m.indices() for m in hit.masks] == [[0, 1, 2, 3], [14, 15]]
    # What the text below it says: loaded blocks hold the saved bytes.
    assert np.array_equal(full[5:9], full[1:5])
    assert np.array_equal(window[31:33], window[15:17])
    assert not np.array_equal(window[17:31], window[1:15])


def test_python_that_shows_no_output_is_run_somewhere():
    tested = {"README.md"}
    left = set(other_pages()) - tested
    # The adapters' pages have their own tests, which need the engines. The connector's page quotes
    # the examples, which test_examples.py runs.
    assert left <= {"docs/vllm.md", "docs/ascend.md", "docs/connector.md"}


def test_the_pictures_of_explain(capsys):
    (words,) = [c for c in commands(README) if c.startswith("kvmask explain")]
    assert main(shlex.split(words)[1:]) == 0
    assert [capsys.readouterr().out] == docs.fences(README, "text")


def test_the_bench_command_runs(capsys):
    (words,) = [c for c in commands(README) if c.startswith("kvmask bench")]
    assert main(shlex.split(words)[1:]) == 0
    printed = capsys.readouterr().out
    assert printed.count("DeepSeek-V4") == 6
    assert re.search(r"lookup, staged +[\d.]+ +\d+ +[\d.]+\n$", printed)


def test_the_key_command_runs(capsys):
    (words,) = [c for c in commands(README) if c.startswith("kvmask key")]
    assert main(shlex.split(words)[1:]) == 0
    printed = capsys.readouterr().out
    assert "DeepSeek-V4" in printed
    assert "00ff" in printed


@pytest.mark.store
def test_the_doctor_command_runs(master, capsys, monkeypatch):
    monkeypatch.delenv(mooncake.CONFIG_ENV, raising=False)
    (words,) = [c for c in commands(README) if c.startswith("kvmask doctor")]
    assert main(shlex.split(words)[1:]) == 0
    assert "FAIL" not in capsys.readouterr().out


def test_every_command_of_the_readme_is_tested_or_known():
    seen = sorted({" ".join(line.split()[:2]) for line in commands(README)})
    runs = [
        "apt-get update",
        "kvmask bench",
        "kvmask doctor",
        "kvmask explain",
        "kvmask key",
        "make bench",
        "make demo",
        "make test",
        "vllm serve",
    ]
    assert seen == runs


@pytest.mark.skipif(not os.environ.get("KVMASK_DOCS_MAKE"), reason="KVMASK_DOCS_MAKE is not set")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands(target):
    words = ["make", target]
    if target == "test":
        words.append("ARGS=--deselect tests/test_docs.py::test_the_two_commands")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_vllm_line_names_the_connector():
    (line,) = [c for c in commands(README) if c.startswith("vllm serve")]
    config = __import__("json").loads(shlex.split(line)[-1])
    assert config == {
        "kv_connector": "KVMaskStoreConnector",
        "kv_connector_module_path": "kvmask.vllm",
        "kv_role": "kv_both",
    }


def test_command_table():
    assert {row[0].removeprefix("kvmask ") for row in table(README, "command")} == (
        docs.subcommands()
    )


def test_extras_table():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert {row[0] for row in table(README, "extra")} == set(project["optional-dependencies"])
    assert project["dependencies"] == []
    assert project["license"] == "Apache-2.0"


def test_every_package_is_installed():
    setup = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "kvmask").rglob("__init__.py")}
    assert set(setup["packages"]) == {".".join(folder.parts) for folder in folders}


def test_pages_table():
    linked = set(docs.LINK.findall(README))
    assert {name for name in PAGES if name != "README.md"} <= linked


def test_counters_table():
    assert {row[0] for row in table(read("docs/lookup.md"), "counter")} == set(COUNTERS)


def test_options_of_a_transfer_table():
    rows = {row[0] for row in table(read("docs/transfer.md"), "option")}
    known = inspect.signature(kvmask.KVTransfer).parameters.values()
    assert rows == {option.name for option in known if option.kind is option.KEYWORD_ONLY}


def test_codes_table():
    rows = {int(row[0]): row[1] for row in table(read("docs/transfer.md"), "code")}
    assert issubclass(mooncake.Code, enum.IntEnum)
    assert rows == {int(code): code.name for code in mooncake.Code}
    said = {int(row[0]): row[2] for row in table(read("docs/transfer.md"), "code")}
    for code in mooncake.Code:
        assert ("the same call fails again" in said[code]) == mooncake.is_final(code)
        assert ("pressure" in said[code]) == mooncake.is_pressure(code)


def test_errors_table():
    rows = {row[0]: row[1] for row in table(read("docs/transfer.md"), "exception")}
    own = {n: v for n, v in vars(errors).items() if isinstance(v, type)}
    assert set(rows) == set(own) - {"KVMaskError"}
    for name, also in rows.items():
        bases = [b.__name__ for b in own[name].__bases__ if b is not KVMaskError]
        assert bases == [part.strip(" `") for part in also.split(",")]


def test_costs_table():
    from kvmask import CostModel

    rows = {row[0]: row[1] for row in table(read("docs/lookup.md"), "field")}
    assert rows == {
        "call": f"{CostModel().call * 1e3:g} ms",
        "missing": f"{CostModel().missing * 1e6:g} µs",
        "present": f"{CostModel().present * 1e6:g} µs",
        "miss_rate": f"{CostModel().miss_rate:g}",
    }


def test_build_knobs_table():
    knobs = set(re.findall(r'flag\("(KVMASK_\w+)"\)', read("setup.py")))
    rows = {row[0].partition("=")[0] for row in table(read("CONTRIBUTING.md"), "variable")}
    assert rows == knobs


def test_stage_table():
    """The rules of CONTRIBUTING are those that test_public_api checks."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from test_public_api import STAGES
    finally:
        sys.path.pop(0)
    text = read("CONTRIBUTING.md").replace("\n  |", "\n|")
    said = {}
    for row in table(text, "stage"):
        for name in re.findall(r"\w+(?=`|$)", row[1]):
            said[name] = int(row[0])
    assert {n: s for n, s in said.items() if n in STAGES} == {
        n: s for n, s in STAGES.items() if n != "__main__"
    }
