"""Study of `kvq simulate`: one load, served by a simulated fleet in each KV format and policy."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice, product, starmap
from typing import Any, NamedTuple

from kvq.capacity.fleet.agents import agent_calls, read_agents
from kvq.capacity.fleet.arrivals import Arrivals, traced
from kvq.capacity.fleet.drafting import parse_drafting
from kvq.capacity.fleet.faults import NONE, Faults
from kvq.capacity.fleet.fleet import FleetSpec, Load, fewest_replicas, serve
from kvq.capacity.fleet.memory import TierSpec
from kvq.capacity.fleet.records import costs, summarize
from kvq.capacity.fleet.replica import EngineSpec
from kvq.capacity.fleet.routing import Routing
from kvq.capacity.lengths import Demand, Length, parse_lengths, read_lines
from kvq.capacity.plan.gpus import Gpu, Prices
from kvq.capacity.plan.plan import CapacityPlan, make_plan
from kvq.commands.capacity.simulate_options import SimulateOptions
from kvq.commands.capacity.sizing import SizingOptions
from kvq.commands.shared.declare import given_options, picked
from kvq.errors import ConfigError
from kvq.scheduler import SchedulerConfig
from kvq.sizes import parse_bytes
from kvq.sizing.memory import kv_layout, split_geometry
from kvq.sizing.needs import bytes_of
from kvq.sizing.pools import BESIDE, rung_bytes
from kvq.tiers.folder import least_segment

_MOST_ROWS = 64
_MAX_NUM_SEQS = 256
_REQUESTS = 2000
_DRAWN = {"input_len", "output_len", "shared_prefix", "num_prefixes", "turns", "think_s", "batch_share"}


class _Case(NamedTuple):
    """KV format, policies and replica count for one row of the results table."""

    kv: str
    chunk: int
    routing: Routing
    replicas: int
    host_bytes: int
    disk_bytes: int


class Study:
    """Settings common to all rows: a model on a GPU, a load, goals and prices."""

    def __init__(self, sizing: SizingOptions, options: SimulateOptions, api: Prices | None) -> None:
        """Check the settings, and raise ConfigError if they can't be simulated."""
        self._sizing, self._options, self._api = sizing, options, api
        if options.overflow_waiting is not None and api is None:
            raise ConfigError(
                "--overflow-waiting sends requests to an API: give --api-input and --api-output"
            )
        self._gpu = _one_gpu(sizing)
        self._target = sizing.target()
        self._ttft_slo_s, self._itl_slo_s = _slos(options)
        self._drafting = parse_drafting(options.speculation, "--speculation", options.seed)
        self._max_num_seqs = sizing.sequences or _MAX_NUM_SEQS
        most = self._target.geometry.max_context
        self._context = sizing.max_context or most
        if self._context > most:
            raise ConfigError(f"--max-model-len {self._context} is above the model's context of {most}")
        self.num_requests, self._draw = _load(options, self._context)

    def cases(self, kv: list[str]) -> list[_Case]:
        """Return all combinations of formats, policies and replica counts."""
        options = self._options
        if options.meet is not None and options.replicas is not None:
            raise ConfigError("--meet finds the number of replicas; leave --replicas out")
        if (least := min(options.max_num_batched_tokens)) < self._max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {least} is below --max-num-seqs {self._max_num_seqs}, of which "
                f"each adds a token to a step; lower that too"
            )
        routings, replicas = map(Routing, options.routing), options.replicas or (1,)
        tiers = [{parse_bytes(size, "it") for size in sizes} for sizes in (options.kv_host, options.kv_disk)]
        formats, chunks = self._target.formats(kv), options.max_num_batched_tokens
        combined = product(formats, chunks, routings, replicas, *map(sorted, tiers))
        cases = list(starmap(_Case, combined))
        if len(cases) > _MOST_ROWS:
            raise ConfigError(f"{len(cases)} combinations are too many to simulate; at most {_MOST_ROWS}")
        return cases

    def row(self, case: _Case, arrived: Callable[[int], object]) -> dict[str, Any]:
        """Simulate one case, calling `arrived` with the number of requests that have arrived so far.

        Raises:
            ConfigError: the model doesn't fit, or no number of replicas meets the goals.
        """
        options, gpu = self._options, self._gpu
        plan = make_plan(
            self._target,
            gpu,
            case.kv,
            Demand(lengths=[Length(self._context - 1, 1)]),
            engine=self._sizing.engine(case.chunk, sequences=self._max_num_seqs),
            efficiency=self._sizing.efficiency(gpu, case.kv),
        )
        spec = replace(self._engine(plan), tiers=self._tiers(case, plan))
        transferred_bytes = plan.kv_bytes_per_token * plan.split.gpus
        runs = 0

        def serve_with(replicas: int) -> dict[str, Any]:
            nonlocal runs
            runs += 1
            fleet = FleetSpec(
                engine=spec,
                replicas=replicas,
                routing=case.routing,
                transfer_token_s=transferred_bytes / (1e9 * options.transfer_gb_s),
                faults=Faults(seed=options.seed) if options.faults else NONE,
                **picked(options, "prefill_replicas", "overflow_waiting", "seed"),
            )
            gpus = fleet.engines * plan.split.gpus
            run = serve(self._draw(), fleet, progress=arrived)
            figures = summarize(run, ttft_slo_s=self._ttft_slo_s, itl_slo_s=self._itl_slo_s)
            figures |= costs(run, gpu.usd_per_hour * gpus, self._api)
            return {"replicas": replicas, "gpus": gpus, **figures}

        if options.meet is None:
            figures = serve_with(case.replicas)
        else:
            _, figures = fewest_replicas(serve_with, options.meet)
        return {
            "model": plan.model,
            "gpu": plan.gpu,
            "kv": case.kv,
            "max_num_batched_tokens": case.chunk,
            "routing": case.routing.value,
            "kv_host": case.host_bytes,
            "kv_disk": case.disk_bytes,
            "prefill_replicas": options.prefill_replicas,
            "speculation": None if self._drafting is None else options.speculation,
            "num_blocks": spec.num_blocks,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "runs": runs,
            **figures,
        }

    def _engine(self, plan: CapacityPlan) -> EngineSpec:
        """Return the fleet's engine, with the pools and step times of a plan."""
        assert plan.time is not None, "the model's parameters are known"
        config = SchedulerConfig(
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=plan.step_tokens,
            max_context=self._context,
            prefix_caching=self._options.prefix_caching,
            itl_slo_s=self._itl_slo_s,
            ttft_slo_s=self._ttft_slo_s,
        )
        return EngineSpec(
            num_blocks=list(plan.num_blocks),
            block_size=self._sizing.block_size,
            config=config,
            time=plan.time,
            drafting=self._drafting,
        )

    def _tiers(self, case: _Case, plan: CapacityPlan) -> TierSpec:
        """Return what an engine has beyond its pools. Sizes are of all of a replica's GPUs."""
        geometry, size = split_geometry(self._target.geometry, self._target.split), self._sizing.block_size
        names = [case.kv, *filter(None, self._options.kv_ladder.split(","))]
        layouts = [kv_layout(geometry, name.strip(), block_size=size) for name in names]
        block_bytes, rungs = layouts[0].holding["block_bytes"], rung_bytes(layouts)
        host, disk, groups = case.host_bytes // plan.split.gpus, case.disk_bytes // plan.split.gpus, None
        if disk:
            least_segment(disk, max(block_bytes))
        if layouts[1:] and not host and not disk:  # as in the engine
            host = bytes_of(layouts[0], plan.num_blocks) // BESIDE
            groups = {*range(len(plan.num_blocks))} - rungs.keys()
        return TierSpec(block_bytes=block_bytes, rungs=rungs, host_bytes=host, disk_bytes=disk, groups=groups)


