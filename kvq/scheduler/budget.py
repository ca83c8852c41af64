"""How many prefill tokens a step may take, so that running streams don't stall."""

from math import ceil

from kvq.scheduler.config import SchedulerConfig
from kvq.scheduler.costs import CostModel
from kvq.scheduler.holders import held
from kvq.scheduler.request import Request
from kvq.scheduler.step import Step


def prefill_budget(
    step: Step,
    config: SchedulerConfig,
    costs: CostModel,
    *,
    has_streams: bool,
    oldest: Request | None,
    last: int,
) -> int:
    """Prefill tokens for this step.

    Without interactive streams beside it, as many as a step may hold. With streams, as many as the
    inter-token goal leaves time for: the SLO, else the usual step stretched by `max_step_stretch`. Where
    prefill of any size costs nearly that much, its tokens may take as long again: in smaller chunks the
    streams would be held up more often, for next to nothing.
    `oldest`: the request that has waited longest for its
    first token; when its TTFT goal is in danger it gets a larger share. `last`: prefill tokens of the
    last step beside streams; a step takes twice as many at most, since what more would cost is unknown.
    """
    num_decodes, unfinished = len(step.decodes), step.unfinished
    most = config.max_num_batched_tokens - num_decodes
    if not has_streams:
        return most
    usual = costs.decode_s(num_decodes)
    fixed = costs.prefill_step_s()
    goal = config.itl_slo_s or max(usual * config.max_step_stretch, usual + 2 * fixed)
    depth = held(unfinished[0]).length if unfinished else 0  # position of the next prefill token
    token_s = max(costs.prefill_token_s(depth), 1e-9)
    tokens = min(int((goal - usual - fixed) / token_s), 2 * last)
    if config.ttft_slo_s is not None and oldest is not None:
        left = oldest.arrival_s + config.ttft_slo_s - step.now
        steps = max(1.0, left / max(goal, 1e-9))
        tokens = max(tokens, int(oldest.prompt_length / steps))
    tokens = max(tokens, config.min_chunk)
    return max(0, min(most, ceil(tokens * costs.prefill_share(num_decodes))))
