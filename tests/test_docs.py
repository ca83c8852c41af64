"""README and docs say what the code does and what was measured."""

import re
import subprocess
import sys
from pathlib import Path

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
