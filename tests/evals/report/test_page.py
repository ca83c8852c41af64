"""Pages are read in the light and in the dark, and load nothing."""

import re

from kvq.evals.report.figure import new_figure, svg_of
from kvq.evals.report.page import page


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
