"""Compare what `kvq plan` and `kvq simulate` predict with what the engine at hand does.

    python tools/make_bench_model.py --out /tmp/bench-model
    python benchmarks/capacity.py --model /tmp/bench-model [--parts memory,users,scale,million,predicted]

memory: every term of weights, pools and the whole process, of models of several kinds. users: as many
requests as were planned, which none is preempted of, and 5% more. scale, million: how long 100,000
simulated requests take, and how much memory a million. predicted: the costs of steps are measured on one
load, 48 mixed requests that arrive at random, and once more all together; then five other loads are served,
and simulated with the same requests, times of arrival and pools. Each part writes
benchmarks/results/capacity-<part>-cpu.json.
"""

import argparse
import json
import resource
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvq import quantize
from kvq.bench.engine.load import Load, LoadRequest
from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.step_costs import fit_costs
from kvq.bench.timing import percentile
from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.records import summarize
from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.lengths import Lengths
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import CapacityPlan, plan
from kvq.capacity.plan.step_time import StepTime, efficiency, roofline
from kvq.capacity.plan.target import make_target
from kvq.engine import LLM, EngineConfig, SamplingParams
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models import Model, load
from kvq.scheduler import Priority

FORMATS = ("fp32", "bf16", "fp8", "int8", "k8v4", "int4", "int2")
BLOCK_SIZES = (8, 16, 64)  # tokens
VERIFIED = "fp32,bf16,int8,int4"  # whose memory is planned
CONTEXT, OUTPUT = 160, 64  # tokens of a user
RESULTS = Path(__file__).resolve().parent / "results"
SHEET = Gpu(name="this CPU", memory_gb=1.0, bandwidth_tb_s=1.0, usd_per_hour=1.0, tflops={"fp16": 10.0})
FIGURES = {"output_tokens_per_s": 0.10, "ttft_ms_p50": 0.20, "itl_ms_p50": 0.20}  # may differ by


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One load, and what the engine has for it."""

    load: Load
    limits: EngineConfig = field(default_factory=EngineConfig)


def cases(model: Model) -> dict[str, Case]:
    """The load that costs are measured on, first, and five others."""
    shape: dict[str, Any] = {
        "vocab_size": model.geometry.vocab_size,
        "max_context": model.weights.max_context,
    }

    def lengths(low: int, high: int) -> Lengths:
        return Lengths(low=low, high=high)

    mixed = Load(
        num_requests=48,
        input_lengths=lengths(16, 512),
        output_lengths=lengths(8, 192),
        rate=2.0,
        seed=7,
        **shape,
    )
    at_once = replace(mixed, rate=float("inf"), priority=Priority.BATCH)
    return {
        "calibration": Case(load=mixed),
        "uniform": Case(
            load=replace(
                at_once,
                num_requests=16,
                input_lengths=lengths(128, 128),
                output_lengths=lengths(64, 64),
                seed=1,
            )
        ),
        "mixed, all at once": Case(load=replace(at_once, seed=2)),
        "chat, arriving": Case(
            load=replace(
                mixed, input_lengths=lengths(32, 160), output_lengths=lengths(32, 128), rate=1.5, seed=3
            )
        ),
        "half shared": Case(
            load=replace(
                mixed,
                input_lengths=lengths(384, 512),
                output_lengths=lengths(16, 64),
                shared_prefix=0.5,
                seed=4,
            )
        ),
        "small pool": Case(
            load=replace(
                at_once,
                num_requests=16,
                input_lengths=lengths(128, 128),
                output_lengths=lengths(128, 128),
                seed=5,
            ),
            limits=EngineConfig(num_blocks=40),
        ),
    }


def simulated(server: KvqServer, requests: list[LoadRequest], time: StepTime) -> dict[str, Any]:
    """Simulate the requests with the engine's own scheduler settings and pools."""
    scheduler = server.llm.core.scheduler
    manager = scheduler.manager
    spec = EngineSpec(
        num_blocks=[pool.num_blocks for pool in manager.pools],
        block_size=manager.block_size,
        config=scheduler.config,
        time=time,
    )
    calls = [
        Call(
            number=request.index,
            arrival_s=request.arrival_s,
            prompt=array("I", request.prompt),
            output_tokens=request.output_tokens,
            priority=request.priority,
        )
        for request in requests
    ]
    return summarize(serve(calls, FleetSpec(engine=spec)))


