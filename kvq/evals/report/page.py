"""Page frame of every report: one self-contained HTML page."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvq.printable import printable

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --back: #ffffff; --line: #d0d7de; --box: #f6f8fa;
        --quiet: #57606a; --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --back: #0d1117; --line: #30363d; --box: #161b22; --quiet: #9198a1;
          --good: #3fb950; --bad: #ff7b72 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
.scroll { overflow-x: auto } svg { max-width: 100%; height: auto; fill: currentColor }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
pre { white-space: pre-wrap; background: var(--box); padding: .8rem; border-radius: 6px; margin: 0 }
.good { color: var(--good) } .bad { color: var(--bad) } .small { color: var(--quiet); font-size: .85rem }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return the page around parts that are HTML already."""
    whole = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )
    return printable(whole)  # controls have no place in HTML, and halves of surrogate pairs none in UTF-8


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls if it is too wide."""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def origin(result: dict[str, Any]) -> str:
    """Return the origin of figures: version, commit, command."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f'<p class="small">kvq {escape(result["kvq_version"])}, commit {escape(str(result["commit"]))}, '
        f"{escape(result['date'])}, {escape(versions)}. Command: <code>{escape(result['command'])}</code></p>"
    )
