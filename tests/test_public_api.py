"""What users see: names, docstrings, stubs, types, what an import costs, and who imports whom."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvmask
from kvmask import _core, errors

PACKAGE = Path(kvmask.__file__).parent
ROOT = PACKAGE.parent
HERE = Path(__file__).parent

# The names that the design fixes; what else is public must be written about.
FIXED = {
    "AbsenceMemo",
    "Bitset",
    "BlockFailure",
    "BlockHasher",
    "BlockHashes",
    "BoundContract",
    "CacheRequest",
    "Call",
    "ChunkedLocal",
    "Contract",
    "Coordinator",
    "CostModel",
    "FullAttention",
    "Hashing",
    "Hit",
    "HitHints",
    "KVLayout",
    "KVTransfer",
    "LoadPlan",
    "LoadResult",
    "LookupPlan",
    "Mamba",
    "PayloadFacts",
    "PlanTools",
    "PresenceMemo",
    "RankGrid",
    "SavePlan",
    "SaveResult",
    "SlidingWindow",
    "Store",
    "StorePolicy",
    "StrictKeys",
    "VllmKeys",
    "drive",
    "hash_tokens",
    "mooncake",
}
OPTIONAL = ("torch", "numpy", "mooncake", "vllm", "vllm_ascend", "xxhash", "prometheus_client")

# One direction: a module imports from its own stage and those below, and never in a circle.
STAGES = {
    "errors": 0,
    "exits": 0,
    "switch": 0,
    "versions": 0,
    "_core": 1,
    "checks": 1,
    "groups": 1,
    "arrays": 1,
    "coordinator": 2,
    "hashing": 2,
    "keys": 2,
    "layout": 2,
    "payload": 2,
    "ranks": 2,
    "regions": 2,
    "plans": 3,
    "request": 3,
    "contract": 3,
    "guard": 4,
    "mooncake": 4,
    "renewer": 4,
    "transfer": 4,
    "why": 4,
    "cli": 5,
    "__main__": 5,
}
# The rooms that import an engine.
ENGINES = {"vllm": "vllm", "ascend": "vllm_ascend"}
LAST_STAGE = 6  # those and what they share, and modules that the table does not know yet


def sources():
    """(dotted name below kvmask, path) of every module; the package's own is ""."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(sources())


def nodes(tree):
    """Every node of a module but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes(node)


def imported(name):
    """Every module that a module of kvmask imports anywhere in its text."""
    found = set()
    for node in nodes(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"kvmask.{name} must import by absolute names"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts
            # A package whose modules alone are wanted is loaded before any of them.
            if not parts <= {f"kvmask.{module}" for module in MODULES}:
                found.add(node.module)
    return found


def own_imports(name):
    """The modules of kvmask among them. `_core` imports `errors` when it is loaded."""
    names = {"kvmask." + m for m in [*MODULES, "_core"] if m}
    return {m.removeprefix("kvmask.") for m in imported(name) & names}


def stage(name):
    """A room's stage; modules of a room share it."""
    return STAGES.get(name.partition(".")[0], LAST_STAGE)


def test_public_names():
    names = kvmask.__all__
    assert len(set(names)) == len(names)
    assert set(names) >= FIXED
    assert {n for n in names if not hasattr(kvmask, n)} == set()


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the pages are not beside the package")
def test_what_is_public_is_written_about():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in pages)
    words = set(re.findall(r"\w+", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))))
    assert set(kvmask.__all__) - words == set()