def compare(model: Model, folder: str, kv: str, repeats: int) -> list[dict[str, Any]]:
    """A row a load. All loads run in every repeat; each simulation has the costs of its repeat."""
    target = make_target(folder, weights="fp32")
    loads = cases(model)
    servers = {name: KvqServer(model, kv, case.limits, case.load.draw(0)) for name, case in loads.items()}
    for name, server in servers.items():  # warm: kernels compiled, costs learned
        server.run(loads[name].load.draw(1000), None)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
    predicted: dict[str, list[dict[str, Any]]] = {name: [] for name in loads}
    first = servers["calibration"]
    for repeat in range(repeats):
        steps = first.measure_steps(loads["calibration"].load.draw(500 + repeat), None)
        for name, server in servers.items():
            run = server.run(loads[name].load.draw(repeat), None)
            gaps = [gap for one in run.served for gap in one.itl_s]
            found[name].append(
                {
                    "output_tokens_per_s": run.output_tokens_per_s,
                    "ttft_ms_p50": 1e3 * percentile([one.ttft_s for one in run.served], 50),
                    "itl_ms_p50": 1e3 * percentile(gaps, 50),
                    "preemptions": run.preemptions,
                    "prefix_hit_rate": run.prefix_hit_rate,
                }
            )
        steps += first.measure_steps(loads["calibration"].load.draw(600 + repeat), None)
        costs = fit_costs(steps, first.llm.core.model)
        assert costs is not None, "too few steps"
        assert target.parameters is not None
        reached = efficiency(costs, SHEET, source="this run")
        time = roofline(target, first.llm.core.model.layout, SHEET, reached)
        print(f"repeat {repeat}: {costs}", flush=True)
        for name, server in servers.items():
            predicted[name].append(simulated(server, loads[name].load.draw(repeat), time))
    for server in servers.values():
        server.close()
    return [_row(name, kv, found[name], predicted[name]) for name in loads]


def _row(name: str, kv: str, found: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"load": name, "kv": kv, "repeats": len(found), "holds": True}
    for figure in (*FIGURES, "preemptions", "prefix_hit_rate"):
        row[figure] = median(one[figure] for one in found)
        row[f"simulated_{figure}"] = median(one[figure] for one in predicted)
    for figure, most in FIGURES.items():
        ratios = [p[figure] / f[figure] for p, f in zip(predicted, found, strict=True)]
        row[f"ratio_{figure}"] = median(ratios)
        row["holds"] &= abs(median(ratios) - 1) <= most
    return row


def memory(folder: str) -> list[dict[str, Any]]:
    """A row for each model and format: every term, as `kvq plan --verify` finds it."""
    rows = []
    with TemporaryDirectory() as scratch:
        for name, options in verified_models(folder, Path(scratch)).items():
            path = Path(scratch) / "verified.json"
            command = ["plan", "--verify", "--kv", VERIFIED, *options, "--json", str(path)]
            subprocess.run([sys.executable, "-m", "kvq", *command], check=False)
            found = json.loads(path.read_text(encoding="utf-8"))["rows"]
            rows += [{"model": name, **row} for row in found]
    return rows


