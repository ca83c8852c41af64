"""Rival of `kvq bench engine`: transformers' `generate` over static batches."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from kvq.bench.engine.load import ArrivalQueue, LoadRequest
from kvq.bench.engine.result import Served, ServedLoad
from kvq.bench.engine.server import EngineLimits
from kvq.models import Model
from kvq.models.describe.modules import quiet_logs
from kvq.models.parts.device import DTYPE_NAMES


def load_rival(model: Model) -> Any:
    """Load the model's checkpoint with transformers in the same dtype; it never ends before the length."""
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
    """Return the format of transformers' KV cache: the dtype of the weights."""
    return DTYPE_NAMES[rival.dtype]


def quiet() -> AbstractContextManager[None]:
    """Hide loading bars, and warnings about packages that only sizing would use."""
    return quiet_logs("transformers", "ContinuousBatchingLogger", level=logging.CRITICAL)


class StaticBatches:  # D244: the rival: a static batch of `generate`
    """Static batches of `generate`, left-padded; the next batch is what has arrived when one has ended.

    Every batch runs as long as its longest request; only requested tokens count.
    """

    name = "hf-static"

    def __init__(self, rival: Any, limits: EngineLimits, _: int) -> None:
        self.kv = own_format(rival)
        self._rival = rival
        self._most = limits.max_num_seqs

    def run(self, requests: Sequence[LoadRequest], users: int | None) -> ServedLoad:
        """Serve all requests; `users` is the batch size in a closed loop."""
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
        """Return greedy tokens of requests in one batch."""
        served = self._serve([(request, 0.0) for request in requests], perf_counter())
        return [one.tokens for one in served]

    def _serve(self, batch: Sequence[tuple[LoadRequest, float]], begin: float) -> list[Served]:
        width = max(len(request.prompt) for request, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, (request, _) in enumerate(batch):
            ids[i, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, width - len(request.prompt) :] = 1
        clock = _Clock()
        device = self._rival.device
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
                token_s=[at - begin for at in clock.token_s[: request.output_tokens]],
                tokens=tokens[: request.output_tokens],
            )
            for (request, due_s), tokens in zip(batch, rows, strict=True)
        ]


class _Clock:
    """Streamer for `generate` that notes the time of each step's tokens; the first put is the prompt."""

    def __init__(self) -> None:
        self._puts: list[float] = []

    @property
    def token_s(self) -> list[float]:
        """Times of the tokens on `perf_counter`."""
        return self._puts[1:]

    def put(self, _: Tensor) -> None:
        self._puts.append(perf_counter())

    def end(self) -> None:
        """Called by `generate`."""
