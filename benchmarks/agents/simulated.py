"""Serve an agent trace, and simulate it, to compare what was measured with what was simulated.

    python -m benchmarks.agents.simulated --trace trace.jsonl --model DIR --json result.json \
        --variant alone '{}' --variant host '{"kv_host": "2GiB"}' \
        --variant ladder '{"kv_ladder": "int4,int3"}'

The engine's clock is the CPU time of this process, of one thread, so other work on the machine hardly counts;
pauses between turns are skipped. A variant is simulated with the costs of steps of the other variants' runs,
so no run predicts itself. Only the speed at which blocks move, or are rewritten, is that of its own run.
`--variant`: a name and options of the engine; there must be two or more. `--kv`: the format of the pool.
"""

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.agents.replay import pool_blocks, random_ids
from benchmarks.agents.trace import Piece, read_trace
from kvq.bench.engine.step_costs import fit_costs
from kvq.bench.timing import percentile
from kvq.blockmgr import Demote, Fill, Order, Pack
from kvq.capacity.fleet.agents import agent_calls, read_agents
from kvq.capacity.fleet.arrivals import Call
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.memory import TierSpec
from kvq.capacity.fleet.records import Fate, Records
from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.step_time import efficiency, roofline
from kvq.capacity.plan.target import make_target
from kvq.engine import EngineConfig, SamplingParams, StepStats
from kvq.engine.requests.outputs import RequestOutput
from kvq.engine.requests.request_options import RequestOptions
from kvq.engine.steps.core import EngineCore
from kvq.evals.report.results import envelope, write_json
from kvq.models import Model, load
from kvq.sizes import parse_bytes
from kvq.sizing.memory import kv_layout
from kvq.sizing.needs import bytes_of
from kvq.sizing.pools import BESIDE, rung_bytes

SHEET = Gpu(name="this CPU", memory_gb=1.0, bandwidth_tb_s=1.0, usd_per_hour=1.0, tflops={"fp16": 10.0})


class Served:
    """One run of an engine whose clock is the CPU time of its steps."""

    def __init__(self, model: Model, trace: Path, options: dict[str, Any], num_blocks: int) -> None:
        """Run to the end."""
        config = EngineConfig(num_blocks=num_blocks, async_scheduling=False, **options)
        self._base_s = 0.0  # until the current step
        self._began_s: float | None = None  # the current step, in CPU time
        self.core = EngineCore(model, config, clock=self._clock)
        self._tokens = random_ids(model.geometry.vocab_size)
        self.records, self.steps = Records(), list[StepStats]()
        self.moved_bytes, self.moved_s = 0, 0.0
        self._submit(self._tokens(Piece(-1, 600)), 8, None)  # to warm up
        while self.core.has_work:
            self._step()
        self._base_s = 0.0
        self._watch()
        self.core.on_step(self._keep)
        for call in agent_calls(read_agents(trace), self.records, self._step, repeats_trace=True):
            self.records.open(call)
            self._base_s = max(self._base_s, call.arrival_s)
            self._submit(self._ids(call), call.output_tokens, call)
        self.core.close()

    def _clock(self) -> float:
        return self._base_s + (0.0 if self._began_s is None else process_time() - self._began_s)

    def _ids(self, call: Call) -> list[int]:
        """Return token ids that are equal where a simulated prompt's are."""
        least, most = 8, self.core.model.geometry.vocab_size
        return [least + token % (most - least) for token in call.prompt]

    def _submit(self, prompt: Any, count: int, call: Call | None) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

        def listen(event: Any) -> None:
            if call is None:
                return
            records, number = self.records, call.number
            if records.first_s[number] != records.first_s[number]:  # NaN: the first token
                records.begin(number, self._clock())
            if isinstance(event, RequestOutput):
                records.cached_tokens[number] = event.receipt.cached_tokens
                records.close(number, Fate.SERVED, self._clock())

        job = self.core.intake.new_job(prompt, RequestOptions(params=params), listener=listen)
        self.core.submit(job, arrival_s=0.0 if call is None else call.arrival_s)

    def _step(self, until: float = inf) -> bool:
        """Run a step that begins before `until`. Return False if there is none."""
        if not self.core.has_work or self._base_s >= until:
            return False
        self._began_s = process_time()
        ran = self.core.step()
        self._base_s, self._began_s = self._clock() + (0.0 if ran else 1e-3), None
        return True

    def _watch(self) -> None:
        """Measure how long blocks take to move, which is no part of the costs of a step."""
        prepare, holding = self.core.runner.prepare, self.core.model.layout.holding
        self._moving_s = 0.0

        def timed(plan: Any) -> Any:
            began, failed = self._clock(), prepare(plan)
            moved = sum(holding["block_bytes"][x.group] * _num_moved(x) for x in plan.orders)
            self._moving_s = self._clock() - began if moved else 0.0
            self.moved_bytes, self.moved_s = self.moved_bytes + moved, self.moved_s + self._moving_s
            return failed

        self.core.runner.prepare = timed  # type: ignore[method-assign]

    def _keep(self, step: StepStats) -> None:
        if step.decode_tokens + step.prefill_tokens:
            self.steps.append(replace(step, seconds=step.seconds - self._moving_s))


