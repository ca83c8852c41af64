"""Compare Ray's routers over kvq replicas with what `kvq simulate` says of them before.

    python tools/make_bench_model.py --out /tmp/bench-model
    build/scale/ray/bin/python -m benchmarks.ray_routing --model /tmp/bench-model

Two replicas of one thread each. Prompts begin with one of some prefixes, of which a replica's pool holds
about a fourth: whoever sends a prefix to the same replica every time finds it there more often. For each
router the costs of steps are measured on one engine, it is simulated, and then served by a real Ray, which
an OpenAI client asks over HTTP at the very times of the simulation. What the way through HTTP and Ray takes
is no matter of the simulation: it is measured with short prompts, one at a time, before the load (`way_ms`),
and added to the times that were simulated. Writes benchmarks/results/ray-routing-cpu.json.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import openai
import torch

from kvq.bench.engine.load import Load
from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.step_costs import fit_costs
from kvq.capacity.fleet.arrivals import Arrivals, Call
from kvq.capacity.fleet.fleet import FleetSpec, serve
from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.fleet.routing import Routing
from kvq.capacity.lengths import Lengths
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.step_time import efficiency, roofline
from kvq.capacity.plan.target import make_target
from kvq.engine import EngineConfig
from kvq.evals.report.results import envelope, source_commit, write_json
from kvq.models import Model, load
from tests.scale.ray.cluster import local_ray

RESULTS = Path(__file__).resolve().parent / "results"
SHEET = Gpu(name="this CPU", memory_gb=1.0, bandwidth_tb_s=1.0, usd_per_hour=1.0, tflops={"fp16": 10.0})
PROMPT, OUTPUT, SHARED, PREFIXES = 640, 8, 0.8, 16  # tokens, tokens, of the prompt, different ones
BLOCKS, SEATS, REPLICAS = 160, 4, 2
SHORT, NUM_SHORT = 16, 12  # tokens of a prompt, and prompts, for what the way to an engine takes
MOST_OFF = 0.15


def calls(model: Model, rate: float, number: int, seed: int) -> list[Call]:
    """Requests whose token ids the model knows."""
    arrivals = Arrivals(
        rate=rate,
        input_lengths=Lengths(low=PROMPT, high=PROMPT),
        output_lengths=Lengths(low=OUTPUT, high=OUTPUT),
        max_context=2 * PROMPT,
        shared_prefix=SHARED,
        num_prefixes=PREFIXES,
    )
    vocabulary = model.geometry.vocab_size
    drawn = arrivals.calls(number, seed)
    return [replace(call, prompt=array("I", [id % vocabulary for id in call.prompt])) for call in drawn]


def measured_engine(model: Model, folder: str, kv: str) -> EngineSpec:
    """One replica as the simulation has it, with the costs of this machine's steps."""
    length = Lengths(low=PROMPT // 5, high=PROMPT)
    mixed = Load(
        num_requests=24,
        input_lengths=length,
        output_lengths=Lengths(low=OUTPUT, high=4 * OUTPUT),
        vocab_size=model.geometry.vocab_size,
        max_context=model.weights.max_context,
        rate=2.0,
        seed=7,
    )
    server = KvqServer(model, kv, EngineConfig(num_blocks=BLOCKS, max_num_seqs=SEATS), mixed.draw(0))
    server.run(mixed.draw(1000), None)
    costs = fit_costs(server.measure_steps(mixed.draw(0), None), server.llm.core.model)
    assert costs is not None, "too few steps"
    target = make_target(folder, weights="fp32")
    reached = efficiency(costs, SHEET, source="this run")
    scheduler = server.llm.core.scheduler
    spec = EngineSpec(
        num_blocks=[pool.num_blocks for pool in scheduler.manager.pools],
        block_size=scheduler.manager.block_size,
        config=scheduler.config,
        time=roofline(target, server.llm.core.model.layout, SHEET, reached),
    )
    server.close()
    return spec


def short_calls() -> list[Call]:
    """Prompts so far apart that none waits for another."""
    prompts = [array("I", [number] * SHORT) for number in range(NUM_SHORT)]
    return [
        Call(number=number, arrival_s=60.0 * number, prompt=prompt, output_tokens=OUTPUT)
        for number, prompt in enumerate(prompts)
    ]


def simulated(engine: EngineSpec, load: Sequence[Call], routing: Routing) -> dict[str, float]:
    """Simulate what is to be expected."""
    run = serve(load, FleetSpec(engine=engine, replicas=REPLICAS, routing=routing))
    records = run.records
    waited = [first - came for first, came in zip(records.first_s, records.arrival_s, strict=True)]
    return figures(waited, sum(records.cached_tokens), sum(records.prompt_tokens))


def figures(ttft_s: Sequence[float], cached: int, prompts: int) -> dict[str, float]:
    return {
        "prefix_hit_rate": cached / prompts,
        "ttft_ms_mean": 1e3 * mean(ttft_s),
        "ttft_ms_p50": 1e3 * median(ttft_s),
    }


def served(url: str, load: Sequence[Call], folder: str, kv: str, routing: Routing) -> dict[str, float]:
    """Serve by Ray, called by OpenAI's client; `short_ms`: to the first token of a short prompt alone."""
    from ray import serve as ray_serve

    from kvq.integrations.ray import application

    name = f"kvq-{routing.value}"
    app = application(
        folder,
        kv,
        served_model_name="model",
        num_replicas=REPLICAS,
        router=routing.value,
        ray_actor_options={"num_cpus": 1},
        engine={"num_blocks": BLOCKS, "max_num_seqs": SEATS},
    )
    ray_serve.run(app, name=name)
    try:
        return asyncio.run(_ask_all(url, load))
    finally:
        ray_serve.delete(name)


async def _ask_all(url: str, load: Sequence[Call]) -> dict[str, float]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        short = [await _ask(client, list(call.prompt)) for call in short_calls()]
        begin = perf_counter()

        async def at_its_time(call: Call) -> tuple[float, int, int]:
            await asyncio.sleep(call.arrival_s - load[0].arrival_s - (perf_counter() - begin))
            return await _ask(client, list(call.prompt))

        found = await asyncio.gather(*[at_its_time(call) for call in load])
    waited, cached, prompts = zip(*found, strict=True)
    short_ms = 1e3 * median(ttft_s for ttft_s, _, _ in short[2:])  # each replica's first one is slower
    return {"short_ms": short_ms} | figures(waited, sum(cached), sum(prompts))


async def _ask(client: openai.AsyncOpenAI, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, cached tokens, tokens of the prompt."""
    began, first, usage = perf_counter(), None, None
    stream = await client.completions.create(
        model="model",
        prompt=prompt,
        max_tokens=OUTPUT,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        first = first or perf_counter() - began
        usage = chunk.usage or usage
    assert first is not None
    assert usage is not None
    return first, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def compare(
    folder: str, kv: str, rate: float, number: int, routers: Sequence[Routing], only_simulate: bool
) -> list[dict[str, Any]]:
    """A row for each router."""
    model = load(folder)
    requests = calls(model, rate, number, seed=0)
    rows = []
    with contextlib.nullcontext("") if only_simulate else local_ray() as url:
        for routing in routers:
            engine = measured_engine(model, folder, kv)
            expected = simulated(engine, requests, routing)
            alone = simulated(engine, short_calls(), routing)["ttft_ms_p50"]
            print(f"{routing.value}: expected {expected}, {alone} ms for a short prompt", flush=True)
            if only_simulate:
                continue
            found = served(url, requests, folder, kv, routing)
            way_ms = found.pop("short_ms") - alone
            expected = {k: v + way_ms if k.startswith("ttft") else v for k, v in expected.items()}
            row = {"routing": routing.value, "kv": kv, "requests": number, "rate": rate, **found}
            row |= {f"simulated_{name}": value for name, value in expected.items()} | {"way_ms": way_ms}
            row |= {f"ratio_{name}": expected[name] / value for name, value in found.items()}
            row["holds"] = all(abs(row[f"ratio_{name}"] - 1) <= MOST_OFF for name in found)
            rows.append(row)
            print(row, flush=True)
    for figure in ("ttft_ms_p50", "simulated_ttft_ms_p50"):
        best = min(rows, key=lambda row: row[figure], default=None)
        for row in rows:
            row["wins" if figure == "ttft_ms_p50" else "simulated_wins"] = row is best
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--routers", default="round-robin,two-choices,affinity")
    parser.add_argument("--simulate", action="store_true", help="only that")
    parser.add_argument("--out", type=Path, default=RESULTS / "ray-routing-cpu.json")
    given = parser.parse_args()
    source_commit()
    torch.set_num_threads(1)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Ray shows what libraries log
    routers = [Routing(name) for name in given.routers.split(",")]
    rows = compare(given.model, given.kv, given.rate, given.requests, routers, given.simulate)
    if rows:
        facts = {"model": load(given.model).description}
        write_json(
            given.out,
            envelope(["benchmarks/ray_routing.py", *sys.argv[1:]], torch.device("cpu"), rows, facts),
        )


if __name__ == "__main__":
    main()
