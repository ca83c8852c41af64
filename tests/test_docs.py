"""README and docs say what the code does and what was measured."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvq import cli
from kvq.calib.candidates import ALL_CODES, Half, formats_of
from kvq.geometry import FAMILIES
from tests.helpers_models import save_first_layers
from tools.run_notebook import NOTEBOOK, code_cells, run, text_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^kvq ([\w-]+)", re.M)


def test_the_measured_table_is_that_of_the_committed_results():
    check = [sys.executable, ROOT / "tools" / "measured_tables.py", "--check"]
    assert subprocess.run(check, check=False).returncode == 0, "run tools/measured_tables.py"


def test_every_command_and_path_that_the_readme_names_exists():
    for name in COMMAND.findall("".join(re.findall(r"```sh\n.*?```", README, re.S))):
        assert name in cli._COMMANDS
    for path in re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(
        r"`((?:kvq|docs|tools)/[\w./]+)`", README
    ):
        assert (ROOT / path).exists(), path


def test_every_command_has_its_place_on_the_page_of_commands():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    told = {name for block in re.findall(r"```sh\n(.*?)```", page, re.S) for name in COMMAND.findall(block)}
    assert told == set(cli._COMMANDS)


def test_the_page_of_models_lists_the_families_that_are_checked():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    listed = re.search(r"token for token: ([^.]+)\.", page)[1].replace("\n", " ")
    assert sorted(x.strip() for x in listed.split(",")) == sorted(FAMILIES)


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: "/".join(page.parts[-2:]))
def test_linked_files_and_anchors_exist(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def test_every_file_and_name_of_where_is_what_exists():
    """A cell has files, and may have names that the first of them defines."""
    text = (ROOT / "docs" / "where.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`([\w/.]+)`", cell) for cell in re.findall(r"^\| .*\? \| (.*) \|$", text, re.M)]
    assert len(rows) >= 15
    for names in rows:
        paths = [name for name in names if "/" in name or "." in name]
        assert paths
        for path in paths:
            assert (ROOT / path).is_file(), path
        code = (ROOT / paths[0]).read_text(encoding="utf-8")
        for name in set(names) - set(paths):
            pattern = rf"^\s*(?:(?:async )?def|class) {name}\b|^{name}\b"
            assert re.search(pattern, code, re.M), f"{paths[0]}: {name}"


def test_every_folder_of_where_is_what_exists():
    text = (ROOT / "docs" / "where.md").read_text(encoding="utf-8").partition("## Files")[0]
    for cell in re.findall(r"^\| (`.*?) \|", text, re.M):
        for path in re.findall(r"`(.*?)`", cell):
            assert (ROOT / path).exists(), path


def test_the_glossary_defines_each_word_once():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## One word")[0]
    words = re.findall(r"^\| ([^|]+) \| .* \|$", text, re.M)
    assert len(words) > 60
    assert [word for word in words if words.count(word) > 1] == []
    stems = {"seal": "sealed", "staged recipe": "staged", "narrow scale": "narrow"}
    assert not [word for word, other in stems.items() if word in words and other in words]


def read_notebook() -> dict:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_the_notebooks_code_is_python_and_its_outputs_are_there():
    code = code_cells(read_notebook())
    assert len(code) >= 5
    for cell in code:
        ast.parse("".join(cell["source"]))
    assert sum(bool(cell["outputs"]) for cell in code) >= 4
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]


FEWER = {  # what makes the notebook quick -> how often it stands there
    ('MODEL = "tiny"', 'MODEL = "short"'): 1,
    ("TokenPlan(instrument=True)", "TokenPlan(instrument=True, context=96, max_windows=1)"): 1,
    ("max_windows=8", "context=96, max_windows=1"): 1,
    ("context=512, max_windows=4, verify_windows=16", "context=64, max_windows=1, verify_windows=1"): 1,
}


def test_the_notebooks_code_runs_on_a_smaller_model_and_less_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_first_layers(tmp_path / "short", 2)
    text = NOTEBOOK.read_text(encoding="utf-8")
    for (full, less), times in FEWER.items():
        full, less = (json.dumps(one)[1:-1] for one in (full, less))
        assert text.count(full) == times, full
        text = text.replace(full, less)
    shown = run(json.loads(text))
    assert [bool(outputs) for outputs in shown] == [True] * 6
    assert (tmp_path / "kvq.json").is_file()


def test_the_formats_that_the_notebook_shows_are_searched_today():
    """A search that changed since the notebook was run shows in names."""
    *_, recipe, points, _ = (text_of(cell["outputs"]) for cell in code_cells(read_notebook()))
    stored = re.findall(r"[KV] (int\w+)", recipe)
    k, v = (
        {fmt.name for code in ALL_CODES for fmt in formats_of(half, code)}
        for half in (Half(layer=0, part=part, kv_heads=2, head_dim=64) for part in "kv")
    )
    assert len(stored) == 12
    assert set(stored) <= k | v
    uniform = re.search(r"The best uniform format of at most these bytes, (\S+) \(", points)[1]
    assert uniform in {*(code.name for code in ALL_CODES), *(f"{a}/{b}" for a in k for b in v)}


@pytest.mark.long
def test_the_notebook_shows_what_it_shows_when_it_is_run(tmp_path, monkeypatch):
    """On other processors last digits differ, and formats of nearly equal cost may change places."""
    monkeypatch.chdir(tmp_path)
    notebook = read_notebook()
    for cell, outputs in zip(code_cells(notebook), run(notebook), strict=True):
        words, again = (
            re.findall(r"[A-Za-z]\w*|[-+]?\d+\.?\d*", text_of(x)) for x in (cell["outputs"], outputs)
        )
        assert len(words) == len(again), "run tools.run_notebook"
        close = [one == other or is_near(one, other) for one, other in zip(words, again, strict=True)]
        assert sum(close) >= 0.9 * len(close), "run tools.run_notebook"


def is_near(one: str, other: str) -> bool:
    """True for two numbers that differ by at most a tenth, or by two in the last digit."""
    try:
        return float(one) == pytest.approx(float(other), rel=0.1, abs=2 * 10.0 ** -len(one.partition(".")[2]))
    except ValueError:
        return False


def test_the_roads_are_drawn_as_the_tool_draws_them_and_fit_a_phone():
    drawn = (ROOT / "docs" / "roads.svg").read_text(encoding="utf-8")
    code = "from tools.roads_figure import roads_svg; print(roads_svg(), end='')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert drawn == run.stdout, "run python -m tools.draw_figures"
    svg = ElementTree.fromstring(drawn)
    width, height = float(svg.get("width")), float(svg.get("height"))
    sizes = [float(size) for size in re.findall(r"font-size:(\d+)px", drawn)]
    assert min(sizes) * 360 / width > 11, "readable on a phone of 360 points"
    assert "prefers-color-scheme: dark" in drawn
    name = "{http://www.w3.org/2000/svg}"
    edge = max(float(box.get("x")) + float(box.get("width")) for box in svg.iter(f"{name}rect"))
    assert edge < width
    left = min(float(box.get("x")) for box in svg.iter(f"{name}rect"))
    for text in svg.iter(f"{name}text"):
        x, letter = float(text.get("x")), 8.9 if "b" in text.get("class").split() else 7.5
        assert x + letter * len(text.text) < (edge if x >= left else left), text.text
        assert 0 < float(text.get("y")) < height