def test_import_needs_no_optional_package():
    program = f"""if True:
        import sys
        for name in {OPTIONAL!r}:
            sys.modules[name] = None  # importing it raises
        import kvmask
        kvmask.Coordinator([kvmask.FullAttention(16)], 16).load_mask(64)
        for name in {OPTIONAL!r}:
            del sys.modules[name]
        print([n for n in sys.modules if n.partition(".")[0] in {OPTIONAL!r}])
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# Modules of Python that take long to import, and that `import kvmask` can do without.
HEAVY = {
    "asyncio", "concurrent.futures", "ctypes", "email", "http", "importlib.metadata", "json",
    "multiprocessing", "pickle", "queue", "random", "secrets", "socket", "ssl", "subprocess",
    "tempfile", "unittest", "urllib.request", "uuid",
}  # fmt: skip


def test_import_leaves_out_what_is_heavy():
    program = f"""if True:
        import sys
        before = set(sys.modules)
        import kvmask
        print(sorted({HEAVY!r} & (set(sys.modules) - before)))
    """
    # -I -S: neither the environment nor a package's .pth file imports anything first.
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n{program}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", [n for n in MODULES if n])
def test_imports_go_one_way(name):
    above = {m for m in own_imports(name) if stage(m) > stage(name)}
    assert above == set()


def test_no_module_imports_itself_in_a_circle():
    graph = {name: own_imports(name) - {name} for name in MODULES if not name.startswith("vllm")}
    graph["_core"] = {"errors"}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"modules that import each other are among {sorted(graph)}"
        for name in free:
            del graph[name]


def test_engine_and_store_are_imported_in_one_place_each():
    users = {"vllm": set(), "vllm_ascend": set(), "mooncake": set()}
    for name in MODULES:
        for module in imported(name):
            top = module.partition(".")[0]
            if top in users:
                users[top].add(name.partition(".")[0])
    assert users["vllm"] <= {"vllm", "ascend"}
    assert users["vllm_ascend"] <= {"ascend"}
    # kvmask.mooncake itself imports it by name, when a store is connected.
    assert users["mooncake"] == set()


def importable():
    for module in pkgutil.walk_packages([str(PACKAGE)], "kvmask."):
        engine = ENGINES.get(module.name.split(".")[1])
        if engine is not None and importlib.util.find_spec(engine) is None:
            continue
        if module.name != "kvmask.__main__":
            yield module.name


@pytest.mark.parametrize("name", sorted({*importable(), "kvmask"}))
def test_doctests(name):
    if name in ("kvmask.layout",):
        pytest.importorskip("numpy")
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_the_doctests_of_the_core_are_found():
    # Cython keeps them in `__test__`, where a change of directive could lose them.
    assert doctest.testmod(_core).attempted > 10


def members(cls):
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if inspect.isroutine(value) or isinstance(value, property):
            yield name, value


def test_public_docstrings():
    silent = []
    for name in kvmask.__all__:
        value = getattr(kvmask, name)
        if not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value):
            silent += [
                f"{name}.{member}" for member, item in members(value) if not inspect.getdoc(item)
            ]
    for name in errors.__dict__:
        if not name.startswith("_") and not inspect.getdoc(getattr(errors, name)):
            silent.append(f"errors.{name}")
    for name, value in vars(kvmask.mooncake).items():
        if inspect.isfunction(value) and value.__module__.startswith("kvmask.") and name[0] != "_":
            assert inspect.getdoc(value), name
    assert silent == []


def test_the_stub_states_what_the_core_has(tmp_path):
    stubtest = pytest.importorskip("mypy.stubtest")
    config = tmp_path / "mypy.ini"
    # Only the stub is judged here; `make lint` checks the rest.
    config.write_text("[mypy]\nignore_errors = true\nignore_missing_imports = true\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", stubtest.__name__, "kvmask._core", "--concise"),
            *("--mypy-config-file", str(config), "--ignore-unused-allowlist"),
            *("--allowlist", str(HERE / "stubtest_allowlist.txt")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "mark", "said"),
    [
        ("reveals.py", r"# R: (.+)$", r'note: Revealed type is "(.+)"$'),
        ("wrong.py", r"# E: ([a-z-]+)$", r"error: .*\[([a-z-]+)\]$"),
    ],
)
def test_types(page, mark, said):
    """Each marked line is answered as marked, and nothing else is said."""
    api = pytest.importorskip("mypy.api")
    path = HERE / "typing" / page
    wanted = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.search(mark, line):
            wanted[number] = found[1]
    assert len(wanted) > 10
    flags = ["--strict", "--no-error-summary", "--config-file=", "--cache-dir=/dev/null"]
    # mypy finds the package, and its py.typed, from the folder that holds it.
    out, wrong, _ = api.run([*flags, "--python-executable", sys.executable, str(path)])
    assert wrong == ""
    got = {}
    for line in out.splitlines():
        where, _, text = line.partition(" ")
        name, number, _ = where.split(":")
        assert Path(name).name == page, line
        if found := re.search(said, text):
            got[int(number)] = found[1]
        else:
            assert ": note: " in f":{text}" or text.startswith("note: "), line
    assert got == wanted


@pytest.mark.parametrize("page", ["reveals.py", "wrong.py"])
def test_types_by_the_other_checker(page):
    """pyright refuses the same lines as mypy, and takes all others."""
    pytest.importorskip("pyright")
    path = HERE / "typing" / page
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    try:
        done = subprocess.run(
            [*command, str(path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=HERE,
        )
        report = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        pytest.skip("pyright fetches its program with npm, and got none")
    lines = path.read_text(encoding="utf-8").splitlines()
    wanted = {i for i, line in enumerate(lines, 1) if re.search(r"# E: [a-z-]+$", line)}
    found = {
        item["range"]["start"]["line"] + 1
        for item in report["generalDiagnostics"]
        if item["severity"] == "error"
    }
    assert report["summary"]["filesAnalyzed"] == 1
    assert found == wanted
