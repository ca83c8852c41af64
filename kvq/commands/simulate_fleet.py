"""`kvq simulate --model ... --gpu ...`: KV formats and policies under one load."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from kvq.commands.results import result_of
from kvq.commands.screen import echo
from kvq.commands.sizing import find_efficiency, find_gpus, make_engine, make_target
from kvq.errors import ConfigError
from kvq.extras import PLOTS, require
from kvq.sizes import dollars

if TYPE_CHECKING:
    from kvq.capacity.fleet.call import Call
    from kvq.capacity.fleet.routing import Routing
    from kvq.capacity.fleet.summary import Slo
    from kvq.capacity.plan.cost import Prices
    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.plan import Target

_MOST_ROWS = 64
_DRAWN = {"input_len", "output_len", "shared_prefix", "num_prefixes", "turns", "think_s", "batch_share"}
_PROGRESS_EVERY = 100  # requests


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """What distinguishes a row."""

    kv: str
    chunk: int
    routing: "Routing"
    replicas: int


def run(options: dict[str, Any]) -> None:
    """Simulate every combination, print a table, write files."""
    from kvq.commands.finished import FinishedRows
    from kvq.commands.progress import progress_bar

    if options["html_path"] is not None:
        require("--html", PLOTS)
    gpus = find_gpus(options)
    if len(gpus) > 1:
        raise ConfigError("one --gpu is simulated at a time, got several; compare them with kvq plan")
    (gpu,) = gpus
    if options["pipeline_parallel"] > 1:
        raise ConfigError(
            "stages of a pipeline compute different steps at the same time, which is not simulated; spread "
            "the model by --tensor-parallel, or plan it with kvq plan"
        )
    target = make_target(options)
    slo, prices = _slo(options), _prices(options)
    draw = _load(options, target)
    cases = list(_cases(options))
    rows: list[dict[str, Any]] = []
    refused: list[str] = []

    def show(result: dict[str, Any]) -> None:
        _print(result["rows"], slo)

    with FinishedRows(options["json_path"], result_of, show) as finished:
        with progress_bar("simulating") as bar:
            for number, case in enumerate(cases):
                try:
                    row = _simulate(options, target, gpu, case, draw, slo, prices, number, len(cases), bar)
                    rows.append(row)
                except ConfigError as error:
                    refused.append(str(error))
                finished.keep(rows.copy)
        if not rows:
            raise ConfigError(refused[0])
        result = finished.end(rows)
    for reason in dict.fromkeys(refused):
        echo(f"left out: {reason}", err=True)
    if options["html_path"] is not None:
        from kvq.commands.capacity_report import write_simulation

        write_simulation(options["html_path"], result)


def _simulate(
    options: dict[str, Any],
    target: "Target",
    gpu: "Gpu",
    case: _Case,
    draw: "Callable[[], Iterator[Call]]",
    slo: "Slo",
    prices: "Prices | None",
    number: int,
    total: int,
    progress: Callable[[int, int | None], None],
) -> dict[str, Any]:
    """One row."""
    from kvq.capacity.fleet.build import make_engine as make_simulated
    from kvq.capacity.fleet.fleet import FleetSpec, serve
    from kvq.capacity.fleet.sizing import fewest_replicas
    from kvq.capacity.fleet.summary import Bill, summarize
    from kvq.scheduler import SchedulerConfig

    config = SchedulerConfig(
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=case.chunk,
        max_context=options["max_model_len"],
        prefix_caching=options["prefix_caching"],
        itl_slo_s=slo.itl_s,
        ttft_slo_s=slo.ttft_s,
    )
    spec, plan = make_simulated(
        target,
        gpu,
        case.kv,
        engine=make_engine(options, step_tokens=case.chunk),
        config=config,
        efficiency=find_efficiency(options, gpu, case.kv),
    )
    tried = 0

    def tell(done: int) -> None:
        if done % _PROGRESS_EVERY == 0:
            progress(number * options["requests"] + done, total * options["requests"])

    def serve_with(replicas: int) -> dict[str, Any]:
        nonlocal tried
        tried += 1
        fleet = FleetSpec(
            engine=spec,
            replicas=replicas,
            routing=case.routing,
            prefill_replicas=options["prefill_replicas"],
            transfer_token_s=plan.kv_bytes_per_token * target.split.gpus / (1e9 * options["transfer_gb_s"]),
            overflow_waiting=options["overflow_waiting"],
        )
        gpus = fleet.engines * target.split.gpus
        bill = Bill(usd_per_hour=gpu.usd_per_hour * gpus, api=prices)
        figures = summarize(serve(draw(), fleet, progress=tell), slo, bill)
        return {"replicas": replicas, "gpus": gpus, **figures}

    if options["meet"] is None:
        figures = serve_with(case.replicas)
    else:
        _, figures = fewest_replicas(serve_with, options["meet"])
    return {
        "model": target.name,
        "gpu": gpu.name,
        "kv": case.kv,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "routing": case.routing.value,
        "prefill_replicas": options["prefill_replicas"],
        "num_blocks": list(spec.num_blocks),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "runs": tried,
        **figures,
    }


def _load(options: dict[str, Any], target: "Target") -> "Callable[[], Iterator[Call]]":
    """A function that draws the same load every time; completes the options that it depends on."""
    from itertools import islice

    from kvq.capacity.draws import parse_lengths
    from kvq.capacity.fleet.arrivals import Arrivals, traced
    from kvq.capacity.trace_file import read_lines

    most = target.geometry.max_context
    context = options["max_model_len"] = options["max_model_len"] or most
    options["max_num_seqs"] = options["max_num_seqs"] or 256
    if context > most:
        raise ConfigError(f"--max-model-len {context} is above the model's context of {most}")
    path, seed = options["trace"], options["seed"]
    if path is not None:
        if wrong := sorted(_DRAWN & options["given"]):
            names = ", ".join("--" + name.replace("_", "-") for name in wrong)
            raise ConfigError(f"--trace says what requests are like; leave out {names}")
        number = sum(1 for _ in read_lines(path))  # every line is checked before any work
        if not number:
            raise ConfigError(f"{path} has no requests")
        number = options["requests"] = min(number, options["requests"] or number)
        return lambda: islice(traced(path, max_context=context, rate=options["rate"], seed=seed), number)
    if options["rate"] is None:
        raise ConfigError("when requests come decides how long they wait: give --rate or --trace")
    number = options["requests"] = options["requests"] or 2000
    arrivals = Arrivals(
        rate=options["rate"],
        input_lengths=parse_lengths(options["input_len"] or "lognormal:256:0.7", "--input-len"),
        output_lengths=parse_lengths(options["output_len"] or "lognormal:128:0.7", "--output-len"),
        max_context=context,
        shared_prefix=options["shared_prefix"],
        num_prefixes=options["num_prefixes"],
        turns=options["turns"],
        think_s=options["think_s"],
        batch_share=options["batch_share"],
    )
    return lambda: arrivals.calls(number, seed)


def _cases(options: dict[str, Any]) -> Iterator[_Case]:
    from kvq.capacity.fleet.routing import Routing
    from kvq.errors import nearest

    names = {routing.value: routing for routing in Routing}
    routings = []
    for name in (options["routing"] or "least-loaded").split(","):
        if name.strip() not in names:
            raise ConfigError(
                f"--routing {name!r} is unknown{nearest(name, list(names)) or ';'} known: {', '.join(names)}"
            )
        routings.append(names[name.strip()])
    if options["meet"] is not None and options["replicas"] is not None:
        raise ConfigError("--meet finds the number of replicas; leave --replicas out")
    chunks = _numbers("--max-num-batched-tokens", options["max_num_batched_tokens"] or "2048")
    replicas = _numbers("--replicas", options["replicas"] or "1")
    seats = options["max_num_seqs"]
    if min(chunks) < seats:
        raise ConfigError(
            f"--max-num-batched-tokens {min(chunks)} is below --max-num-seqs {seats}, of which each adds a "
            f"token to a step; lower that too"
        )
    combined = list(product(dict.fromkeys(options["kv"]), chunks, dict.fromkeys(routings), replicas))
    if len(combined) > _MOST_ROWS:
        raise ConfigError(f"{len(combined)} combinations are too many to simulate; at most {_MOST_ROWS}")
    for kv, chunk, routing, count in combined:
        yield _Case(kv=kv, chunk=chunk, routing=routing, replicas=count)


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} takes whole numbers with commas between, got {text!r}") from error
    if min(numbers) < 1:
        raise ConfigError(f"{name} must be at least 1, got {text}")
    return numbers


def _slo(options: dict[str, Any]) -> "Slo":
    from kvq.capacity.fleet.summary import Slo

    ttft, itl = options["slo_ttft_ms"], options["slo_itl_ms"]
    if options["meet"] is not None and ttft is None and itl is None:
        raise ConfigError("--meet needs a goal: --slo-ttft-ms, --slo-itl-ms or both")
    return Slo(ttft_s=None if ttft is None else ttft / 1e3, itl_s=None if itl is None else itl / 1e3)


def _prices(options: dict[str, Any]) -> "Prices | None":
    """Of the API that overflow goes to."""
    from kvq.capacity.plan.cost import Prices

    prices = (options["api_input"], options["api_output"])
    if options["overflow_waiting"] is not None and None in prices:
        raise ConfigError("--overflow-waiting sends requests to an API: give --api-input and --api-output")
    if prices.count(None) == 1:
        raise ConfigError("an API has two prices: give --api-input and --api-output")
    return None if None in prices else Prices(input=prices[0], output=prices[1])


_CHUNK = "max_num_batched_tokens"
_COLUMNS: list[tuple[str, str, str | Callable[[float], str]]] = [  # (heading, key, format or what makes it)
    ("KV", "kv", ""),
    ("GPUs", "gpus", ",d"),
    ("tokens/s", "output_tokens_per_s", ",.0f"),
    ("TTFT p50", "ttft_ms_p50", ",.0f"),
    ("p99, ms", "ttft_ms_p99", ",.0f"),
    ("ITL p50", "itl_ms_p50", ",.1f"),
    ("p99, ms", "itl_ms_p99", ",.1f"),
    ("queued p99", "queue_ms_p99", ",.0f"),
    ("preempted", "preemptions", ",d"),
    ("hits", "prefix_hit_rate", ".0%"),
    ("batch", "mean_batch", ",.1f"),
    ("pool", "peak_pool", ".0%"),
    ("SLO met", "slo_met", ".1%"),
    ("req/s in SLO", "goodput_requests_per_s", ",.2f"),
    ("$ / million", "usd_per_million_tokens", dollars),
]


def _cell(value: Any, how: str | Callable[[float], str]) -> str:
    return format(value, how) if isinstance(how, str) else how(value)


def _print(rows: list[dict[str, Any]], slo: "Slo") -> None:
    from kvq.commands.tables import console, new_table

    out = console()
    first = rows[0]
    out.print(
        f"{first['model']} on {first['gpu']}: {first['requests']:,} requests in {first['seconds']:,.0f} s",
        highlight=False,
    )
    columns = list(_COLUMNS)
    if slo.ttft_s is None and slo.itl_s is None:
        columns = [one for one in columns if one[1] not in ("slo_met", "goodput_requests_per_s")]
    for heading, key in (("chunk", "max_num_batched_tokens"), ("routing", "routing")):
        if len({row[key] for row in rows}) > 1:
            columns.insert(2, (heading, key, ""))
    if rows[0]["handover_ms_p99"] is not None:
        columns.append(("handed over p99", "handover_ms_p99", ",.1f"))
    for name in ("refused", "failed", "overflowed", "cut"):
        if any(row[name] for row in rows):
            columns.append((name, name, ",d"))
    texts = [heading for heading, key, _ in columns if key in ("kv", "routing")]
    table = new_table((heading for heading, _, _ in columns), texts)
    for row in rows:
        cells = ["-" if row[key] is None else _cell(row[key], how) for _, key, how in columns]
        table.add_row(*cells)
    out.print(table)
    for row in rows:
        told = [str(row[key]) for _, key, _ in columns if key in ("kv", "gpus", "routing", _CHUNK)]
        out.print(f"digest {row['digest']}  {', '.join(told)}", highlight=False)
