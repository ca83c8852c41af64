"""`kvq demo`: every format on the embedded model, a comparison of generated texts, and a report."""

from itertools import takewhile
from pathlib import Path

import click

from kvq.commands.shared.progress import status
from kvq.commands.shared.terminal import echo, print_check
from kvq.errors import ConfigError, explained

KV = "fp32,bf16,fp8,fp8_per_head,int8,int8_per_head,k8v4,int4,int4_g32,int2_g32"
PROMPT = "The history of the city of"
SHOWN = ("fp32", "int4")
MARK = ">>>"


def mark_difference(one: str, other: str) -> tuple[str, str]:
    """Return both texts, each with a mark before the first word that differs."""
    if one == other:
        return one, other
    words, others = one.split(" "), other.split(" ")
    same = len([*takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False))])
    return " ".join([*words[:same], MARK, *words[same:]]), " ".join([*others[:same], MARK, *others[same:]])


@click.command(name="demo")
@click.option(
    "--out",
    default="kvq-demo",
    show_default=True,
    type=click.Path(),
    help="Folder for report.html, results.json and plot.svg.",
)
@click.option("--max-windows", type=int, help="Stop after this many windows.  [default: all]")
def command(out: str, max_windows: int | None) -> None:
    """Measure every format on the embedded model and write a report."""
    from kvq.commands.quality.eval_tasks import EvalPlan
    from kvq.commands.quality.perplexity import measure
    from kvq.engine import LLM, SamplingParams
    from kvq.evals import default_text
    from kvq.evals.divergence import TokenPlan
    from kvq.evals.report.figure import check_plot_path, write_figure
    from kvq.evals.report.plot import perplexity_figure
    from kvq.evals.report.report import write_report
    from kvq.models.model import load

    folder = Path(out)
    check_plot_path(folder / "plot.svg")
    with explained(ConfigError, f"can't make folder {out}"):
        folder.mkdir(parents=True, exist_ok=True)
    with status("loading the embedded model"):
        model = load("tiny")
    plan = EvalPlan(
        prepared=model.prepared,
        recipes=[model.prepared.recipe(kv, model.static_scales) for kv in KV.split(",")],
        text=default_text(),
        tokens=TokenPlan(max_windows=max_windows, instrument=True),
    )
    result = measure(model, plan, json_path=str(folder / "results.json"))
    print_check(result)
    echo(f"\nThe likeliest tokens; texts differ from {MARK} on. A tiny model: compare, don't expect sense.")
    texts = []
    for kv in SHOWN:
        with LLM(model, kv, max_num_seqs=1) as llm:
            (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=64, temperature=0.0))
            texts.append(PROMPT + output.outputs[0].text)
    samples = dict(zip(SHOWN, mark_difference(*texts), strict=True))
    for kv, text in samples.items():
        echo(f"\n--- {kv} ---\n{text}")
    write_report(folder / "report.html", result, samples)
    write_figure(folder / "plot.svg", perplexity_figure, result)
    echo(f"\nwrote {folder}/report.html, {folder}/results.json and {folder}/plot.svg")
    echo("next: kvq serve tiny; kvq perplexity FOLDER measures a model of yours")