def _one_gpu(sizing: SizingOptions) -> Gpu:
    gpu, *more = sizing.gpus()
    if more:
        raise ConfigError("one --gpu is simulated at a time, got several; compare them with kvq plan")
    if sizing.pipeline_parallel > 1:
        raise ConfigError(
            "stages of a pipeline compute different steps at the same time, which is not simulated; split "
            "the model by --tensor-parallel, or plan it with kvq plan"
        )
    return gpu


def _load(options: SimulateOptions, context: int) -> tuple[int, Callable[[], Load]]:
    """Return the number of requests, and a function that yields the same requests on every call."""
    path, rate, seed = options.trace, options.rate, options.seed
    if path is not None:
        if wrong := sorted(spelled for name, spelled in given_options().items() if name in _DRAWN):
            raise ConfigError(f"--trace has the requests already; leave out {', '.join(wrong)}")
        with path.open(encoding="utf-8", errors="replace") as file:
            is_agents = '"format_version"' in file.readline(4096)
        if is_agents:
            if rate or options.requests or options.prefill_replicas:
                raise ConfigError("agents' traces exclude --rate, --requests and --prefill-replicas")
            turns = read_agents(path)
            return len(turns), lambda: partial(agent_calls, turns)
        number = sum(1 for _ in read_lines(path))  # checks every line before any work
        if not number:
            raise ConfigError(f"{path} has no requests")
        number = min(number, options.requests or number)
        return number, lambda: islice(traced(path, max_context=context, rate=rate, seed=seed), number)
    if rate is None:
        raise ConfigError("arrival times decide how long requests wait: give --rate or --trace")
    number = options.requests or _REQUESTS
    arrivals = Arrivals(
        rate=rate,
        input_lengths=parse_lengths(options.input_len, "--input-len"),
        output_lengths=parse_lengths(options.output_len, "--output-len"),
        max_context=context,
        **picked(options, "shared_prefix", "num_prefixes", "turns", "think_s", "batch_share"),
    )
    return number, lambda: arrivals.calls(number, seed)


def _slos(options: SimulateOptions) -> tuple[float | None, float | None]:
    """Return the limits on TTFT and ITL in seconds, each None if it was not given."""
    ttft, itl = options.slo_ttft_ms, options.slo_itl_ms
    if options.meet is not None and ttft is None and itl is None:
        raise ConfigError("--meet needs a goal: --slo-ttft-ms, --slo-itl-ms or both")
    return None if ttft is None else ttft / 1e3, None if itl is None else itl / 1e3
