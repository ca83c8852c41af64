"""Placement of labels inside the figure and without overlaps, after the layout is fixed."""

from collections.abc import Iterator
from itertools import pairwise, product
from math import cos, pi, sin
from typing import Any

import numpy as np
import numpy.typing as npt

from kvq.printable import printable

Boxes = npt.NDArray[np.float64]  # [4] or [boxes, 4]: left, bottom, right, top, in pixels

_REACHES = (5, 8, 12, 18, 26, 36, 48, 62, 80, 105, 135, 170, 210, 260)  # label distances, points
_DIRECTIONS = (0, 1, -1, 8, 7, -7, 4, -4, 2, -2, 6, -6, 3, -3, 5, -5)  # sixteenths of a turn: right first
_LED = 9  # points; labels farther away get a line to their marker
_CROSSING = 30  # extra distance, in points, that is preferable to crossing a drawn line
_STRANGE = 15  # extra distance, in points, that is preferable to a place next to another marker
_APART = 1.5  # multiple of the distance to its marker at which other markers aren't mistaken for it
_AIR = 1.5  # margin around every label, in points
_ROUNDS = 12  # each round removes at most half of an axis's labels
_GREY = "#7d8590"
_OUTWARDS = np.array([-1, -1, 1, 1])  # directions in which a box grows


def label_point(
    axes: Any, text: str, at: tuple[float, float], fontsize: float = 10, color: str | None = None
) -> None:
    """Label a point in data coordinates; `settle` chooses the label's position.

    A label that does not fit in the axes is not drawn.
    """
    label = axes.annotate(
        *(text, at, (0, 0)),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=fontsize,
        color=color,
        arrowprops={"arrowstyle": "-", "lw": 0.5, "color": color or _GREY, "shrinkA": 1, "shrinkB": 3},
    )
    label.set_in_layout(False)


