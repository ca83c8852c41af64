"""Rivals in `kvq bench engine`: transformers' `generate` with static batches, and its continuous batching."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from kvq.bench.engine.load import ArrivalQueue, LoadRequest, Served, ServedLoad
from kvq.bench.engine.server import blocks_for
from kvq.engine import EngineConfig
from kvq.errors import EngineError
from kvq.models import Model
from kvq.models.describe.modules import quiet_logs
from kvq.models.parts.device import DTYPE_NAMES
from kvq.sizes import parse_bytes

_PAGE = 256  # tokens, the default of transformers
_POLL_S = 0.05


def load_rival(model: Model) -> Any:
    """Load the model's checkpoint with transformers in the same dtype, without end tokens."""
    from transformers import AutoModelForCausalLM

    with quiet():
        rival = AutoModelForCausalLM.from_pretrained(
            model.prepared.folder,
            dtype=next(model.weights.model.parameters()).dtype,
            attn_implementation="sdpa",
            local_files_only=True,
        )
    rival.generation_config.eos_token_id = None
    return rival.to(model.weights.device).eval()


def own_format(rival: Any) -> str:
    """Return the format of transformers' KV cache, which is the dtype of the weights."""
    return DTYPE_NAMES[rival.dtype]


def quiet() -> AbstractContextManager[None]:
    """Hide loading progress bars, and warnings about packages that only automatic sizing would use."""
    return quiet_logs("transformers", "ContinuousBatchingLogger", level=logging.CRITICAL)


class StaticBatches:  # D244: the rival is a static batch of `generate`
    """Static, left-padded batches of `generate`, each with the requests that arrived during the previous
    batch.

    Every batch runs as long as its longest request, and only requested tokens count.
    """

    name = "hf-static"

    def __init__(self, rival: Any, config: EngineConfig, _: int) -> None:
        self.kv = own_format(rival)
        self._rival = rival
        self._most = config.max_num_seqs

    def run(self, requests: Sequence[LoadRequest], users: int | None) -> ServedLoad:
        """Serve all requests; in a closed loop, `users` is the batch size."""
        arrivals = ArrivalQueue(requests, users)
        waiting: list[tuple[LoadRequest, float]] = []
        served: list[Served] = []
        begin = perf_counter()
        while len(served) < len(requests):
            now = perf_counter() - begin
            waiting += arrivals.due(now, len(served))
            if not waiting:
                sleep(arrivals.wait_s(now, len(served)))
                continue
            batch, waiting = waiting[: self._most], waiting[self._most :]
            served += self._serve(batch, begin)
        return ServedLoad(served=served)

    def generate(self, requests: Sequence[LoadRequest]) -> list[list[int]]:
        """Return the greedy tokens of requests that run as one batch."""
        served = self._serve([(request, 0.0) for request in requests], perf_counter())
        return [one.tokens for one in served]

    def _serve(self, batch: Sequence[tuple[LoadRequest, float]], begin: float) -> list[Served]:
        width = max(len(request.prompt) for request, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, (request, _) in enumerate(batch):
            ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, width - len(request.prompt) :] = 1
        clock, device = _Clock(), self._rival.device
        with torch.inference_mode(), quiet():
            out = self._rival.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max(request.output_tokens for request, _ in batch),
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        rows = out[:, width:].tolist()
        return [
            Served(
                request=request,
                due_s=due_s,
                token_s=[at - begin for at in clock.puts_s[1 : 1 + request.output_tokens]],
                tokens=tokens[: request.output_tokens],
            )
            for (request, due_s), tokens in zip(batch, rows, strict=True)
        ]


class _Clock:
    """Streamer for `generate` that records the time of each token; the first `put` is the prompt."""

    def __init__(self) -> None:
        self.puts_s: list[float] = []

    def put(self, _: Tensor) -> None:
        self.puts_s.append(perf_counter())

    def end(self) -> None:
        """Do nothing; `generate` requires this method."""


