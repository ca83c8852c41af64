"""vLLM's engine in this process, with its own KV cache or a kvq format, stepped by the benchmark."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from kvq.bench.engine.load import LoadRequest
from kvq.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")
STEP_TOKENS = 2048  # maximum number of prompt and output tokens per step
OWN = "vllm"  # name of vLLM's own cache among formats
_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_PARTS = {"attention": "forward", "write": "do_kv_cache_update"}  # -> methods of vLLM's attention


class VllmServer:  # D346: one process, alternating step by step
    """Server that runs one model in vLLM, stepped by the benchmark."""

    def __init__(self, kv: str, folder: Path, limits: dict[str, Any]) -> None:
        """Start vLLM. `kv`: a kvq format, or `OWN`. `limits`: limits of all engines, keyed by vLLM's names.

        Raises:
            EngineError: vLLM fails to start; the error includes vLLM's message.
        """
        os.environ |= _PROCESS
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self.name = "vLLM" if kv == OWN else "kvq in vLLM"
        self.kv: str = limits["dtype"] if kv == OWN else kv
        try:
            llm = LLM(
                str(folder),
                **limits,
                enable_prefix_caching=False,
                enforce_eager=True,
                skip_tokenizer_init=True,
                additional_config={} if kv == OWN else {"kvq": kv},
            )
        except Exception as error:  # vLLM raises many types
            raise EngineError(f"vLLM refuses {self.name} {self.kv}: {error}") from error
        self._engine: Any = llm.llm_engine
        cache = self._engine.vllm_config.cache_config
        self.num_blocks = int(cache.num_gpu_blocks)  # read now, because vLLM discards it at the end
        self._added = 0

    def add(self, requests: Sequence[LoadRequest]) -> list[str]:
        """Queue requests for greedy tokens, and return their ids in vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        names = [str(self._added + i) for i in range(len(requests))]
        self._added += len(requests)
        for name, request in zip(names, requests, strict=True):
            params = SamplingParams(
                temperature=0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            self._engine.add_request(name, tokens_input(request.prompt), params)
        return names

    def step(self) -> dict[str, list[int]]:
        """Run one step, and return all tokens so far of each request that got a token."""
        return {one.request_id: list(one.outputs[0].token_ids) for one in self._engine.step()}

    def finish(self, names: Sequence[str]) -> list[list[int]]:
        """Step until all requests finish, and return the tokens of the requests in `names`."""
        tokens: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            tokens |= self.step()
        return [tokens[name] for name in names]

    def fill(self, requests: Sequence[LoadRequest]) -> list[str]:
        """Queue requests, step until each has its first token, and return their ids."""
        names = self.add(requests)
        waiting = set(names)
        while waiting:
            waiting -= self.step().keys()
        return names

    def steps_s(self, count: int, requests: int) -> float:
        """Run `count` steps, each with a token for each of `requests` requests; return the total seconds.

        Raises:
            EngineError: a step does not yield one token per request, so the timing is invalid.
        """
        begin = perf_counter()
        given = [len(self._engine.step()) for _ in range(count)]
        seconds = perf_counter() - begin
        if any(n != requests for n in given):
            raise EngineError(f"{self.name} {self.kv}: steps gave tokens to {given} of {requests} requests")
        return seconds

    def drop(self, names: Sequence[str]) -> None:
        """Abort requests."""
        self._engine.abort_request(list(names))

    @contextmanager
    def clocks(self) -> Iterator[dict[str, float]]:
        """Yield a dict with the seconds that parts of attention take inside the block, in all layers."""
        spent = dict.fromkeys(_PARTS, 0.0)
        layers = self._engine.vllm_config.compilation_config.static_forward_context.values()
        impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
        for impl in impls:
            for part, method in _PARTS.items():
                setattr(impl, method, _clocked(getattr(impl, method), spent, part))
        try:
            yield spent
        finally:
            for impl in impls:
                for method in _PARTS.values():
                    delattr(impl, method)  # restores the method of the class

    def close(self) -> None:
        """Release the cache."""
        self._engine.engine_core.shutdown()


def _clocked(method: Callable[P, T], spent: dict[str, float], part: str) -> Callable[P, T]:
    def run(*given: P.args, **named: P.kwargs) -> T:
        begin = perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent[part] += perf_counter() - begin

    return run