def _num_moved(order: Order) -> int:
    if isinstance(order, Pack):
        return len(order.sources)
    return int(isinstance(order, Demote | Fill))


def _figures(records: Records) -> dict[str, float]:
    ttft = [first - sent for first, sent in zip(records.first_s, records.arrival_s, strict=True)]
    return {
        "tokens_per_s": sum(records.output_tokens) / max(records.end_s),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
        "cached_share": sum(records.cached_tokens) / sum(records.prompt_tokens),
    }


def simulate(
    model: Model, trace: Path, options: dict[str, Any], run: Served, steps: list[StepStats]
) -> Records:
    """Simulate a run, with the costs of these steps."""
    costs, target = fit_costs(steps, model), make_target(model.prepared.folder)
    assert costs is not None, "there are enough steps"
    scheduler, layout = run.core.scheduler, model.layout
    num_blocks = [pool.num_blocks for pool in scheduler.manager.pools]
    names = [name for name in options.get("kv_ladder", "").split(",") if name]
    ladder = [layout, *(kv_layout(target.geometry, name) for name in names)]
    host, groups = parse_bytes(options.get("kv_host", "0"), "kv_host"), None
    block_bytes, rungs = layout.holding["block_bytes"], rung_bytes(ladder)
    if names and not host:
        host = bytes_of(layout, num_blocks) // BESIDE
        groups = {*range(len(num_blocks))} - rungs.keys()
    tiers = TierSpec(block_bytes=block_bytes, rungs=rungs, host_bytes=host, groups=groups)
    if run.moved_bytes:
        tiers = replace(tiers, host_s=run.moved_s / run.moved_bytes)
    spec = EngineSpec(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        config=scheduler.config,
        time=roofline(target, layout, SHEET, efficiency(costs, SHEET, source="these runs")),
        tiers=tiers,
    )
    calls = partial(agent_calls, read_agents(trace), repeats_trace=True)
    return serve(calls, FleetSpec(engine=spec)).records


def main() -> None:
    """Run, simulate, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--variant", nargs=2, action="append", required=True, metavar=("NAME", "OPTIONS"))
    parser.add_argument("--demand", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if len(given.variant) < 2:
        raise SystemExit("a variant is simulated with the costs of the others: give two or more")
    torch.set_num_threads(1)
    model = load(given.model, given.kv)
    blocks = pool_blocks(read_trace(given.trace), model.layout.block_size, given.demand)
    variants, runs = {name: json.loads(options) for name, options in given.variant}, dict[str, Served]()
    for name, options in variants.items():
        runs[name] = Served(model, given.trace, options, blocks)
        print(f"{name}: {_figures(runs[name].records)}", flush=True)
    found = []
    for name, options in variants.items():
        others = [step for other, run in runs.items() if other != name for step in run.steps]
        simulated = _figures(simulate(model, given.trace, options, runs[name], others))
        row: dict[str, Any] = {"variant": name, "options": options}
        for figure, value in _figures(runs[name].records).items():
            row |= {figure: value, f"simulated_{figure}": simulated[figure]}
            print(f"{name}: {figure} {value:.3f}, simulated {simulated[figure]:.3f}", flush=True)
        found.append(row)
    if given.json is not None:
        command = ["python", "-m", "benchmarks.agents.simulated", *sys.argv[1:]]
        facts = {"turns": len(read_agents(given.trace)), "pool_blocks": blocks, "clock": "CPU time, 1 thread"}
        write_json(given.json, envelope(command, torch.device("cpu"), found, facts))


if __name__ == "__main__":
    main()
