"""Measure the engine as a service on the CPU at hand, with one command.

    python tools/make_bench_model.py --out /tmp/bench-model
    python benchmarks/engine.py --model /tmp/bench-model [--parts uniform,mixed,...] [--repeats N]

uniform: 16 equal requests, fp32 KV, beside transformers' `generate` and its continuous batching. mixed: 64
requests of many lengths, beside the uniform load. pressure: a pool that holds 4 of 16 requests in bf16, and
what int4 makes of the same bytes. prefix: the prefix index where nothing is shared, and where half of
each prompt is. long: a prompt of 8,000 tokens beside 8 streams. sweep: throughput and latency over 1 to 32
users, with a plot. All cases of a part run one after another in every repeat. Each part writes
benchmarks/results/engine-<part>-cpu.json.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvq.bench.engine.engine import EnginePlan, bench_engine
from kvq.bench.engine.load import LoadRequest, ServedLoad, burst, row
from kvq.bench.engine.rivals import RIVALS, check_requests, compare, one_by_one
from kvq.bench.engine.server import KvqServer
from kvq.bench.figures import engine_figure
from kvq.bench.timing import in_turn, percentile
from kvq.capacity.lengths import Lengths
from kvq.engine import EngineConfig
from kvq.evals.report.figure import write_figure
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models import Model, load
from kvq.scheduler import Priority

RESULTS = Path(__file__).resolve().parent / "results"
Rows = list[dict[str, Any]]
Draw = Callable[[int], list[LoadRequest]]
Case = tuple[KvqServer, Draw]


@contextmanager
def a_server(model: Model, kv: str, draw: Draw, **limits: Any) -> Iterator[KvqServer]:
    """An engine that gave the same tokens in a batch as one by one."""
    server = KvqServer(model, kv, EngineConfig(**limits), draw(0))
    few = check_requests(draw(0))
    together = [output.token_ids for output in server.generate(few)]
    compare(f"kvq {kv}", model, one_by_one(server, few), together)
    yield server
    server.close()


def interleaved(cases: dict[str, Case], repeats: int) -> dict[str, list[ServedLoad]]:
    """Runs of every case, all of them in each repeat, which begins with the next one each time."""
    runs: dict[str, list[ServedLoad]] = {name: [] for name in cases}
    for repeat, name in in_turn(list(cases), repeats):
        server, draw = cases[name]
        runs[name].append(server.run(draw(repeat), None))
    return runs


def rows_of(cases: dict[str, Case], runs: dict[str, list[ServedLoad]]) -> Rows:
    """One row a case."""
    return [
        {"case": name, **row(server.name, server.kv, runs[name], None)} for name, (server, _) in cases.items()
    ]


def uniform(model: Model, repeats: int) -> Rows:
    """16 requests of 128 and 64 tokens, beside both rivals."""
    plan = EnginePlan(
        load=burst(model, 16, (128, 128), (64, 64)),
        config=EngineConfig(),
        rivals=tuple(RIVALS),
        repeats=repeats,
    )
    return [{"case": "uniform", **one} for one in bench_engine(model, ["fp32"], plan)]


def mixed(model: Model, repeats: int) -> Rows:
    """64 requests of 16 to 512 and 8 to 256 tokens, beside the uniform load."""
    draws = {
        "uniform": burst(model, 16, (128, 128), (64, 64)).draw,
        "mixed": burst(model, 64, (16, 512), (8, 256)).draw,
    }
    with a_server(model, "fp32", draws["mixed"]) as server:
        cases = {name: (server, draw) for name, draw in draws.items()}
        rows = rows_of(cases, interleaved(cases, repeats))
    by_case = {one["case"]: one["total_tokens_per_s"] for one in rows}
    print(f"mixed / uniform, total tokens/s: {by_case['mixed'] / by_case['uniform']:.2f}")
    return rows


def pressure(model: Model, repeats: int) -> Rows:
    """16 requests of 128 and 256 tokens in the bytes of 4 of them in bf16, and in a pool that holds all."""
    draw = burst(model, 16, (128, 128), (256, 256)).draw
    blocks = 4 * -(-(128 + 256) // model.block_size)
    nbytes = blocks * sum(group.block_bytes for group in model.with_kv("bf16").layout.groups)
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for kv in ("bf16", "int4"):
            for name, limits in ((f"{nbytes} bytes", {"kv_memory": nbytes}), ("all fit", {})):
                server = stack.enter_context(a_server(model, kv, draw, **limits))
                cases[f"{kv}, {name}"] = server, draw
        return rows_of(cases, interleaved(cases, repeats))


def prefix(model: Model, repeats: int) -> Rows:
    """16 prompts of 512 tokens that arrive together, one output token each."""
    alike = burst(model, 16, (512, 512), (1, 1))
    half = replace(alike, shared_prefix=0.5)
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(a_server(model, "fp32", alike.draw, prefix_caching=caching))
            for caching in (True, False)
        )
        cases: dict[str, Case] = {
            "index off, nothing shared": (off, alike.draw),
            "index on, nothing shared": (on, alike.draw),
            "index off, half shared": (off, half.draw),
            "index on, half shared": (on, half.draw),
        }
        runs = interleaved(cases, repeats)
        rows = rows_of(cases, runs)
    for one in rows:
        rates = [run.total_tokens_per_s - run.output_tokens_per_s for run in runs[one["case"]]]
        for name, percent in (("", 50), ("_p10", 10), ("_p90", 90)):
            one[f"prefill_tokens_per_s{name}"] = percentile(rates, percent)
    return rows


def long(model: Model, repeats: int) -> Rows:
    """8 interactive streams, with and without a long prompt that arrives among them after a second."""
    context = model.weights.max_context
    prompt, output = min(8000, context // 2), min(768, context // 8)
    streams = replace(burst(model, 8, (128, 128), (output, output)), priority=Priority.INTERACTIVE)

    def with_long(repeat: int) -> list[LoadRequest]:
        one = replace(streams, num_requests=1, input_lengths=Lengths(low=prompt, high=prompt), seed=1)
        late = replace(one.draw(repeat)[0], index=8, output_tokens=1, arrival_s=1.0)
        return [*streams.draw(repeat), late]

    with a_server(model, "fp32", with_long) as server:
        cases: dict[str, Case] = {
            "streams": (server, streams.draw),
            "with a prompt": (server, with_long),
        }
        runs = interleaved(cases, repeats)
        rows = rows_of(cases, runs)
    for one in rows:
        one |= stream_latencies(runs[one["case"]])
    return rows


def stream_latencies(runs: Sequence[ServedLoad]) -> dict[str, float | None]:
    """ITL of the 8 streams alone, in all and while the long prompt was computed, and that prompt's TTFT."""
    gaps, during, waits = [], [], []
    for run in runs:
        late = next((one for one in run.served if one.request.index == 8), None)
        waits += [late.ttft_s] if late is not None else []
        for one in run.served:
            if one is late:
                continue
            gaps += one.itl_s
            if late is not None:
                ends = zip(one.token_s[1:], one.itl_s, strict=True)
                during += [gap for end, gap in ends if late.due_s < end <= late.token_s[0]]
    return {
        "stream_itl_ms_p50": 1e3 * percentile(gaps, 50),
        "stream_itl_ms_p99": 1e3 * percentile(gaps, 99),
        "during_itl_ms_p50": 1e3 * percentile(during, 50) if during else None,
        "during_itl_ms_p99": 1e3 * percentile(during, 99) if during else None,
        "long_ttft_s": percentile(waits, 50) if waits else None,
    }


