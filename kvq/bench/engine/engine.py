"""`kvq bench engine`: the engine under load, with KV formats and rivals alternating on the same load."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvq.bench.engine.load import Load, ServedLoad, is_saturated, mark, row
from kvq.bench.engine.rivals import RIVALS, Server, check_requests, compare, one_by_one, open_rivals
from kvq.bench.engine.server import KvqServer
from kvq.bench.engine.step_costs import fit_costs
from kvq.bench.timing import in_turn
from kvq.engine import EngineConfig
from kvq.errors import ConfigError, unknown
from kvq.evals.watch import UNWATCHED, Watch
from kvq.models import Model

_Checks = dict[Server, dict[str, Any]]  # server -> results of its check before timing
_Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Plan of one benchmark: a load, the engine's configuration, rivals and goals.

    `users`: numbers of concurrent users in closed loops, in ascending order; if empty, requests are sent at
    their arrival times. With several numbers, a server is no longer measured once its throughput stops
    growing.
    """

    load: Load
    config: EngineConfig
    users: tuple[int, ...] = ()
    rivals: tuple[str, ...] = ()
    repeats: int = 3
    step_costs: bool = False  # measure the costs of the parts of kvq's steps, in an extra run
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name in self.rivals:
            if name not in RIVALS:
                raise ConfigError(unknown("rival", name, ["none", *RIVALS]))
        if list(self.users) != sorted(set(self.users)) or any(n < 1 for n in self.users):
            raise ConfigError(f"concurrencies must rise from 1 or more, got {self.users}")
        if self.users and max(self.users) > self.load.num_requests:
            raise ConfigError(
                f"{self.load.num_requests} requests can't keep {max(self.users)} users busy; "
                f"give at least as many requests as the highest concurrency"
            )

    @property
    def levels(self) -> tuple[int | None, ...]:
        """Concurrencies to measure, or (None,) if requests are sent at their arrival times."""
        return self.users or (None,)


def bench_engine(model: Model, formats: Sequence[str], plan: EnginePlan, watch: Watch = UNWATCHED) -> _Rows:
    """Check all formats and rivals, measure them alternately, and return their rows.

    In each repeat, all servers run one after another, and each repeat begins with a different server. After
    every run, `watch` receives the rows so far.

    Raises:
        ConfigError: a format or a limit can't be used.
        OutOfMemory: a pool doesn't fit.
        EngineError: a server generates wrong tokens, or a request fails.
    """
    with _servers(model, formats, plan) as (checks, refused):
        servers = list(checks)
        found = {(server.name, server.kv): check for server, check in checks.items()}

        def whole(rows: _Rows) -> _Rows:
            nothing = {key: None for one in rows for key in one}
            for one in rows:
                one.update(found[one["name"], one["kv"]])
            mark(rows, ttft_ms=plan.slo_ttft_ms, itl_ms=plan.slo_itl_ms)
            return [*rows, *(nothing | one for one in refused)]

        rows = whole(_measure(servers, plan, watch.through(whole)))
        costs = _step_costs(servers, plan) if plan.step_costs else {}
    for one in rows:
        if one["name"] == "kvq" and one["kv"] in costs:
            one["step_costs"] = costs[one["kv"]]
    return rows


@contextmanager
def _servers(model: Model, formats: Sequence[str], plan: EnginePlan) -> Iterator[tuple[_Checks, _Rows]]:
    """Open and check all servers; yield them with their check results, and rows for rivals that can't run."""
    requests = plan.load.draw(0)
    few = check_requests(requests)
    checks: _Checks = {}
    refused: _Rows = []
    with ExitStack() as stack:
        for kv in formats:
            server = KvqServer(model, kv, plan.config, requests)
            stack.callback(server.close)
            together = [output.token_ids for output in server.generate(few)]
            check = compare(f"kvq {kv}", model, one_by_one(server, few), together)
            checks[server] = check | server.graphs
        for rival, found in open_rivals(plan.rivals, model, plan.config, few):
            if rival is None:
                refused.append(found)
            else:
                checks[rival] = found
        yield checks, refused


def _step_costs(servers: Sequence[Server], plan: EnginePlan) -> dict[str, dict[str, Any] | None]:
    """Fit the step costs of each kvq format to the steps of one run at every concurrency."""
    requests = plan.load.draw(plan.repeats)
    return {
        server.kv: fit_costs(
            [step for users in plan.levels for step in server.measure_steps(requests, users)],
            server.llm.core.model,
        )
        for server in servers
        if isinstance(server, KvqServer)
    }


def _measure(servers: Sequence[Server], plan: EnginePlan, watch: Watch) -> _Rows:
    """Measure each concurrency in turn: each repeat runs all servers that are not yet saturated."""
    runs: dict[tuple[Server, int | None], list[ServedLoad]] = {}

    def rows(of: Sequence[Server] = servers) -> _Rows:
        measured = [(server, users) for server in of for users in plan.levels if (server, users) in runs]
        return [row(server.name, server.kv, runs[server, users], users) for server, users in measured]

    done, total = 0, len(plan.levels) * plan.repeats * len(servers)
    for users in plan.levels:
        left = [server for server in servers if not is_saturated(rows([server]))]
        done += plan.repeats * (len(servers) - len(left))
        for repeat, server in in_turn(left, plan.repeats):
            served = server.run(plan.load.draw(repeat), users)
            runs.setdefault((server, users), []).append(served)
            done += 1
            watch.progress(done, total)
            watch.keep(rows)
    return rows()
