"""The pictures of the documentation are what scripts/figures.py draws, and pages show them."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

import kvmask

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "figures.py"
FOLDER = ROOT / "docs" / "figures"
if not SCRIPT.exists() or not FOLDER.exists():
    pytest.skip("the pictures are not beside the tests", allow_module_level=True)

PICTURES = sorted(path.name for path in FOLDER.glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The pictures, drawn again."""
    folder = tmp_path_factory.mktemp("figures")
    # The kvmask that is tested, which is not always the one beside the script.
    paths = str(Path(kvmask.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_all_pictures_are_drawn(drawn):
    assert sorted(drawn) == PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_checked_in_is_what_is_drawn(drawn, name):
    checked_in = (FOLDER / name).read_text(encoding="utf-8")
    assert drawn[name] == checked_in, "`make figures` draws it again"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read_on_any_page(name):
    root = ET.fromstring((FOLDER / name).read_text(encoding="utf-8"))
    style = root.find(f"{SVG}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    colour = re.compile(r"^\s*\.(\w+) \{ fill: (#\w{6}); \}", re.MULTILINE)
    # Its own background, so that it is right when page and browser disagree about dark.
    assert dict(colour.findall(light))["page"] != dict(colour.findall(dark))["page"]
    assert root.find(f"{SVG}rect").get("class") == "page"
    assert root.find(f"{SVG}title").text
    known = {name for name, _ in colour.findall(light)} | {"head", "edge", "grid", "curve", "none"}
    for element in root.iter():
        assert set((element.get("class") or "").split()) <= known


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_leaves_the_picture(name):
    root = ET.fromstring((FOLDER / name).read_text(encoding="utf-8"))
    width, height = int(root.get("width")), int(root.get("height"))
    for element in root.iter(f"{SVG}rect"):
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= x + float(element.get("width")) <= width
        assert 0 <= y <= y + float(element.get("height")) <= height
    for element in root.iter(f"{SVG}polyline"):
        for point in element.get("points").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    for element in root.iter(f"{SVG}text"):
        x, letters = float(element.get("x")), 6.2 * len(element.text)
        share = {None: 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
        assert x - share * letters >= -4
        assert x + (1 - share) * letters <= width + 4


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_the_picture(name):
    shown = re.compile(rf"!\[[^\]]+\]\((?:docs/)?figures/{re.escape(name)}\)")
    assert any(shown.search(page.read_text(encoding="utf-8")) for page in PAGES)


def rounded(number):
    """A number as README prints it: with two significant digits, halves up."""
    step = Decimal(1).scaleb(number.adjusted() - 1)
    value = number.quantize(step, ROUND_HALF_UP)
    return f"{value:,f}" if step < 1 else f"{int(value):,}"


def test_the_first_table_of_readme_is_that_of_the_replay():
    """Each row has the keys, the mean and the p99 of two rows of docs/benchmarks.md."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    runs = re.findall(r"`(\w+)`: [^\n]*\n\n```text\n(.*?)```", text, re.DOTALL)
    rows = []
    for _, table in runs:
        sides = {
            line.split()[0]: line.split() for line in table.splitlines()[1:] if " / " not in line
        }
        pair = []
        for column, unit in ((5, ""), (1, " ms"), (3, " ms")):
            stock, ours = Decimal(sides["vLLM"][column]), Decimal(sides["hinted"][column])
            pair.append(f"{rounded(stock)} → {rounded(ours)}{unit} ({rounded(stock / ours)}x)")
        rows.append(pair)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- replay: begin -->\n(.*?)<!-- replay: end -->", readme, re.DOTALL)
    said = [line.strip("| ").split(" | ")[1:] for line in found[1].splitlines()[2:]]
    assert len(said) == 5
    assert [row for row in said if row not in rows] == []


# Row of README's second table to its row in docs/benchmarks.md.
ROWS = {
    "lookup, DeepSeek-V4 shape, `exact` (9,728 keys)": "lookup exact, dsv4, {}: 9728 keys",
    "lookup, DeepSeek-V4 shape, `staged` with hints (533 keys)": (
        "lookup hinted, dsv4, {}: 533 keys"
    ),
    "lookup, Gemma shape, `exact`": "lookup exact, gemma, {}: 32768 keys",
    "lookup, Gemma shape, `staged` with hints": "lookup hinted, gemma, {}: 8428 keys",
    "lookup, full attention with blocks of 16, `exact`": "lookup exact, full16, {}: 8192 keys",
    "lookup, full attention, `staged` with hints": "lookup hinted, full16, {}: 8191 keys",
    "save plan (masks, blocks, keys), DeepSeek-V4 shape": "save plan, dsv4, 131,072 tokens",
    "addresses and sizes, 61 regions, 2,048 blocks": "addresses made: 61 regions, 2048 blocks",
    "block hashes, `sha256`, blocks of 16": "hash_tokens sha256, blocks of 16, 131,072 tokens",
    "`store_mask` of 1,048,576 tokens": "store_mask, dsv4, 1,048,576 tokens",
}
ALL = "131,072 tokens, all present"


def cells(line):
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def short(time):
    """A time as README prints it."""
    number, unit = time.split()
    return f"{rounded(Decimal(number))} {unit}"


def test_the_second_table_of_readme_is_that_of_the_benches():
    bench = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    measured = {cells(line)[0]: cells(line) for line in bench.splitlines() if line[:1] == "|"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- measured: begin -->(.*?)<!-- measured: end -->", readme, re.DOTALL)
    said = [cells(line) for line in found[1].splitlines() if line[:1] == "|"][2:]
    assert [row[0] for row in said] == list(ROWS)
    microseconds = {"µs": 1, "ms": 1000}
    for what, vllm, cold, warm in said:
        _, ours, first, _, theirs, ratio, *_ = measured[ROWS[what].format(ALL)]
        assert vllm == short(theirs)
        assert warm == f"{short(ours)} ({rounded(Decimal(ratio.rstrip('x')))}x)"
        if first:
            a, b = (
                Decimal(time.split()[0]) * microseconds[time.split()[1]] for time in (theirs, first)
            )
            assert cold == f"{short(first)} ({rounded(a / b)}x)"
        else:
            assert cold == ""