def sweep(model: Model, repeats: int) -> Rows:
    """bf16, int8 and int4 under 1 to 32 users; stops where throughput grows no more."""
    plan = EnginePlan(
        load=replace(burst(model, 32, (128, 128), (32, 32)), priority=Priority.INTERACTIVE),
        config=EngineConfig(),
        users=(1, 2, 4, 8, 16, 32),
        repeats=repeats,
        slo_ttft_ms=2000,
        slo_itl_ms=200,
    )
    return [{"case": "sweep", **one} for one in bench_engine(model, ["bf16", "int8", "int4"], plan)]


def show(rows: Rows) -> None:
    """One line a row."""
    for one in rows:
        if one["output_tokens_per_s"] is None:
            print(f"{one['case']:26s} {one['name']:13s} {one['reason']}")
            continue
        more = "".join(
            f"  {name} {value:,.1f}"
            for name, value in one.items()
            if name.startswith(("prefill_", "stream_", "during_", "long_")) and value is not None
        )
        itl = one["itl_ms_p99"]
        print(
            f"{one['case']:26s} {one['name']:13s} {one['kv']:5s} {one['concurrency']:5g} at a time "
            f"{one['output_tokens_per_s']:8,.1f} out/s {one['total_tokens_per_s']:9,.1f} total/s  "
            f"TTFT p99 {one['ttft_ms_p99']:9,.1f} ms  ITL p99 {'-' if itl is None else f'{itl:,.1f}'} ms  "
            f"preempted {one['preemptions']}{more}",
            flush=True,
        )


def main() -> None:
    """Measure part by part, each with its own file."""
    parts = {f.__name__: f for f in (uniform, mixed, pressure, prefix, long, sweep)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the folder that tools/make_bench_model.py wrote")
    parser.add_argument("--parts", default=",".join(parts), help=f"of {', '.join(parts)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if unknown := set(chosen) - set(parts):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    torch.set_num_threads(options.threads)
    source_commit()
    model = load(options.model, device="cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        rows = parts[name](model, options.repeats)
        facts = {"model": model.description, "threads": options.threads}
        result = envelope(sys.argv, model.weights.device, rows, facts)
        write_json(options.out / f"engine-{name}-cpu.json", result)
        if name == "sweep":
            write_figure(options.out / f"engine-{name}-cpu.svg", engine_figure, result)
        show(rows)


if __name__ == "__main__":
    main()
