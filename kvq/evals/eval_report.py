"""An evaluation as a single HTML page that needs no other file."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.eval_plots import (
    attention_plot,
    difficulty_plot,
    divergence_plot,
    generation_plot,
    needle_plot,
)
from kvq.evals.figure import drawing
from kvq.evals.page import html_table, origin, page
from kvq.evals.sections import sections
from kvq.sizes import binary

_PLOTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {  # section -> its plot, drawn above the table
    "kl": divergence_plot,
    "by_difficulty": difficulty_plot,
    "attention": attention_plot,
    "generation": generation_plot,
    "needle": needle_plot,
}


def write_report(path: str | Path, result: dict[str, Any]) -> None:
    """Write the page. `result`: as `kvq eval --json` writes it."""
    fileio.write_text(path, render(result))


def render(result: dict[str, Any]) -> str:
    """Return the page's HTML."""
    rows = result["rows"]
    first = rows[0]
    measured = f", {first['tokens']:,} predicted tokens" if "tokens" in first else ""
    documents = f", {first['documents']} documents" if "documents" in first else ""
    parts = [
        f"<h1>What KV formats cost: {escape(result['model'])}</h1>",
        _verdicts(rows),
        f'<p class="small">On {escape(result["text"])}{measured} (windows of {result["context"]}'
        f"{documents}). {escape(result['device'])}, {escape(result['date'])}. Against {escape(first['kv'])}; "
        f"every token went through kvq's own write-then-read path. Intervals are at 95%, "
        f"from {result['resamples']:,} resamples of documents.</p>",
        _checks(result),
    ]
    for section in sections(result):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.key in _PLOTS:
            parts.append(drawing(_PLOTS[section.key], result.get(section.key, rows)))
        parts.append(html_table(section.heads, section.cells))
        parts.append(f'<p class="small">{escape(section.note)}</p>' if section.note else "")
    parts += [_took(result), origin(result), _digests(result)]
    return page(f"kvq eval: {result['model']}", parts)


def _verdicts(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"<li><b>{escape(row['kv'])}</b>, {row['compression']:.2f} times bf16's tokens in the same memory. "
        f"Perplexity: {escape(row['verdict'])}</li>"
        for row in rows
        if row.get("verdict", "baseline") != "baseline"
    ]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _checks(result: dict[str, Any]) -> str:
    lines = []
    if check := result.get("instrument"):
        lines.append(
            _mark(check["passed"], "instrument")
            + f": perplexity changes by {check['window_change']:+.1%} with attention cut to "
            f"{check['window_tokens']} tokens and by {check['int2_change']:+.1%} with "
            f"{escape(check['int2_format'])}; both must reach {check['limit']:+.0%}"
        )
    lines += [
        _mark(False, f"{name} is void") + f": {escape(reason)}"
        for name, reason in result.get("void", {}).items()
    ]
    for gate in result["gates"]:
        broken = "; ".join(one["told"] for one in gate["failures"])
        lines.append(
            _mark(gate["passed"], f"gate {gate['gate']}") + (f" by {escape(broken)}" if broken else "")
        )
    return "".join(f"<p>{line}</p>" for line in lines)


def _mark(passed: bool, what: str) -> str:
    mark, word = ("good", "passed") if passed else ("bad", "failed")
    return f'{escape(what)} <span class="{mark}">{word}</span>'


def _took(result: dict[str, Any]) -> str:
    cells = [
        [
            ", ".join(task["names"]),
            f"{task['seconds']:,.1f}",
            binary(task["peak_bytes"]),
            binary(task["grown_bytes"]),
            "-" if task["device_peak_bytes"] is None else binary(task["device_peak_bytes"]),
        ]
        for task in result["tasks"]
    ]
    heads = ("evaluation", "seconds", "peak memory", "grown by", "on the GPU")
    return "<h2>What it took</h2>" + html_table(heads, cells)


def _digests(result: dict[str, Any]) -> str:
    return (
        f'<p class="small">Text SHA-256 {escape(result["text_digest"])}. Model digest '
        f"{escape(result['model_digest'])}.</p>"
    )
