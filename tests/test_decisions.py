"""Decisions have ids, which the code cites beside what they explain: docs/decisions/README.md."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
ID = re.compile(r"\bD[1-9]\d*\b")
COMMENT = r"(?:#|//) ?(D\d.*)"  # a comment that begins with ids
ENTRIES = [
    name
    for page in DECISIONS.glob("*.md")
    for name in re.findall(r"^### (D\d+)$", page.read_text("utf-8"), re.M)
]
CODE = [ROOT / "Makefile", ROOT / "setup.py", ROOT / "pyproject.toml"] + [
    path
    for folder in ("kvq", "tests", "benchmarks", "tools", "spec")
    for kind in ("py", "h", "cpp")
    for path in (ROOT / folder).rglob(f"*.{kind}")
]


def cited(paths: list[Path], pattern: str = "(.*)") -> set[str]:
    """The ids in what the first group of `pattern` matches of each line."""
    lines = (line for path in paths for line in path.read_text("utf-8").splitlines())
    return {name for line in lines for text in re.findall(pattern, line) for name in ID.findall(text)}


def test_an_id_occurs_once_and_new_entries_have_one_to_take():
    assert [name for name, times in Counter(ENTRIES).items() if times > 1] == []
    following = re.search(r"takes the next one: \*\*D(\d+)\*\*", (DECISIONS / "README.md").read_text("utf-8"))
    assert int(following[1]) > max(int(name[1:]) for name in ENTRIES)


def test_every_cited_decision_exists():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page != DECISIONS / "README.md"]
    assert cited([*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]) - set(ENTRIES) == set()
    assert cited(CODE, COMMENT) - set(ENTRIES) == set()


def test_every_decision_is_cited_beside_what_it_explains():
    assert sorted(set(ENTRIES) - cited(CODE, COMMENT), key=lambda name: int(name[1:])) == []
