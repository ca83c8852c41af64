"""vLLM's engine in this process, over its own KV cache or one of kvq's formats, one step at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from kvq.bench.engine.load import LoadRequest
from kvq.errors import EngineError

STEP_TOKENS = 2048  # of prompts and outputs, at most
OWN = "vllm"  # what vLLM's own cache is called among formats
_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_PARTS = {"attention": "forward", "write": "do_kv_cache_update"}  # -> methods of vLLM's attention


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What every engine gets, whatever its format, as vLLM calls it."""

    dtype: str  # of weights and activations, as torch names it
    kv_cache_memory_bytes: int
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int = STEP_TOKENS


class VllmEngine:
    """One model in vLLM, stepped by the benchmark's own loop."""

    def __init__(self, kv: str, folder: Path, limits: Limits) -> None:
        """`kv`: a format of kvq's, or `OWN`.

        Raises:
            EngineError: vLLM doesn't take it; the message is vLLM's.
        """
        os.environ |= _PROCESS
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self.name, self.kv = ("vLLM", limits.dtype) if kv == OWN else ("kvq in vLLM", kv)
        try:
            llm = LLM(
                str(folder),
                **asdict(limits),
                enable_prefix_caching=False,
                enforce_eager=True,
                skip_tokenizer_init=True,
                additional_config={} if kv == OWN else {"kvq": kv},
            )
        except Exception as error:  # whatever vLLM raises
            raise EngineError(f"vLLM refuses {self.name} {self.kv}: {error}") from error
        self._engine: Any = llm.llm_engine
        self.num_blocks = int(self._engine.vllm_config.cache_config.num_gpu_blocks)  # forgotten at the end
        self._added = 0

    def add(self, requests: Sequence[LoadRequest]) -> list[str]:
        """Queue requests for greedy tokens; returns what vLLM calls them."""
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
        """One step; the tokens so far of requests that got one."""
        return {one.request_id: list(one.outputs[0].token_ids) for one in self._engine.step()}

    def finish(self, names: Sequence[str]) -> list[list[int]]:
        """Step until all is done; the tokens of the requests named."""
        tokens: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            tokens |= self.step()
        return [tokens[name] for name in names]

    def fill(self, requests: Sequence[LoadRequest]) -> list[str]:
        """Queue requests and step until each has its first token."""
        names = self.add(requests)
        waiting = set(names)
        while waiting:
            waiting -= self.step().keys()
        return names

    def steps_s(self, count: int, requests: int) -> float:
        """Seconds that so many steps take, each with a token for each of `requests`.

        Raises:
            EngineError: a step had fewer, so that it is not what was to be timed.
        """
        begin = perf_counter()
        given = [len(self._engine.step()) for _ in range(count)]
        seconds = perf_counter() - begin
        if any(n != requests for n in given):
            raise EngineError(f"{self.name} {self.kv}: steps gave tokens to {given} of {requests} requests")
        return seconds

    def drop(self, names: Sequence[str]) -> None:
        """End requests early."""
        self._engine.abort_request(list(names))

    @contextmanager
    def clocks(self) -> Iterator[dict[str, float]]:
        """Seconds that go into the parts of attention, of all layers, meanwhile; on a CPU."""
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
                    delattr(impl, method)  # the class's own shows again

    def close(self) -> None:
        """Give back the cache."""
        self._engine.engine_core.shutdown()


def _clocked(method: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        begin = perf_counter()
        try:
            return method(*given, **named)
        finally:
            spent[part] += perf_counter() - begin

    return run