class ContinuousBatching:
    """Transformers' continuous batching, with its paged cache and a new manager for every run."""

    name = "hf-continuous"

    def __init__(self, rival: Any, config: EngineConfig, block_size: int) -> None:
        self.kv = own_format(rival)
        self.attention = "sdpa"
        self._rival = rival
        self._config = config
        self._block_size = block_size

    def choose_attention(self, requests: Sequence[LoadRequest]) -> None:
        """Choose the faster of the two attention implementations that require no extra package."""
        times = {}
        for name in ("sdpa", "paged|eager"):
            self.attention = name
            times[name] = self.run(requests, None).seconds
        self.attention = min(times, key=lambda name: times[name])

    def run(self, requests: Sequence[LoadRequest], users: int | None) -> ServedLoad:
        """Serve all requests, as they arrive or `users` at a time.

        Raises:
            EngineError: a request fails, or the manager's thread ends.
        """
        with quiet(), self._manager(requests) as manager:
            arrivals = ArrivalQueue(requests, users)
            due_s: dict[str, float] = {}
            ended: list[Any] = []
            begin = perf_counter()
            while len(ended) < len(requests):
                now = perf_counter() - begin
                for request, due in arrivals.due(now, len(ended)):
                    due_s[str(request.index)] = due
                    manager.add_request(
                        request.prompt,
                        request_id=str(request.index),
                        max_new_tokens=request.output_tokens,
                        record_timestamps=True,
                        eos_token_id=-1,
                    )
                output = manager.get_result(timeout=min(_POLL_S, arrivals.wait_s(now, len(ended))))
                if output is not None:
                    ended.append(output)
                elif not manager.is_running():
                    raise EngineError("the thread of transformers' continuous batching ended")
        by_id = {str(request.index): request for request in requests}
        return ServedLoad(
            served=[_served(output, by_id[output.request_id], due_s, begin) for output in ended]
        )

    def generate(self, requests: Sequence[LoadRequest]) -> list[list[int]]:
        """Return the greedy tokens of requests that run together."""
        served = {one.request.index: one.tokens for one in self.run(requests, None).served}
        return [served[request.index] for request in requests]

    @contextmanager
    def _manager(self, requests: Sequence[LoadRequest]) -> Iterator[Any]:
        """Yield a manager that has already served one request, so that runs do not include its setup."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._rival.set_attn_implementation(self.attention)
        settings: dict[str, Any] = {
            "page_size": _PAGE,
            "block_size": _PAGE,  # the name of page_size until transformers 5.17
            "num_blocks": self._num_pages(requests),
            "max_batch_tokens": self._config.max_num_batched_tokens,
            "max_requests_per_batch": self._config.max_num_seqs,
            "allow_block_sharing": self._config.prefix_caching,
            "auto_switch_to_flash": self._rival.device.type == "cuda",
        }
        known = signature(ContinuousBatchingConfig).parameters
        if "page_size" in known:
            del settings["block_size"]
        config = ContinuousBatchingConfig(**{x: value for x, value in settings.items() if x in known})
        try:
            with self._rival.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=config,
                timeout=5,
            ) as manager:
                manager.add_request([0], request_id="first", max_new_tokens=2)
                while manager.get_result(timeout=_POLL_S) is None:
                    if not manager.is_running():
                        raise EngineError("transformers' continuous batching did not start")
                yield manager
        finally:
            self._rival.set_attn_implementation("sdpa")

    def _num_pages(self, requests: Sequence[LoadRequest]) -> int:
        """Return how many pages fit in the memory of kvq's pool, at least enough for the longest request."""
        config = self._config
        longest = -(-max(request.tokens for request in requests) // _PAGE) + 1
        if config.kv_memory is not None:
            rival = self._rival.config
            width = rival.num_key_value_heads * rival.head_dim * self._rival.dtype.itemsize
            page_bytes: int = 2 * rival.num_hidden_layers * width * _PAGE
            return max(longest, parse_bytes(config.kv_memory, "kv_memory") // page_bytes)
        if config.num_blocks is not None:
            return max(longest, config.num_blocks * self._block_size // _PAGE)
        return blocks_for(requests, config, _PAGE)


def _served(output: Any, request: LoadRequest, due_s: dict[str, float], begin: float) -> Served:
    if output.error is not None:
        raise EngineError(f"transformers' continuous batching failed: {output.error}")
    return Served(
        request=request,
        due_s=due_s[output.request_id],
        token_s=[at - begin for at in output.timestamps],
        tokens=list(output.generated_tokens),
    )
