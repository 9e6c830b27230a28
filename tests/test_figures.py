"""The pictures of the documentation are what scripts/figures.py draws, and pages show them."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

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
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
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
