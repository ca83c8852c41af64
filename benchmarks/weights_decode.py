"""Decoding one sequence over weights of several formats, beside llama.cpp over its own.

    python tools/make_bench_model.py --out bench-model
    python benchmarks/weights_decode.py --model bench-model --json OUT.json \\
        [--llama-python PYTHON --gguf f32=F.gguf,q8_0=Q8.gguf,q4_0=Q4.gguf]

Every contender decodes `--tokens` tokens after a prompt of `--depth`, in turn, `--repeats` times. kvq runs
its engine. llama.cpp runs in a process of its own, in the interpreter that has llama-cpp-python, waits on a
pipe while others have their turn, and decodes greedily from the same depth.
"""

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import click
import torch

import kvq
from kvq.bench.timing import percentile
from kvq.evals.results import envelope, source_commit, write_json
from kvq.weights import weight_bytes

WEIGHTS = ("auto", "int8", "int4", "fp8", "w8a8")
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


def engine(model: str, weights: str, depth: int, tokens: int) -> tuple[Callable[[], float], dict[str, Any]]:
    """Tokens a second of one turn of kvq's engine, and what its weights take."""
    llm = kvq.LLM(model, kv="fp32", weights=weights, kv_memory="256MiB", prefix_caching=False)
    prompt = [[5 + i % 4000 for i in range(depth)]]

    def seconds(count: int) -> float:
        began = time.perf_counter()
        llm.generate(prompt, kvq.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
        return time.perf_counter() - began

    seconds(4)
    return lambda: tokens / (seconds(tokens + 2) - seconds(2)), {
        "weights_bytes": weight_bytes(llm.model.weights.model)
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
@click.option("--llama-python", help="An interpreter that has llama-cpp-python.")
@click.option("--gguf", default="", help="The same model for llama.cpp: f32=FILE,q8_0=FILE,q4_0=FILE.")
@click.option("--json", "json_path")
def main(
    model: str,
    depth: int,
    tokens: int,
    repeats: int,
    llama_python: str | None,
    gguf: str,
    json_path: str | None,
) -> None:
    """Measure all of them in turn."""
    source_commit()
    turns: dict[tuple[str, str], tuple[Callable[[], float], dict[str, Any]]] = {
        ("kvq", weights): engine(model, weights, depth, tokens) for weights in WEIGHTS
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
    for (name, weights), values in found.items():
        theirs = medians.get(("llama.cpp", twins.get(weights, ""))) if name == "kvq" else None
        rows.append(
            {
                "name": name,
                "weights": "fp32" if weights == "auto" else weights,
                "tokens_per_s_median": medians[name, weights],
                "tokens_per_s_p10": percentile(values, 10),
                "tokens_per_s_p90": percentile(values, 90),
                "over_fp32": medians[name, weights] / medians["kvq", "auto"] if name == "kvq" else None,
                "over_llama_cpp": None if theirs is None else medians[name, weights] / theirs,
                **turns[name, weights][1],
            }
        )
        click.echo(rows[-1])
    if json_path is not None:
        more = {"model": "bench", "depth": depth, "tokens": tokens, "repeats": repeats}
        write_json(json_path, envelope(["benchmarks/weights_decode.py"], torch.device("cpu"), rows, more))


if __name__ == "__main__":
    main()
