"""HTML report of `kvq eval` and `kvq perplexity`, as one self-contained page."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvq import fileio
from kvq.evals.report import plot
from kvq.evals.report.bootstrap import FEWEST_DOCUMENTS
from kvq.evals.report.figure import drawing
from kvq.evals.report.page import columns_of, html_table, origin, page, table
from kvq.evals.report.sections import outcomes, sections
from kvq.models.check.verdict import HARMLESS_CHANGE, HARMLESS_KL, verdict

_PLOTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {  # section -> plot above its table
    "kl": plot.divergence_plot,
    "by_difficulty": plot.difficulty_plot,
    "attention": plot.attention_plot,
    "generation": plot.generation_plot,
    "needle": plot.needle_plot,
}

_HOW_TO_READ = (
    "<h2>How to read this</h2><p>Bits per element count codes and scales; bytes per token are what the pool "
    "allocates, padding included. The change in perplexity, the KL divergence (nats per token) and the share "
    "of tokens with the same likeliest successor are against the first unquantized format of the table. "
    "Other models lose more or less: measure your own with <code>kvq perplexity --model PATH</code>.</p>"
)


def write_report(path: str | Path, result: dict[str, Any], samples: dict[str, str] | None = None) -> None:
    """Write the report. `samples` maps KV format names to texts generated from one prompt."""
    fileio.write_text(path, render(result, samples or {}))


def render(result: dict[str, Any], samples: dict[str, str]) -> str:
    """Return the page's HTML. `result`: JSON of either command; only results of `kvq eval` have tasks."""
    rows = result["rows"]
    is_eval = "tasks" in result
    cautions = result.get("cautions", [])
    ended = [(ok, line) for ok, line in outcomes(result) if line not in cautions]
    first = rows[0]
    advices = [facts["advice"] for facts in result.values() if isinstance(facts, dict) and "advice" in facts]
    measured = ""
    if "tokens" in first:
        measured = f", {first['tokens']:,} predicted tokens in windows of {result['context']}"
    documents = f", {first['documents']} documents" if "documents" in first else ""
    took = html_table(*table(result.get("tasks", ()), columns_of("tasks")))
    drawn = ""
    if "resamples" in result:
        drawn = f" Intervals are at 95%, from {result['resamples']:,} resamples of documents."
    parts = [
        f"<h1>What KV formats save and cost: {escape(result['model'])}</h1>",
        *(f'<p class="bad"><b>Mind: {escape(line)}.</b></p>' for line in cautions),
        ""
        if cautions
        else _verdicts(rows, advices)
        if is_eval
        else f"<p>{_summary(rows, result['context'])}</p>",
        f'<p class="small">On {escape(result["text"])}{measured}{documents}. '
        f"{escape(result['device'])}, {escape(result['date'])}. Against {escape(first['kv'])}; "
        f"every token went through kvq's own write-then-read path: quantized into "
        f"blocks first, attended from there.{drawn}</p>",
        *(f'<p class="{"good" if ok else "bad"}">{escape(line)}</p>' for ok, line in ended),
        "" if is_eval else drawing(plot.perplexity_figure, result),
        *_sections(result),
        _samples(samples),
        f"<h2>What it took</h2>{took}" if is_eval else _HOW_TO_READ,
        origin(result),
        f'<p class="small">Text SHA-256 {escape(result["text_digest"])}. Model digest '
        f"{escape(result['model_digest'])}.</p>",
    ]
    return page(f"kvq: {result['model']}", parts)


def _sections(result: dict[str, Any]) -> list[str]:
    """Return the tables, some of them preceded by a plot."""
    parts = []
    for section in sections(result):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.drawn:
            parts.append(drawing(plot.sessions_plot, section.drawn))
        if section.key in _PLOTS:
            parts.append(drawing(_PLOTS[section.key], result.get(section.key, result["rows"])))
        parts.append(html_table(section.heads, section.cells))
        parts.append(f'<p class="small">{escape(section.note)}</p>' if section.note else "")
    return parts


def _verdicts(rows: list[dict[str, Any]], advices: Sequence[str]) -> str:
    lines = [
        f"<li><b>{escape(row['kv'])}</b>, {row['compression']:.2f} times bf16's tokens in the same memory: "
        f"{escape(row['verdict'])}</li>"
        for row in rows
        if row.get("verdict", "baseline") != "baseline"
    ]
    lines += [f"<li><b>{escape(advice)}</b>, by sessions of agents</li>" for advice in advices]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _summary(rows: list[dict[str, Any]], context: int) -> str:
    """Return a paragraph about the harmless format that saves the most memory."""
    measured = [r for r in rows if r["instrument"] != "window"]
    harmless = [r for r in measured if verdict(r["kl_mean"], r["perplexity_change"]) == "harmless"]
    best = min(harmless, key=lambda r: (r["kv_bytes_per_token"], r["kl_mean"]))  # includes the baseline
    means = f"is harmless: mean KL below {HARMLESS_KL:g} and perplexity up by less than {HARMLESS_CHANGE:.0%}"
    windows = rows[0]["tokens"] // (context - 1)
    few = f" Windows: {windows}, too few to be sure." if windows < FEWEST_DOCUMENTS else ""
    if best is rows[0]:
        return f"Of the formats measured, none smaller than {escape(best['kv'])} {means}.{few}"
    return (
        f"Of the formats measured, <b>{escape(best['kv'])}</b> is the smallest that {means}. "
        f"{best['compression']:.2f} times as many tokens fit into the same memory as with bf16; mean KL "
        f"{best['kl_mean']:.3g}, {best['top1_agreement']:.1%} the same top token, perplexity "
        f"{best['perplexity_change']:+.2%}.{few}"
    )


def _samples(samples: dict[str, str]) -> str:
    if not samples:
        return ""
    boxes = "".join(
        f"<div><b>{escape(kv)}</b><pre>{escape(text)}</pre></div>" for kv, text in samples.items()
    )
    return (
        "<h2>The same prompt, two caches</h2><p>Sampled with the same random numbers. This is a very small "
        f"model: read for differences between the columns, not for sense.</p>"
        f'<div class="pair">{boxes}</div>'
    )
