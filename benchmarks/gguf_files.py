"""GGUF files that kvq writes, in kvq and in llama.cpp: perplexity, ids of a text, and greedy text.

    npm install -E node-llama-cpp@3.21.1            # in FOLDER: llama.cpp, compiled
    OMP_NUM_THREADS=1 python benchmarks/gguf_files.py tiny MODEL --node FOLDER --json OUT.json

Checked: llama.cpp makes kvq's ids of the text. Both compute with unquantized KV; llama.cpp's is in F16, and
it rounds inputs to 8 bits where weights are in blocks.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

import kvq
from kvq.evals import default_text
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models import Model

TYPES = "F16,Q8_0,Q5_1,Q4_0,Q6_K,Q5_K_M,Q4_K_M"
PROMPT, GREEDY = "The list object is", 24


def windows_of(ids: list[int], context: int, count: int) -> list[list[int]]:
    """The first windows of a text."""
    return [ids[at : at + context] for at in range(0, context * count, context)]


def loss(model: Model, windows: list[list[int]]) -> float:
    """Mean negative log-likelihood of a token."""
    total = 0.0
    for ids in windows:
        likely = torch.log_softmax(model.logits(ids)[:-1].double(), -1)
        total -= float(likely.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    return total / sum(len(ids) - 1 for ids in windows)


def greedy(model: Model, ids: list[int]) -> list[int]:
    """The most likely tokens after a prompt."""
    made: list[int] = []
    while len(made) < GREEDY:
        made.append(int(model.logits(ids + made)[-1].argmax()))
    return made


def in_llama_cpp(path: Path, node: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What gguf_files.mjs prints."""
    script = Path(__file__).resolve().with_suffix(".mjs")
    words = ["node", str(script), str(path.resolve())]
    run = subprocess.run(
        words, cwd=node, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure(model: str, kind: str, node: Path, context: int, count: int) -> dict[str, Any]:
    """One model in one type."""
    text = default_text().text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        began = time.perf_counter()
        done = kvq.quantize(model, path, file_format="gguf", gguf_type=kind, device="cpu")
        seconds = time.perf_counter() - began
        loaded = kvq.load(path, kv="fp32", device="cpu")
        ids = loaded.tokenizer(text).input_ids
        asked = {
            "windows": (windows := windows_of(ids, context, count)), "text": text, "prompt": PROMPT,
            "greedy": GREEDY,
        }  # fmt: skip
        theirs = in_llama_cpp(path, node, asked)
        if theirs["text_ids"] != ids:
            raise SystemExit(f"{model}: llama.cpp makes other ids of the text")
        ours, other = loss(loaded, windows), theirs["nll"] / theirs["tokens"]
        made = greedy(loaded, loaded.tokenizer(PROMPT).input_ids)
        same = [a == b for a, b in zip([*made, -1], [*theirs["greedy_ids"], -2], strict=False)].index(False)
        return {
            "name": Path(model).name,
            "type": kind,
            "file_bytes": path.stat().st_size,
            "seconds": seconds,
            "notes": [note for note in done.notes if "in place of" in note],
            "tokens": theirs["tokens"],
            "perplexity": math.exp(ours),
            "perplexity_llama_cpp": math.exp(other),
            "change": math.expm1(other - ours),
            "greedy": loaded.tokenizer.decode(made),
            "greedy_tokens_alike": same,
        }


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--types", default=TYPES, show_default=True)
@click.option("--node", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--context", default=512, show_default=True, help="Tokens of a window.")
@click.option("--windows", "count", default=8, show_default=True)
@click.option("--json", "json_path")
def main(
    models: tuple[str, ...], types: str, node: Path, context: int, count: int, json_path: str | None
) -> None:
    """Measure every model in every type."""
    source_commit()
    rows = []
    for model in models:
        unquantized = kvq.load(model, kv="fp32", device="cpu")
        ids = unquantized.tokenizer(default_text().text).input_ids
        before = math.exp(loss(unquantized, windows_of(ids, context, count)))
        for kind in types.split(","):
            rows.append(measure(model, kind, node, context, count) | {"perplexity_before": before})
            click.echo(rows[-1])
    package = json.loads((node / "node_modules/node-llama-cpp/package.json").read_text())["version"]
    facts = {"text": default_text().name, "context": context, "node_llama_cpp": package}
    if json_path is not None:
        write_json(json_path, envelope(sys.argv, torch.device("cpu"), rows, facts))


if __name__ == "__main__":
    main()
