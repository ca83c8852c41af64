"""The code's figures get no worse, and the ratchet that holds them does fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import code_figures
from tools.code_figures import LIMITS, ROOT, circles, count, ratchet

SMALL = "def f(a, b):\n    return a\n"
WORSE = {
    "modules above 400 lines": "x = 1\n" * 401,
    "functions above 60 lines": "def f():\n" + "    x = 1\n" * 60,
    "functions with more than 6 parameters": "def f(a, b, c, d, e, f, g): ...\n",
    "functions with more than 10 parameters": "def f(a, b, c, d, e, f, g, *, h, i, j, k): ...\n",
    "signatures with untyped **options": "def f(**options): ...\n",
    "state and caches of modules": "SEEN = {}\n",
    "public classes": "class Wide: ...\n",
    "public classes called alike in one folder": "class Wide: ...\nclass _Within:\n    class Wide: ...\n",
    "headless docstrings": 'def f():\n    """What it was given."""\n',
    "names with words that the field does not use": "def asked(): ...\n",
    "lines of a function, median": "def f():\n" + "    x = 1\n" * 9,
    "lines of a function, 95th percentile": "def f():\n" + "    x = 1\n" * 9,
    "Python files in the largest folder": "x = 1\n",
}


def test_no_figure_of_the_package_got_worse():
    told = ratchet(count(ROOT / "kvq"), LIMITS)

    assert not told, f"worse than {LIMITS.relative_to(ROOT)} lets through:\n" + "\n".join(told)


@pytest.fixture
def made(tmp_path) -> tuple[Path, Path]:
    """A package of one small module, and the limits that it reaches."""
    package, limits = tmp_path / "kvq", tmp_path / "limits.json"
    package.mkdir()
    (package / "small.py").write_text(SMALL)
    limits.write_text('{"lines": {"budget": 9999}}')
    assert ratchet(count(package), limits) == []
    return package, limits


@pytest.mark.parametrize("gauge", WORSE)
def test_a_worse_gauge_fails_with_its_name_both_values_and_the_file(made, gauge):
    package, limits = made
    before = limits.read_text()
    value = json.loads(before)[gauge]["value"]
    (package / "added.py").write_text(WORSE[gauge])

    told = ratchet(count(package), limits)

    line = next(line for line in told if line.startswith(gauge))
    assert line.startswith(f"{gauge}: {value} -> ")
    if "lines of a function" not in gauge:  # which is everywhere
        assert ("kvq: 2" if "largest" in gauge else "kvq/added.py") in line
    assert "small.py" not in line
    assert limits.read_text() == before


@pytest.mark.parametrize(
    ("first", "second", "circle"),
    [
        ("from kvq.two import x\n", "def f():\n    import kvq.one\n", ["kvq: one", "kvq: two"]),
        ("from kvq.folder import x\n", "from kvq.one import x\n", ["kvq: folder", "kvq: one"]),
        ("from kvq import two\n", "import kvq.other\n", []),
    ],
    ids=["modules", "folders", "none"],
)
def test_circles_of_imports_are_told_by_all_their_members(made, first, second, circle):
    package, limits = made
    (package / "folder").mkdir()
    (package / "__init__.py").write_text("")
    (package / "folder" / "__init__.py").write_text("")
    (package / "one.py").write_text(first)
    (package / ("folder/inner.py" if "folder" in first else "two.py")).write_text(second)

    figures = count(package)

    assert circles(figures.imports) == circle
    assert any("circles" in line for line in ratchet(figures, limits)) == bool(circle)


@pytest.mark.parametrize(
    ("text", "is_headless"),
    [
        ("What it is.", True),
        ("The same as f.", True),
        ("of it", True),
        ("Return what it is.", False),
        ("The sum.", False),
    ],
)
def test_a_docstring_is_headless_by_its_first_words(made, text, is_headless):
    package, _ = made
    (package / "small.py").write_text(f'"""{text}"""\n')

    assert len(count(package).headless) == is_headless


def test_a_folder_that_gets_too_many_files_is_named(made):
    package, limits = made
    (package / "wide").mkdir()
    for number in range(16):
        (package / "wide" / f"m{number}.py").write_text("")

    told = ratchet(count(package), limits)

    assert "folders with more than 15 Python files: 0 -> 1\n  kvq/wide: 0 -> 1\n  kvq/wide: 16" in told


def test_lines_beyond_the_budget_fail_and_lines_of_other_languages_do_not(made):
    package, limits = made
    limits.write_text(json.dumps({**json.loads(limits.read_text()), "lines": {"budget": 3}}))
    (package / "kernel.cpp").write_text("//\n" * 50)
    assert ratchet(count(package), limits) == []

    (package / "small.py").write_text(SMALL + "\n\n")

    (told,) = ratchet(count(package), limits)
    assert told.startswith("lines: 4 of Python, the budget is 3: replace before you add")


def test_a_better_figure_is_the_limit_from_then_on_and_the_budget_stays(made):
    package, limits = made
    (package / "small.py").write_text("def f(): ...\n")
    assert ratchet(count(package), limits) == []
    assert json.loads(limits.read_text())["lines of a function, median"] == {"value": 1}
    assert json.loads(limits.read_text())["lines"] == {"budget": 9999}

    (package / "small.py").write_text(SMALL)

    assert ratchet(count(package), limits)[0].startswith("lines of a function, median: 1 -> 2")


def test_places_that_move_are_no_worse(made):
    package, limits = made
    (package / "one.py").write_text("def f(**options): ...\n")
    limits.write_text('{"lines": {"budget": 9999}}')
    ratchet(count(package), limits)
    (package / "one.py").rename(package / "two.py")

    assert ratchet(count(package), limits) == []
    assert json.loads(limits.read_text())["signatures with untyped **options"]["places"] == {"kvq/two.py": 1}


def test_limits_that_cannot_be_written_do_not_fail(made, monkeypatch, capsys):
    package, limits = made
    before = limits.read_text()
    (package / "small.py").write_text("def f(): ...\n")

    def refuse(*_given, **_named):
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)

    assert ratchet(count(package), limits) == []
    assert limits.read_text() == before
    assert "can't be written" in capsys.readouterr().err


def test_update_ends_with_what_is_worse(made):
    package, _ = made
    for number in range(800):  # more than the real package has
        (package / f"m{number}.py").write_text("class Wide: ...\n")
    before = LIMITS.read_text()

    update = [sys.executable, code_figures.__file__, package, "--update"]
    done = subprocess.run(update, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "public classes: " in done.stderr
    assert LIMITS.read_text() == before
