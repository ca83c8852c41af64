"""Pages are read in the light and in the dark, and load nothing."""

import json
import re
from pathlib import Path

import pytest

from kvq.evals.report import page as module
from kvq.evals.report.figure import new_figure, svg_of
from kvq.evals.report.page import columns_of, page

TABLES = json.loads(Path(module.__file__).with_name("columns.json").read_text(encoding="utf-8"))


def test_pages_follow_the_readers_light_or_dark():
    html = page("t", ["<p>x</p>"])
    light, dark = html.split("@media (prefers-color-scheme: dark)")
    named = set(re.findall(r"(--\w+):", light))
    assert named <= set(re.findall(r"(--\w+):", dark))
    used = set(re.findall(r"var\((--\w+)\)", html))
    assert used <= named
    assert "background: var(--back)" in html


def test_a_plot_has_no_background_and_draws_frames_in_the_pages_colour():
    figure = new_figure(6.4, 4.8)
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label="x")
    axes.legend(frameon=False)
    svg = svg_of(figure)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert not re.search(r"#000000|#ffffff", svg)


@pytest.mark.parametrize("name", TABLES)
def test_every_column_formats_some_value(name):
    columns = columns_of(name)

    assert list(columns) == list(TABLES[name])
    for head, style in columns.values():
        assert isinstance(head, str)
        values = [7, 0.5, "text", (0.25, 0.75), ["a", "b"]]
        assert any(_formats(style, value) for value in values), (head, style)
        assert style == "" or callable(style) or not _formats(style, "text")  # a name that no style has


def _formats(style, value):
    try:
        return isinstance(style(value) if callable(style) else format(value, style), str)
    except (TypeError, ValueError, KeyError):
        return False
