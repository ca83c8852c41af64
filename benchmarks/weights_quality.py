"""Perplexity of quantized weights: every method, as a checkpoint that kvq loads and serves.

    python benchmarks/weights_quality.py --text TEST.txt --calibrate VALID.txt --json OUT.json

Every row quantizes the model into a folder, loads that folder and runs the text through the engine's own
path over unquantized KV. Windows are documents: intervals of the change of perplexity are paired with the
unquantized model's losses on the same windows.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import kvq
from kvq.evals import EvalText, read_text
from kvq.evals.divergence import TokenPlan, measure_tokens
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models import load

GROUPED: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "gptq": {"method": "gptq"},
    "gptq, act-order": {"method": "gptq", "act_order": "static"},
    "awq": {"method": "awq"},
}
PLAIN: dict[str, dict[str, Any]] = {
    "int8": {"method": "rtn", "bits": 8},
    "fp8": {"method": "fp8"},
    "w8a8, rtn": {"method": "rtn", "bits": 8, "activations": "int8"},
    "w8a8, smoothquant": {"method": "smoothquant"},
}


def losses(folder: str, text: EvalText, context: int, windows: int) -> np.ndarray:
    """Nats of every predicted token [windows, context - 1], over fp32 KV."""
    model = load(folder, kv="fp32", device="cpu")
    return measure_tokens(model, ["fp32"], text.text, TokenPlan(context=context, max_windows=windows))[0].nll


def plans(texts: dict[str, EvalText | None]) -> list[dict[str, Any]]:
    """Return what to measure: methods that use a text once for each text."""
    found = [{"name": name, "options": options, "text": None} for name, options in PLAIN.items()]
    for bits in (4, 3):
        for name, options in GROUPED.items():
            for label in texts if options["method"] != "rtn" else [None]:
                found.append(
                    {"name": f"int{bits}, {name}", "options": {**options, "bits": bits}, "text": label}
                )
    found.append({"name": "w4a8, gptq", "options": {"method": "gptq", "activations": "int8"}, "text": None})
    return found


@click.command()
@click.option("--model", default="tiny", show_default=True)
@click.option("--text", required=True, help="To measure on.")
@click.option("--calibrate", help="To calibrate on too, beside the default text.")
@click.option("--context", default=1024, show_default=True)
@click.option("--windows", default=100, show_default=True)
@click.option("--samples", default=128, show_default=True)
@click.option("--sample-context", default=512, show_default=True, help="Tokens of a sample.")
@click.option("--only", default="", help="Rows whose name holds this.")
@click.option("--json", "json_path", required=True)
def main(
    model: str,
    text: str,
    calibrate: str | None,
    context: int,
    windows: int,
    samples: int,
    sample_context: int,
    only: str,
    json_path: str,
) -> None:
    """Measure all methods on one text."""
    source_commit()
    held_out = read_text(text)
    texts: dict[str | None, EvalText | None] = {"default": None}
    if calibrate:
        texts[Path(calibrate).name] = read_text(calibrate)
    base = losses(model, held_out, context, windows).mean(axis=1, dtype=np.float64)
    rows: list[dict[str, Any]] = [{"name": "unquantized", "perplexity": float(np.exp(base.mean()))}]
    click.echo(rows[0])
    for plan in [plan for plan in plans(texts) if only in plan["name"]]:
        out = Path(tempfile.mkdtemp()) / "quantized"
        began = time.perf_counter()
        done = kvq.quantize(
            model,
            out,
            text=texts.get(plan["text"]),
            samples=samples,
            context=sample_context,
            **plan["options"],
        )
        seconds = time.perf_counter() - began
        nll = losses(str(out), held_out, context, windows).mean(axis=1, dtype=np.float64)
        interval = Bootstrap().interval(lambda a, b: np.exp(a - b) - 1, nll, base)
        rows.append(
            {
                "name": plan["name"],
                "calibrated_on": plan["text"] if done.samples else None,
                "samples": done.samples,
                "format": done.rows[0].format,
                "bits_per_weight": 8
                * done.bytes_after
                / sum(r.in_features * r.out_features for r in done.rows),
                "perplexity": float(np.exp(nll.mean())),
                "perplexity_change": float(np.exp(nll.mean() - base.mean()) - 1),
                "perplexity_change_interval": interval,
                "quantize_seconds": seconds,
            }
        )
        click.echo(rows[-1])
        shutil.rmtree(out.parent)
        write_json(
            json_path,
            envelope(
                sys.argv, kvq.load(model, device="cpu").weights.device, rows,
                {"model": model, "text": held_out.name, "context": context, "windows": len(base)},
            ),
        )  # fmt: skip


if __name__ == "__main__":
    main()
