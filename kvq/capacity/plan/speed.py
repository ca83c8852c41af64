"""Serving speed of a plan, from its steps on the roofline."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from kvq.capacity.lengths import Demand
from kvq.capacity.plan.gpus import check_positive
from kvq.capacity.plan.step_time import StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Latency and throughput of `users` concurrent requests."""

    users: int
    ttft_s: float  # of a prompt computed alone, without a queue
    itl_s: float
    tokens_per_s: float  # of all of them
    requests_per_s: float


def closed_loop(*, users: int, step_s: float, prefill_s: float, output_tokens: float) -> Serving:
    """Return the speed when every request that ends is followed by a new prompt, for which others wait.

    By Little's law `users` = requests a second x seconds of each.
    """
    per_token_s = step_s + users * prefill_s / output_tokens  # between two tokens of one user
    return Serving(
        users=users,
        ttft_s=prefill_s + step_s,
        itl_s=per_token_s,
        tokens_per_s=users / per_token_s,
        requests_per_s=users / per_token_s / output_tokens,
    )


def serving(time: StepTime, demand: Demand, users: int) -> Serving:
    """Return the speed of `users` concurrent requests, averaged over lengths; shared prefixes are cached."""
    lengths = demand.lengths
    halfway = [x.prompt + x.output // 2 for x in lengths]
    seen = [users * tokens / len(lengths) for tokens in time.seen(halfway)]
    step = time.linear_s(users) + users * time.sequence_s
    step += sum(each * tokens for each, tokens in zip(time.read_s, seen, strict=True))
    prompt = fmean([time.prompt_s(int(x.prompt * demand.prefix_share), x.prompt) for x in lengths])
    output = max(1.0, fmean([float(x.output) for x in lengths]))
    return closed_loop(users=users, step_s=step, prefill_s=prompt, output_tokens=output)


def at_rate(serve: Callable[[int], Serving], rate: float, *, most: int) -> Serving | None:
    """Return the speed of requests at `rate` per second; None if `most` concurrent ones don't keep up.

    `serve`: the speed of a number of concurrent requests.

    The fewest side by side whose throughput is the rate: by Little's law as many as are there on average.

    Raises:
        ConfigError: the rate is not above 0.
    """
    check_positive("the rate", rate)
    if most < 1 or serve(most).requests_per_s < rate:
        return None
    fewer = bisect_left(range(1, most), rate, key=lambda users: serve(users).requests_per_s)
    return serve(fewer + 1)
