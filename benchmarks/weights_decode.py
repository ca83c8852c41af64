"""Decoding one sequence over weights of several formats, beside llama.cpp over its own.

    python tools/make_bench_model.py --out bench-model
    python benchmarks/weights_decode.py --model bench-model --json OUT.json \\
        [--llama-python PYTHON --gguf f32=F.gguf,q8_0=Q8.gguf,q4_0=Q4.gguf]

    python tools/make_bench_model.py --out mixture --experts
    python benchmarks/weights_decode.py --model mixture --weights auto-experts,auto,int8,int4

Every contender decodes `--tokens` tokens after a prompt of `--depth`, in turn, `--repeats` times. kvq runs
its engine; as `auto-experts` over fp32 experts that are left to transformers' code. llama.cpp runs in a
process of its own, in the interpreter that has llama-cpp-python, waits on a pipe while others have their
turn, and decodes greedily from the same depth.
"""

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch

import kvq
from kvq.bench.timing import percentile
from kvq.evals.results import envelope, source_commit, write_json
from kvq.weights import weight_bytes

WEIGHTS = ("auto", "int8", "int4", "fp8", "w8a8")
LEFT = "auto-experts"  # as stored, the experts in transformers' code
TWINS = {"f32": "auto", "q8_0": "int8", "q4_0": "int4"}  # llama.cpp's format: kvq's nearest
LLAMA = """
import json, sys, time
import llama_cpp

depth, tokens, threads = map(int, sys.argv[2:5])
model = llama_cpp.Llama(
    sys.argv[1], n_ctx=depth + tokens + 8, n_threads=threads, n_threads_batch=threads, verbose=False
)
print(json.dumps(llama_cpp.__version__), flush=True)
for _ in sys.stdin:
    model.reset()
    model.eval([5 + i % 4000 for i in range(depth)])
    token, began = 7, time.perf_counter()
    for _ in range(tokens):
        model.eval([token])
        token = model.sample(temp=0.0)
    print(json.dumps(tokens / (time.perf_counter() - began)), flush=True)
"""


def load(model: str, weights: str) -> kvq.LLM:
    """An engine; of LEFT one that finds no stacked experts to take over."""
    unknown = mock.patch("kvq.models.linear.stacked_experts", return_value={})
    with unknown if weights == LEFT else nullcontext():
        weights = "auto" if weights == LEFT else weights
        return kvq.LLM(model, kv="fp32", weights=weights, kv_memory="256MiB", prefix_caching=False)


def engine(
    model: str, weights: str, depth: int, tokens: int, sequences: int
) -> tuple[Callable[[], float], dict[str, Any]]:
    """Tokens a second of one turn of kvq's engine, and what its weights take."""
    llm = load(model, weights)
    prompt = [[5 + (i + 37 * j) % 4000 for i in range(depth)] for j in range(sequences)]

    def seconds(count: int) -> float:
        began = time.perf_counter()
        llm.generate(prompt, kvq.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
        return time.perf_counter() - began

    seconds(4)
    return lambda: sequences * tokens / (seconds(tokens + 2) - seconds(2)), {
        "weights_bytes": weight_bytes(llm.model.weights.model),
        "model": llm.model.description.partition(", weights in ")[0],
    }


def llama(python: str, gguf: str, depth: int, tokens: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """The same of llama.cpp, one process per file."""
    words = [python, "-c", LLAMA, gguf, depth, tokens, torch.get_num_threads()]
    process = subprocess.Popen(
        list(map(str, words)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    pipe, answers = process.stdin, process.stdout
    version = json.loads(answers.readline())

    def turn() -> float:
        pipe.write("\n")
        pipe.flush()
        return float(json.loads(answers.readline()))

    turn()
    return turn, {"version": version}


@click.command()
@click.option("--model", required=True, help="The folder that tools/make_bench_model.py wrote.")
@click.option("--depth", default=128, show_default=True, help="Tokens before the first decoded one.")
@click.option("--tokens", default=64, show_default=True, help="Decoded in a turn.")
@click.option("--repeats", default=15, show_default=True)
@click.option("--sequences", default=1, show_default=True, help="Decoded together, by kvq.")
@click.option("--weights", default=",".join(WEIGHTS), show_default=True, help=f"Those of kvq; {LEFT}, too.")
@click.option("--llama-python", help="An interpreter that has llama-cpp-python.")
@click.option("--gguf", default="", help="The same model for llama.cpp: f32=FILE,q8_0=FILE,q4_0=FILE.")
@click.option("--json", "json_path")
def main(
    model: str,
    depth: int,
    tokens: int,
    repeats: int,
    sequences: int,
    weights: str,
    llama_python: str | None,
    gguf: str,
    json_path: str | None,
) -> None:
    """Measure all of them in turn."""
    source_commit()
    turns: dict[tuple[str, str], tuple[Callable[[], float], dict[str, Any]]] = {
        ("kvq", name): engine(model, name, depth, tokens, sequences) for name in weights.split(",")
    }
    for pair in filter(None, gguf.split(",")):
        name, _, path = pair.partition("=")
        if llama_python is None:
            raise click.UsageError("--gguf needs --llama-python")
        turns["llama.cpp", name] = llama(llama_python, path, depth, tokens)
    found: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    order = list(turns)
    for repeat in range(repeats):
        for key in order[repeat % len(order) :] + order[: repeat % len(order)]:
            found[key].append(turns[key][0]())
    medians = {key: percentile(values, 50) for key, values in found.items()}
    twins = {own: theirs for theirs, own in TWINS.items()}
    rows = []
    for (name, own), values in found.items():
        theirs = medians.get(("llama.cpp", twins.get(own, ""))) if name == "kvq" else None
        rows.append(
            {
                "name": name,
                "weights": own.replace("auto", "fp32"),
                "tokens_per_s_median": medians[name, own],
                "tokens_per_s_p10": percentile(values, 10),
                "tokens_per_s_p90": percentile(values, 90),
                "over_fp32": medians[name, own] / medians["kvq", "auto"] if name == "kvq" else None,
                "over_llama_cpp": None if theirs is None else medians[name, own] / theirs,
                **turns[name, own][1],
            }
        )
        click.echo(rows[-1])
    if json_path is not None:
        more = {"model": Path(model).name, "depth": depth, "tokens": tokens, "repeats": repeats}
        described = [row.pop("model") for row in rows if "model" in row]
        more |= {"sequences": sequences, "described": described[0].replace(",", " of", 1)}
        write_json(json_path, envelope(["benchmarks/weights_decode.py"], torch.device("cpu"), rows, more))


if __name__ == "__main__":
    main()
