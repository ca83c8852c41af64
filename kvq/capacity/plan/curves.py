"""What a plan would be for other lengths and other numbers of users, for plots."""

from typing import Any

from kvq.capacity.plan.cost import usd_per_million
from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.lengths import Demand, fixed
from kvq.capacity.plan.plan import CapacityPlan, Engine, make_plan
from kvq.capacity.plan.target import Target

_SHORTEST = 1024  # tokens


def users_by_context(target: Target, gpu: Gpu, kv: str, engine: Engine) -> list[tuple[int, int]]:
    """(context, requests that fit at once), the context doubling up to the longest that the engine takes."""
    longest = min(target.geometry.max_context, engine.max_context or target.geometry.max_context)
    contexts = [min(_SHORTEST, longest)]
    while contexts[-1] < longest:
        contexts.append(min(longest, 2 * contexts[-1]))
    found = []
    for context in contexts:
        plan = make_plan(target, gpu, kv, Demand(lengths=fixed(context)), engine=engine)
        found.append((context, plan.users.paged))
    return found


def speed_by_users(plan: CapacityPlan, usd_per_hour: float) -> list[dict[str, Any]]:
    """Latency and cost as more requests run side by side, doubling up to as many as fit."""
    if plan.serve is None or not plan.users.paged:
        return []
    counts = [1]
    while counts[-1] < plan.users.paged:
        counts.append(min(plan.users.paged, 2 * counts[-1]))
    points = []
    for users in counts:
        served = plan.serve(users)
        points.append(
            {
                "users": users,
                "tokens_per_s": served.tokens_per_s,
                "itl_ms": 1e3 * served.itl_s,
                "usd_per_million_tokens": usd_per_million(usd_per_hour, served.tokens_per_s),
            }
        )
    return points