def draw_literally(figure: Any) -> None:  # D367: `$` just before saving, not by parse_math
    """Escape all texts, because matplotlib would parse names with `$` as math, or fail.

    Tick labels of logarithmic axes are math, so they are not changed.
    """
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    axes = _all_axes(figure)
    for axis in axes:
        if isinstance(axis.get_major_formatter(), FuncFormatter):  # tick labels are names
            ticks = axis.get_majorticklocs()
            names = axis.get_major_formatter().format_ticks(ticks)
            if any(_literal(name) != name for name in names):
                axis.set_ticks(ticks, list(map(_literal, names)))
    ticks = [tick for axis in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
    known = {label for tick in ticks for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if text not in known:
            text.set_text(_literal(text.get_text()))


def _all_axes(figure: Any) -> list[Any]:
    return [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]


def _literal(text: str) -> str:
    return printable(text).replace("$", r"\$")


def settle(figure: Any) -> None:  # D366: labels last, because matplotlib settles the layout last
    """Fix the layout and place all labels; call this function after everything is drawn, before saving.

    Names below an axis are rotated if they would touch, then thinned out in the same way as numbers. An axis
    is lengthened until the texts to the right of its bars fit.
    """
    changed, rounds = True, _ROUNDS
    while changed and rounds:
        figure.draw_without_rendering()
        changed = any([*map(_make_room, figure.axes), *map(_spread, _all_axes(figure))])
        rounds -= 1
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        _place_all(axes, figure.dpi / 72)


def overlap(box: Boxes, others: Boxes) -> npt.NDArray[np.bool_]:
    """Return a mask of the boxes in `others` that overlap `box`."""
    touching: npt.NDArray[np.bool_] = np.all(
        (box[:2] < others[..., 2:]) & (others[..., :2] < box[2:]), axis=-1
    )
    return touching


def _make_room(axes: Any) -> bool:
    """Lengthen the x axis if a text extends beyond its right end; return True if the axis was lengthened."""
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
    """Rotate or thin out the labels of an axis if any two touch; return True if any two did."""
    from matplotlib.ticker import FixedLocator

    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    ticks = [tick for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
    ticks.sort(key=lambda tick: tick.get_loc())
    boxes = [_box(tick.label1) + _OUTWARDS for tick in ticks]
    if not any(overlap(a, b) for a, b in pairwise(boxes)):
        return False
    is_named = axis.axis_name == "x" and isinstance(axis.get_major_locator(), FixedLocator)
    if is_named and not ticks[0].label1.get_rotation():
        axis.set_tick_params(labelrotation=90)
    else:
        kept = ticks[::2]
        axis.set_ticks([tick.get_loc() for tick in kept], [tick.label1.get_text() for tick in kept])
    return True


def _place_all(axes: Any, scale: float) -> None:
    """Place the labels of all data points in `axes`. `scale`: pixels per typographic point."""
    from matplotlib.text import Annotation

    markers = np.array(list(_markers(axes, scale))).reshape(-1, 4)
    fixed = [*_texts(axes), *filter(None, [axes.get_legend()])]
    taken = np.array([*markers, *map(_box, fixed)]).reshape(-1, 4)
    lines = [
        line.get_transform().transform_path(line.get_path())
        for line in axes.lines
        if line.get_linestyle() != "None" and len(line.get_xdata()) > 1
    ]
    labels: list[Any] = [text for text in axes.texts if isinstance(text, Annotation)]
    for label in labels:
        found = _best(label, taken, markers, lines, scale)
        label.set_visible(found is not None)
        if found is not None:
            (right, up), needs_line, box = found
            _move(label, right / scale, up / scale, (box[2] - box[0]) / scale / 2 - _AIR)
            label.arrow_patch.set_visible(needs_line)
            taken = np.vstack([taken, box])


def _move(label: Any, right: float, up: float, half: float) -> None:
    """Move a label's center to (right, up), in points, anchored at the end closest to its marker.

    Text widths are not proportional to the resolution, so a long text anchored at its center could reach the
    marker.
    """
    side = 0 if abs(right) < 1 else 1 if right > 0 else -1
    label.set_horizontalalignment({0: "center", 1: "left", -1: "right"}[side])
    label.set_position((right - side * half, up))


def _best(
    label: Any, taken: Boxes, markers: Boxes, lines: list[Any], scale: float
) -> tuple[tuple[float, float], bool, Boxes] | None:
    """Return a label's best free place: the offset of its center, whether it needs a line, and its box."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    inside = _box(label.axes)
    size = Text.get_window_extent(label)  # an annotation's own box includes its line
    half = np.array([size.width, size.height]) / 2 + _AIR * scale
    point = label.axes.transData.transform(label.xy)
    at = np.tile(point, 2)
    others = markers[~overlap(at, markers)]  # markers of other labels
    best, least = None, float("inf")
    for reach, turn in product(_REACHES, _DIRECTIONS):  # nearest first
        if reach >= least:
            break
        offset = (half + reach * scale) * (cos(turn * pi / 8), sin(turn * pi / 8))
        box = np.concatenate([point + offset - half, point + offset + half])
        if ((box - inside) * _OUTWARDS > 0).any() or overlap(box, taken).any():
            continue
        is_strange = bool((_gaps(box, others) < _APART * _gaps(box, at)).any())
        crosses = any(path.intersects_bbox(Bbox.from_extents(*box), filled=False) for path in lines)
        cost = reach + _CROSSING * crosses + _STRANGE * is_strange
        if cost < least:
            best, least = ((offset[0], offset[1]), is_strange or reach > _LED, box), cost
    return best


def _markers(axes: Any, scale: float) -> Iterator[Boxes]:
    """Yield the boxes of all markers."""
    from matplotlib.collections import PathCollection

    for line in axes.lines:
        if line.get_marker() not in ("None", "", None):
            for point in line.get_transform().transform(line.get_xydata()):
                yield np.tile(point, 2) + (line.get_markersize() / 2 + 1) * scale * _OUTWARDS
    for points in axes.collections:
        if isinstance(points, PathCollection):
            for point in points.get_offset_transform().transform(points.get_offsets()):
                yield np.tile(point, 2) + 4 * scale * _OUTWARDS


def _texts(axes: Any) -> list[Any]:
    """Return the texts at fixed positions, excluding the labels of data points."""
    from matplotlib.text import Annotation

    return [text for text in axes.texts if not isinstance(text, Annotation)]


def _box(drawn: Any) -> Boxes:
    return np.array(drawn.get_window_extent().extents)


def _gaps(box: Boxes, others: Boxes) -> Any:
    """Return the distances between a box and other boxes."""
    apart = np.maximum(box[:2] - others[..., 2:], others[..., :2] - box[2:]).clip(min=0)
    return np.hypot(apart[..., 0], apart[..., 1])
