"""Labels that neither cover each other nor leave the figure: placed once its layout is known."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import Any

from kvq.printable import printable

Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels

_REACHES = (5, 8, 12, 18, 26, 36, 48, 62, 80, 105, 135, 170, 210, 260)  # points between marker and label
_DIRECTIONS = (0, 1, -1, 8, 7, -7, 4, -4, 2, -2, 6, -6, 3, -3, 5, -5)  # sixteenths of a turn: right first
_LED = 9  # a label further away than these points gets a line to its marker
_CROSSING = 30  # points of further way that are better than to lie on a drawn line
_STRANGE = 15  # points of further way that are better than to lie next to another's marker
_APART = 1.5  # times as far as its own marker: what is further than that is not taken for it
_AIR = 1.5  # points around every label
_ROUNDS = 12  # each halves the labels of an axis at most


def label_point(axes: Any, text: str, at: tuple[float, float], **style: Any) -> None:
    """Label a point given in data coordinates; `settle` finds the place.

    A label for which there is no room left in the axes is not drawn.
    """
    line = {"arrowstyle": "-", "lw": 0.5, "color": style.get("color", "#7d8590"), "shrinkA": 1, "shrinkB": 3}
    label = axes.annotate(
        text, at, (0, 0), textcoords="offset points", ha="center", va="center", arrowprops=line, **style
    )
    label.set_in_layout(False)


def draw_literally(figure: Any) -> None:
    """Have all texts drawn letter by letter: of a name with `$` matplotlib would make mathematics, or fail.

    Figures at the ticks of logarithmic axes, which are mathematics, are let be.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    axes = [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]
    for axis in axes:
        if isinstance(axis.get_major_formatter(), FuncFormatter):  # names given for ticks
            ticks = axis.get_majorticklocs()
            names = axis.get_major_formatter().format_ticks(ticks)
            if any(_literal(name) != name for name in names):
                axis.set_ticks(ticks, list(map(_literal, names)))
    ticks = {
        label
        for axis in axes
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    for text in figure.findobj(Text):
        if text not in ticks:
            text.set_text(_literal(text.get_text()))


def _literal(text: str) -> str:
    return printable(text).replace("$", r"\$")


def settle(figure: Any) -> None:
    """Fix the layout and place all labels; to be called when everything is drawn, before saving.

    Names below an axis are turned upright where they would touch, then thinned out as figures are; an axis
    grows until texts behind its bars fit.
    """
    changed, rounds = True, _ROUNDS
    while changed and rounds:
        figure.draw_without_rendering()
        grown = [_make_room(axes) for axes in figure.axes]
        spread = [_spread(axis) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
        changed = any(grown + spread)
        rounds -= 1
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        _place_all(axes, figure.dpi / 72)


def shown_ticks(axis: Any) -> list[Any]:
    """Ticks in view that have a label, from one end to the other."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    named = [tick for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
    return sorted(named, key=lambda tick: tick.get_loc())


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes have a point in common."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _make_room(axes: Any) -> bool:
    """Lengthen the x axis if a text in it passes its right end. Whether it was so."""
    start, end = axes.get_xlim()
    left, _, right, _ = axes.get_window_extent().extents
    needed = end
    for text in _texts(axes):
        x, width = text.get_position()[0], text.get_window_extent().width
        if text.get_ha() == "left" and width < right - left:
            needed = max(needed, start + (x - start) * (right - left) / (right - left - width))
    if needed > end:
        axes.set_xlim(start, needed * 1.01)
    return bool(needed > end)


def _spread(axis: Any) -> bool:
    """Turn or thin out an axis' labels if two of them touch. Whether they did."""
    from matplotlib.ticker import FixedLocator

    ticks = shown_ticks(axis)
    boxes = [_box(tick.label1, 1) for tick in ticks]
    if not any(overlap(a, b) for a, b in pairwise(boxes)):
        return False
    if (
        axis.axis_name == "x"
        and isinstance(axis.get_major_locator(), FixedLocator)
        and not ticks[0].label1.get_rotation()
    ):
        axis.set_tick_params(labelrotation=90)
    else:
        kept = ticks[::2]
        axis.set_ticks([tick.get_loc() for tick in kept], [tick.label1.get_text() for tick in kept])
    return True


def _place_all(axes: Any, scale: float) -> None:
    """Place the labels of points in some axes. `scale`: pixels per point."""
    from matplotlib.text import Annotation

    markers = list(_markers(axes, scale))
    taken = [*markers, *(_box(text, 0) for text in _texts(axes))]
    if legend := axes.get_legend():
        taken.append(legend.get_window_extent().extents)
    lines = [
        line.get_transform().transform_path(line.get_path())
        for line in axes.lines
        if line.get_linestyle() != "None" and len(line.get_xdata()) > 1
    ]
    inside = axes.get_window_extent().extents
    labels: list[Any] = [text for text in axes.texts if isinstance(text, Annotation)]
    for label in labels:
        x, y = axes.transData.transform(label.xy)
        others = [box for box in markers if not (box[0] < x < box[2] and box[1] < y < box[3])]
        found = _best(label, taken, others, lines, inside, scale)
        label.set_visible(found is not None)
        if found is not None:
            (right, up), needs_line, box = found
            _move(label, right / scale, up / scale, (box[2] - box[0]) / scale / 2 - _AIR)
            label.arrow_patch.set_visible(needs_line)
            taken.append(box)


def _move(label: Any, right: float, up: float, half: float) -> None:
    """Put a label's middle there, in points, held by the end next to its point.

    Widths don't grow evenly with the resolution: a long text held in the middle could reach the marker.
    """
    side = 0 if abs(right) < 1 else 1 if right > 0 else -1
    label.set_horizontalalignment({0: "center", 1: "left", -1: "right"}[side])
    label.set_position((right - side * half, up))


def _best(
    label: Any, taken: list[Box], others: list[Box], lines: list[Any], inside: Box, scale: float
) -> tuple[tuple[float, float], bool, Box] | None:
    """The nearest free place of a label: its middle beside the point, whether it needs a line, its box.

    `others`: the markers that it does not belong to.
    """
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    size = Text.get_window_extent(label)  # an annotation's own box holds its line as well
    width, height = size.width + 2 * _AIR * scale, size.height + 2 * _AIR * scale
    x, y = label.axes.transData.transform(label.xy)
    best, least = None, float("inf")
    for reach, (right, up) in _offsets(width, height, scale):
        if reach >= least:
            break
        box = (x + right - width / 2, y + up - height / 2, x + right + width / 2, y + up + height / 2)
        if not _within(box, inside) or any(overlap(box, other) for other in taken):
            continue
        area = Bbox.from_extents(*box)
        own = _APART * _gap(box, (x, y, x, y))
        is_strange = any(_gap(box, other) < own for other in others)
        crosses = any(path.intersects_bbox(area, filled=False) for path in lines)
        cost = reach + _CROSSING * crosses + _STRANGE * is_strange
        if cost < least:
            best, least = ((right, up), is_strange or reach > _LED, box), cost
    return best


def _offsets(width: float, height: float, scale: float) -> Iterator[tuple[float, tuple[float, float]]]:
    """Distances in points, nearest first, and where a label's middle then is from its point, in pixels."""
    for reach in _REACHES:
        for turn in _DIRECTIONS:
            angle = turn * pi / 8
            right = (width / 2 + reach * scale) * cos(angle)
            yield reach, (right, (height / 2 + reach * scale) * sin(angle))


def _markers(axes: Any, scale: float) -> Iterable[Box]:
    """The boxes of all points that have a marker."""
    from matplotlib.collections import PathCollection

    for line in axes.lines:
        if line.get_marker() not in ("None", "", None):
            for point in line.get_transform().transform(line.get_xydata()):
                yield _around(point, (line.get_markersize() / 2 + 1) * scale)
    for points in axes.collections:
        if isinstance(points, PathCollection):
            for point in points.get_offset_transform().transform(points.get_offsets()):
                yield _around(point, 4 * scale)


def _texts(axes: Any) -> list[Any]:
    """Texts with a place of their own, labels of points left out."""
    from matplotlib.text import Annotation

    return [text for text in axes.texts if not isinstance(text, Annotation)]


def _around(point: Any, half: float) -> Box:
    return (point[0] - half, point[1] - half, point[0] + half, point[1] + half)


def _box(text: Any, air: float) -> Box:
    left, bottom, right, top = text.get_window_extent().extents
    return (left - air, bottom - air, right + air, top + air)


def _gap(a: Box, b: Box) -> float:
    """How far two boxes are apart."""
    return hypot(max(a[0] - b[2], b[0] - a[2], 0.0), max(a[1] - b[3], b[1] - a[3], 0.0))


def _within(box: Box, outer: Box) -> bool:
    return box[0] >= outer[0] and box[1] >= outer[1] and box[2] <= outer[2] and box[3] <= outer[3]
