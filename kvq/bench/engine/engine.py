"""`kvq bench engine`: the engine as a service, KV formats and rivals in turn under the same load."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvq.bench.engine.load import Load
from kvq.bench.engine.result import ServedLoad, Server, is_saturated, mark, row
from kvq.bench.engine.rivals import RIVALS, Opened, check_requests, compare, one_by_one, open_rivals
from kvq.bench.engine.server import KvqServer, Limits
from kvq.bench.engine.step_costs import fit_costs
from kvq.bench.timing import in_turn
from kvq.errors import ConfigError, nearest
from kvq.models import Model

Progress = Callable[[int, int], object]
Keep = Callable[[Callable[[], list[dict[str, Any]]]], object]  # takes a function that makes the rows so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure. `users`: closed loops of so many at a time, in rising order; empty: as they arrive.

    With several `users` a server stops being measured where its throughput grows no more.
    """

    load: Load
    limits: Limits
    users: tuple[int, ...] = ()
    rivals: tuple[str, ...] = ()
    repeats: int = 3
    step_costs: bool = False  # measure what the parts of kvq's steps take, in one more run
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name in self.rivals:
            if name not in RIVALS:
                raise ConfigError(
                    f"unknown rival {name!r}{nearest(name, list(RIVALS)) or ';'} known: none, "
                    f"{', '.join(RIVALS)}"
                )
        if list(self.users) != sorted(set(self.users)) or any(n < 1 for n in self.users):
            raise ConfigError(f"concurrencies must rise from 1 or more, got {self.users}")
        if self.users and max(self.users) > self.load.num_requests:
            raise ConfigError(
                f"{self.load.num_requests} requests can't keep {max(self.users)} users busy; "
                f"give at least as many requests as the highest concurrency"
            )


def bench_engine(
    model: Model,
    formats: Sequence[str],
    plan: Plan,
    *,
    progress: Progress = lambda done, total: None,
    keep: Keep = lambda make: None,
) -> list[dict[str, Any]]:
    """Rows of all formats and rivals, each checked before any is timed.

    Within each repeat all servers run one after another, each time beginning with the next one. `keep` is
    told after each of them.

    Raises:
        ConfigError: a format or a limit that can't be used.
        OutOfMemory: a pool doesn't fit.
        EngineError: a server gives other tokens than it should, or a request fails.
    """
    with _servers(model, formats, plan) as opened:

        def whole(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            nothing = {key: None for one in rows for key in one}
            refused = [nothing | one for one in opened.refused]
            for one in rows:
                one.update(opened.checks[one["name"], one["kv"]])
            mark(rows, ttft_ms=plan.slo_ttft_ms, itl_ms=plan.slo_itl_ms)
            return [*rows, *refused]

        rows = whole(_measure(opened.servers, plan, progress, lambda make: keep(lambda: whole(make()))))
        costs = _step_costs(opened.servers, plan) if plan.step_costs else {}
    for one in rows:
        if one["name"] == "kvq" and one["kv"] in costs:
            one["step_costs"] = costs[one["kv"]]
    return rows


@contextmanager
def _servers(model: Model, formats: Sequence[str], plan: Plan) -> Iterator[Opened]:
    """Open and check all servers."""
    requests = plan.load.draw(0)
    few = check_requests(requests)
    opened = Opened()
    with ExitStack() as stack:
        for kv in formats:
            server = KvqServer(model, kv, plan.limits, requests)
            stack.callback(server.close)
            together = [output.token_ids for output in server.generate(few)]
            check = compare(f"kvq {kv}", model, one_by_one(server, few), together)
            opened.add(server, check | server.graphs)
        if plan.rivals:
            open_rivals(opened, plan.rivals, model, plan.limits, few)
        yield opened


def _step_costs(servers: Sequence[Server], plan: Plan) -> dict[str, dict[str, Any] | None]:
    """Of kvq's formats, from the steps of one run at every level."""
    requests = plan.load.draw(plan.repeats)
    levels: tuple[int | None, ...] = plan.users or (None,)
    return {
        server.kv: fit_costs(
            [step for users in levels for step in server.measure_steps(requests, users)],
            server.llm.core.model,
        )
        for server in servers
        if isinstance(server, KvqServer)
    }


def _measure(servers: Sequence[Server], plan: Plan, progress: Progress, keep: Keep) -> list[dict[str, Any]]:
    """Level by level, repeat by repeat, server by server."""
    levels: tuple[int | None, ...] = plan.users or (None,)
    runs: dict[tuple[Server, int | None], list[ServedLoad]] = {}

    def rows(of: Sequence[Server] = servers) -> list[dict[str, Any]]:
        measured = [(server, users) for server in of for users in levels if (server, users) in runs]
        return [row(server.name, server.kv, runs[server, users], users) for server, users in measured]

    done, total = 0, len(levels) * plan.repeats * len(servers)
    for users in levels:
        left = [server for server in servers if not is_saturated(rows([server]))]
        done += plan.repeats * (len(servers) - len(left))
        for repeat, server in in_turn(left, plan.repeats):
            served = server.run(plan.load.draw(repeat), users)
            runs.setdefault((server, users), []).append(served)
            done += 1
            progress(done, total)
            keep(rows)
    return rows()
