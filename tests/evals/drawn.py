"""Where the texts of a figure lie, as matplotlib's renderer sees them."""

from itertools import combinations
from typing import Any

from matplotlib.text import Text

from kvq.evals.report.labels import overlap

_DPIS = (160, 72)  # of .png and .svg files; laid out at 100


def check_labels(figure: Any) -> list[str]:
    """Assert that no two texts overlap and none leaves the figure, at every resolution; returns the texts."""
    for dpi in _DPIS:
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        drawn = [(text.get_text(), Text.get_window_extent(text).extents) for text in _texts(figure)]
        width, height = figure.bbox.size
        for name, (left, bottom, right, top) in drawn:
            inside = left >= -1 and bottom >= -1 and right <= width + 1 and top <= height + 1
            assert inside, f"{name!r} leaves the figure at {dpi} dpi"
        for (name, box), (other, other_box) in combinations(drawn, 2):
            assert not overlap(box, other_box), f"{name!r} covers {other!r} at {dpi} dpi"
    return [name for name, _ in drawn]


def _texts(figure: Any) -> list[Any]:
    texts = list(figure.texts)  # the title included
    for legend in figure.legends:
        texts += legend.get_texts()
    for axes in figure.axes:
        if not axes.axison:
            continue
        texts += [*axes.texts, axes.title]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            texts += [axis.label, axis.get_offset_text()]
            texts += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]