def verified_models(folder: str, scratch: Path) -> dict[str, list[str]]:
    """Return options of `kvq plan` by model: plain, quantized, with windows, with experts."""
    quantize(folder, scratch / "int4", "rtn", bits=4)
    pool = ["--kv-memory", "512MiB"]
    found = {
        "tiny": ["-m", "tiny", *pool],
        "benchmark": ["-m", folder, *pool],
        "benchmark, int4 files": ["-m", str(scratch / "int4"), *pool],
        "benchmark, --weights int8": ["-m", folder, "--weights", "int8", *pool],
    }
    size = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    size |= {"max_position_embeddings": 4096, "sliding_window": 512, "head_dim": 64}
    experts = {"num_local_experts": 8}
    for family, more in {"gemma2": {}, "gpt_oss": experts, "mistral": {}}.items():
        config = AutoConfig.for_model(family, **size, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(scratch / family)
        found[f"{family}, windows of 512"] = ["-m", str(scratch / family), *pool]
    return found


def users(folder: str) -> list[dict[str, Any]]:
    """A row for each format and block size: who is preempted among as many as planned, and 5% more."""
    rows = []
    for kv in FORMATS:
        for block_size in BLOCK_SIZES:
            engine = Engine(
                block_size=block_size, step_tokens=8192, sequences=64, runtime_bytes=0, memory_fraction=1.0
            )
            large = _plan(folder, kv, 100.0, engine)
            each = large.users.bytes_per_request
            other = sum(term.nbytes for term in large.terms if term.name not in ("KV pool", "left free"))
            fitting = _plan(folder, kv, (other + 24.5 * each) / 1e9, engine)
            options = {
                "num_blocks": fitting.num_blocks[0],
                "max_num_seqs": 64,
                "max_num_batched_tokens": 8192,
            }
            with LLM(folder, kv, block_size=block_size, **options) as llm:
                fits = fitting.users.paged
                preempted = [_preempted(llm, count) for count in (fits, -(-fits * 21 // 20))]
            rows.append(
                {
                    "kv": kv,
                    "block_size": block_size,
                    "users": fits,
                    "preempted": preempted[0],
                    "preempted_of_5_percent_more": preempted[1],
                    "holds": preempted[0] == 0 < preempted[1],
                }
            )
    return rows


def _plan(folder: str, kv: str, memory_gb: float, engine: Engine) -> CapacityPlan:
    gpu = replace(SHEET, memory_gb=memory_gb)
    return plan(folder, gpu=gpu, kv=kv, context=CONTEXT, output=OUTPUT, weights="fp32", engine=engine)


def _preempted(llm: LLM, count: int) -> int:
    """Preemptions among so many requests that arrive together."""
    counters, vocabulary = llm.core.scheduler.counters, llm.model.geometry.vocab_size
    before = counters.preemptions
    prompts = [[(7 * user + i) % vocabulary for i in range(CONTEXT - OUTPUT)] for user in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0))
    llm.core.scheduler.manager.drop_cached()
    return counters.preemptions - before


def predicted(folder: str, kv: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each load and format."""
    model = load(folder)
    return [row for name in kv.split(",") for row in compare(model, folder, name, repeats)]


def scale(
    number: int, *, seconds: float | None = None, gigabytes: float | None = None
) -> list[dict[str, Any]]:
    """Measure time and memory of a number of simulated requests on one core."""
    before = perf_counter()
    command = f"simulate -m llama-3-8b --gpu h100 --kv int4 --rate 35 --requests {number}"
    out = subprocess.check_output([sys.executable, "-m", "kvq", *command.split()], text=True)
    took = perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(out)
    return [
        finding("requests", number, f"{number:,}", out.splitlines()[0].endswith(" s")),
        finding(
            "seconds", took, "" if seconds is None else f"{seconds:g}", seconds is None or took < seconds
        ),
        finding("peak GB", peak, "" if gigabytes is None else f"{gigabytes:g}", peak < (gigabytes or 1e9)),
    ]


def finding(what: str, found: float, asked: str, holds: bool, **more: Any) -> dict[str, Any]:
    """One row."""
    return {"what": what, "found": found, "asked": asked, "holds": holds, **more}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--parts", default="memory,users,scale,million,predicted")
    parser.add_argument("--kv", default="fp32", help="of the predicted loads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    source_commit()
    given.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "memory": lambda: memory(given.model),
        "users": lambda: users(given.model),
        "scale": lambda: scale(100_000, seconds=120),
        "million": lambda: scale(1_000_000, gigabytes=2),
        "predicted": lambda: predicted(given.model, given.kv, given.repeats),
    }
    for part in given.parts.split(","):
        began = perf_counter()
        rows = parts[part]()
        facts = {"model": load(given.model).description, "seconds": perf_counter() - began}
        result = envelope(sys.argv, torch.device("cpu"), rows, facts)
        write_json(given.out / f"capacity-{part}-cpu.json", result)
        print(part)
        for row in rows:
            verdict = "holds" if row["holds"] else "FALLS SHORT"
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "holds"}
            print(f"  {verdict:<12}{shown}")


if __name__ == "__main__":
    main()
