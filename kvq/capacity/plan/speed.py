"""How fast a plan serves: its steps on the roofline."""

from collections.abc import Callable, Sequence
from statistics import fmean

from kvq.capacity.plan.gpus import check_positive
from kvq.capacity.plan.lengths import Length
from kvq.capacity.plan.roofline import Serving, steady_state
from kvq.capacity.plan.step_time import StepTime


def serving(time: StepTime, lengths: Sequence[Length], *, users: int, prefix_share: float = 0.0) -> Serving:
    """What `users` at once see, on average over the lengths; a shared prefix is computed by nobody."""
    halfway = [x.prompt + x.output // 2 for x in lengths]
    seen = [users * tokens / len(lengths) for tokens in time.seen(halfway)]
    step = time.linear_s(users) + users * time.sequence_s
    step += sum(each * tokens for each, tokens in zip(time.read_s, seen, strict=True))
    prompt = fmean([time.prompt_s(int(x.prompt * prefix_share), x.prompt) for x in lengths])
    output = max(1.0, fmean([float(x.output) for x in lengths]))
    return steady_state(users=users, step_s=step, prefill_s=prompt, output_tokens=output)


def at_rate(serve: Callable[[int], Serving], rate: float, *, most: int) -> Serving | None:
    """What requests see that arrive at `rate` a second; None where `most` side by side don't keep up.

    `serve`: what so many at once see.

    The fewest side by side whose throughput is the rate: by Little's law as many as are there on average.

    Raises:
        ConfigError: the rate is not above 0.
    """
    check_positive("the rate", rate)
    if most < 1 or serve(most).requests_per_s < rate:
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if serve(middle).requests_per_s >= rate:
            high = middle
        else:
            low = middle
    return serve(high)
