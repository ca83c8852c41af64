"""Server in a benchmark: kvq's engine with one KV format, stepped by the loop that submits requests."""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, replace
from time import perf_counter, sleep

from kvq.bench.engine.load import ArrivalQueue, LoadRequest, Served, ServedLoad
from kvq.bench.timing import percentile
from kvq.blockmgr import BlockManager
from kvq.engine import LLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams, StepStats
from kvq.engine.requests.outputs import Event
from kvq.engine.requests.request_options import RequestOptions
from kvq.models import Model
from kvq.models.loading.fused_layers import is_fused
from kvq.scheduler import Priority

_SLACK_BLOCKS = 8  # beyond the blocks of the load, for the engine's reserve and for copies
_SAMPLE_EVERY = 8  # interval in steps, because counting filled slots takes time
_Ended = tuple[LoadRequest, float, RequestOutput]  # with its due time


def blocks_for(requests: Sequence[LoadRequest], config: EngineConfig, block_size: int) -> int:
    """Return the number of blocks that the longest `max_num_seqs` requests take at full length."""
    blocks = sorted((-(-request.tokens // block_size) for request in requests), reverse=True)
    return round(1.02 * sum(blocks[: config.max_num_seqs])) + _SLACK_BLOCKS


class KvqServer:
    """Server that runs kvq's engine with one KV format."""

    name = "kvq"

    def __init__(self, model: Model, kv: str, config: EngineConfig, requests: Sequence[LoadRequest]) -> None:
        """Start an engine. Unless `config` sizes the pool, it fits all `requests` of the load at once.

        Raises:
            ConfigError: the format doesn't fit the model.
            OutOfMemory: the pool doesn't fit.
        """
        self.kv = kv
        if config.num_blocks is None and config.kv_memory is None:
            config = replace(config, num_blocks=blocks_for(requests, config, model.layout.block_size))
        refused = _GraphsRefused()
        with refused.listening():
            self.llm = LLM(model, kv, **asdict(config))
        if model.weights.device.type != "cuda":
            refused.reason = "not on a GPU"
        self.graphs = {  # for decode steps
            "graph": refused.reason is None,
            "graph_reason": refused.reason,
            "fused": is_fused(model.weights.model),
        }

    def run(self, requests: Sequence[LoadRequest], users: int | None) -> ServedLoad:
        """Serve all requests as they arrive, or `users` at a time, starting with an empty prefix index.

        Raises:
            EngineError: a request fails or ends early.
        """
        core, manager = self.llm.core, self.llm.core.scheduler.manager
        manager.drop_cached()
        before, counters = copy(core.scheduler.counters), core.scheduler.counters
        gauge = _Gauge(manager)
        arrivals = ArrivalQueue(requests, users)
        ended: list[_Ended] = []
        begin = perf_counter()
        while not arrivals.is_done or core.has_work:
            now = perf_counter() - begin
            for request, due_s in arrivals.due(now, len(ended)):
                self.submit(request, due_s, ended)
            if core.has_work:
                core.step()
                gauge.sample()
            else:
                sleep(arrivals.wait_s(now, len(ended)))
        prompt_tokens = counters.prompt_tokens - before.prompt_tokens
        return ServedLoad(
            served=[_served(*one, begin) for one in ended],
            preemptions=counters.preemptions - before.preemptions,
            prefix_hit_rate=(counters.cached_tokens - before.cached_tokens) / prompt_tokens,
            peak_blocks=gauge.peak_blocks,
            pool_blocks=sum(pool.total for pool in manager.usage()),
            pool_utilization=percentile(gauge.filled, 50),
        )

    def measure_steps(self, requests: Sequence[LoadRequest], users: int | None) -> list[StepStats]:
        """Return the steps of two runs, with all requests arriving at once in the second, to cover all sizes.

        Recording the steps makes both runs slightly slower.
        """
        steps: list[StepStats] = []
        at_once = [replace(request, arrival_s=0.0, priority=Priority.BATCH) for request in requests]
        end = self.llm.core.on_step(steps.append)
        try:
            self.run(requests, users)
            self.run(at_once, None)
        finally:
            end()
        return steps

    def generate(self, requests: Sequence[LoadRequest]) -> list[CompletionOutput]:
        """Return the greedy results of concurrent requests, with two log-probabilities per step."""
        self.llm.core.scheduler.manager.drop_cached()
        outputs = self.llm.generate(
            [request.prompt for request in requests],
            [
                SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, logprobs=2)
                for request in requests
            ],
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.outputs[0] for output in outputs]

    def close(self) -> None:
        """Release the pool."""
        self.llm.close()

    def submit(self, request: LoadRequest, due_s: float, ended: list[_Ended]) -> None:
        """Submit a request for greedy tokens, and append the result to `ended` when it finishes."""
        core = self.llm.core

        def listen(event: Event) -> None:
            if isinstance(event, RequestOutput):
                ended.append((request, due_s, event))

        params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        options = RequestOptions(params=params, priority=request.priority)
        core.submit(core.intake.new_job(request.prompt, options, listener=listen))


class _GraphsRefused(logging.Handler):
    """Log handler that records why the engine captures no CUDA graphs for decode steps."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if "without CUDA graphs" in record.getMessage():
            self.reason = record.getMessage()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle kvq's log records inside the block."""
        logger = logging.getLogger("kvq")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


class _Gauge:
    """Gauge of the peak number of live blocks and the share of their slots in use, sampled between steps."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._steps = 0
        self.peak_blocks = 0
        self.filled: list[float] = []

    def sample(self) -> None:
        live = sum(pool.live for pool in self._manager.usage())
        self.peak_blocks = max(self.peak_blocks, live)
        if self._steps % _SAMPLE_EVERY == 0:
            self.filled.append(self._manager.utilization())
        self._steps += 1


def _served(request: LoadRequest, due_s: float, output: RequestOutput, begin: float) -> Served:
    """Return a completed request with times relative to the start of the run."""
    if output.error is not None:
        raise output.error
    tokens, timing = output.outputs[0].token_ids, output.timing
    first = [] if timing.ttft_s is None else [timing.arrival_s - begin + timing.ttft_s]
    token_s = list(itertools.accumulate([*first, *timing.itl_s]))
    return Served(request=request, due_s=due_s, token_s=token_s, tokens=tokens)
