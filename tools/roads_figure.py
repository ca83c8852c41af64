"""The picture of docs/scale.md: who needs what, and the road that kvq takes there.

Drawn narrow, so that letters stay readable on a phone; colours follow the reader's scheme.
"""

from dataclasses import dataclass
from html import escape

WIDTH = 424  # as wide as it is shown at most
_LEFT, _BOX, _LINE, _GAP = 126, 290, 18, 14  # of boxes: where they begin, how wide; lines; between boxes
_STYLE = """
 .box{fill:#f6f8fa;stroke:#57606a;stroke-width:1.5} .t{fill:#1f2328} .s{fill:#57606a;font-size:14px}
 .b{font-weight:600;font-size:16px} .l{fill:#0969da;font-size:14px} .hd{fill:#0969da}
 .a{stroke:#0969da;stroke-width:1.8;fill:none;marker-end:url(#h)}
 .r{stroke:#57606a;stroke-dasharray:2 4}
 @media (prefers-color-scheme: dark){.box{fill:#161b22;stroke:#8b949e}.t{fill:#e6edf3}.s{fill:#9198a1}
 .a{stroke:#58a6ff}.l,.hd{fill:#58a6ff}.r{stroke:#8b949e}}
"""
_HEAD = (
    '<defs><marker id="h" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto"><path class="hd" d="M0 0 10 5 0 10z"/></marker></defs>'
)


@dataclass(frozen=True)
class Road:
    """One box: what somebody needs, who has it, and what kvq is there."""

    need: tuple[str, ...]
    name: str
    what: tuple[str, ...]
    starts_band: bool = True


ROADS = (
    Road(("one machine,", "one model"), "kvq serve, kvq.LLM", ("kvq's own engine, one process",)),
    Road(
        ("many GPUs,", "many nodes,", "LoRA"),
        "vLLM",
        ("plug-in kvq: formats and kernels in", "the place of its attention"),
    ),
    Road(
        ("KV on disk,", "in transfer"),
        "LMCache, also under vLLM",
        ("serde kvq: chunks as kvq's blocks,", "with digests"),
        starts_band=False,
    ),
    Road(
        ("replicas", "behind a", "router"),
        "Ray Serve",
        ("kvq.integrations.ray: replicas of", "kvq serve behind its routers"),
    ),
    Road(
        (),
        "Dynamo, llm-d",
        ("told by kvq serve --kv-events", "which blocks it holds"),
        starts_band=False,
    ),
    Road((), "Gateway API", ("reads the names of", "kvq serve --metrics-names vllm"), starts_band=False),
)


def roads_svg() -> str:
    """The whole file."""
    parts, y, need_y = [], _GAP, 0
    for road in ROADS:
        height = 2 * _GAP + _LINE * (1 + len(road.what))
        if road.starts_band and parts:
            parts.append(f'<path class="r" d="M8 {y} H{WIDTH - 8}"/>')
            y += _GAP
        middle = y + height // 2
        need_y = middle if road.need else need_y
        parts += [*_box(road, y, height), *_need(road, middle), _arrow(need_y, middle)]
        y += height + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="system-ui, sans-serif" font-size="14">\n<style>{_STYLE}</style>\n{_HEAD}\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _box(road: Road, y: int, height: int) -> list[str]:
    at = y + _GAP + _LINE - 4
    lines = [f'<text class="t b" x="{_LEFT + 14}" y="{at}">{escape(road.name)}</text>']
    for i, what in enumerate(road.what, start=1):
        lines.append(f'<text class="s" x="{_LEFT + 14}" y="{at + 2 + _LINE * i}">{escape(what)}</text>')
    return [f'<rect class="box" x="{_LEFT}" y="{y}" width="{_BOX}" height="{height}" rx="10"/>', *lines]


def _need(road: Road, middle: int) -> list[str]:
    """Draw a label beside the box, around its middle."""
    top = middle + 5 - _LINE * (len(road.need) - 1) // 2
    return [
        f'<text class="l" x="8" y="{top + _LINE * i}">{escape(need)}</text>'
        for i, need in enumerate(road.need)
    ]


def _arrow(need_y: int, middle: int) -> str:
    """To a box from what is needed; from further up along the boxes."""
    if middle == need_y:
        return f'<path class="a" d="M{_LEFT - 15} {middle} H{_LEFT - 2}"/>'
    return f'<path class="a" d="M{_LEFT - 15} {need_y} V{middle} H{_LEFT - 2}"/>'
