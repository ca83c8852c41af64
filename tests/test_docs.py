"""README and docs say what the code does and what was measured."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvq import cli
from kvq.geometry import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_measured_table_is_that_of_the_committed_results():
    check = [sys.executable, ROOT / "tools" / "measured_tables.py", "--check"]
    assert subprocess.run(check, check=False).returncode == 0, "run tools/measured_tables.py"


def test_every_command_and_path_that_the_readme_names_exists():
    for name in re.findall(r"^kvq ([\w-]+)", "".join(re.findall(r"```sh\n.*?```", README, re.S)), re.M):
        assert name in cli._COMMANDS
    for path in re.findall(r"\]\(([\w./-]+)\)", README) + re.findall(
        r"`((?:kvq|docs|tools)/[\w./]+)`", README
    ):
        assert (ROOT / path).exists(), path


def test_the_readme_lists_the_families_that_are_checked():
    listed = re.search(r"token for token: ([^.]+)\.", README)[1].replace("\n", " ")
    assert sorted(x.strip() for x in listed.split(",")) == sorted(FAMILIES)


def test_linked_files_in_docs_exist():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([\w./-]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_notebooks_code_is_python_and_its_outputs_are_there():
    notebook = json.loads((ROOT / "examples" / "choose_a_format.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 5
    for cell in code:
        ast.parse("".join(cell["source"]))
    assert sum(bool(cell["outputs"]) for cell in code) >= 4
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("IPython")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "choose_a_format.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert (tmp_path / "kvq.json").is_file()
