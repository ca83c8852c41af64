"""Rivals in `kvq bench engine`, opened and checked. A rival that can't run gets a row with the reason."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from kvq.bench.engine.hf import ContinuousBatching, StaticBatches, load_rival, own_format
from kvq.bench.engine.load import LoadRequest
from kvq.bench.engine.server import KvqServer
from kvq.engine import CompletionOutput, EngineConfig
from kvq.errors import EngineError
from kvq.models import Model
from kvq.models.run.prompts import num_common

Server = KvqServer | StaticBatches | ContinuousBatching
_REQUESTS, _TOKENS = 4, 16
NEAR_FP32, _NEAR_16_BIT = 0.02, 0.2  # largest gaps between log-probabilities that rounding may invert


def check_requests(requests: Sequence[LoadRequest]) -> list[LoadRequest]:
    """Return the first few requests, limited to a few output tokens."""
    return [
        replace(request, output_tokens=min(_TOKENS, request.output_tokens), arrival_s=0.0)
        for request in requests[:_REQUESTS]
    ]


def one_by_one(server: KvqServer, requests: Sequence[LoadRequest]) -> list[CompletionOutput]:
    """Run requests one after another, and return their results."""
    return [server.generate([request])[0] for request in requests]


def compare(
    name: str, model: Model, alone: Sequence[CompletionOutput], tokens: Sequence[list[int]]
) -> dict[str, Any]:
    """Compare token ids with the results of requests that ran one by one.

    Batches may differ where rounding can swap the two most likely tokens. Such differences are counted and
    reported with the largest gap between the two log-probabilities.

    Raises:
        EngineError: tokens differ in a way that rounding does not explain.
    """
    near = NEAR_FP32 if next(model.weights.model.parameters()).dtype == torch.float32 else _NEAR_16_BIT
    gaps = []
    for i, (expected, found) in enumerate(zip(alone, tokens, strict=True)):
        at = first_difference(expected.token_ids, found)
        if at is None:
            continue
        gap = _gap(expected, at)
        if gap > near:
            raise EngineError(
                f"{name}: request {i} goes on with {found[at : at + 2]} after {at} tokens and, run alone by "
                f"kvq, with {expected.token_ids[at : at + 2]}, whose first is {gap:.3g} above the next "
                f"likely one in log-probability; rounding explains {near}, so this computes something else"
            )
        gaps.append(gap)
    return {
        "check_requests": len(alone),
        "check_equal": len(alone) - len(gaps),
        "check_largest_gap": max(gaps, default=None),  # at the first differing tokens of unequal requests
    }


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the index of the first token at which two lists differ, or None if they are equal."""
    return None if list(expected) == list(found) else num_common(expected, found)


def _gap(output: CompletionOutput, at: int) -> float:
    """Return the gap between a step's two largest log-probabilities, or infinity beyond the output's end."""
    if output.logprobs is None or at >= len(output.logprobs):
        return float("inf")
    (_, first), (_, second) = output.logprobs[at].top[:2]
    return first - second


RIVALS = {rival.name: rival for rival in (StaticBatches, ContinuousBatching)}


def open_rivals(
    names: Sequence[str], model: Model, config: EngineConfig, requests: Sequence[LoadRequest]
) -> Iterator[tuple[Server | None, dict[str, Any]]]:
    """Load the model with transformers, and compare each rival with kvq, using KV of the same dtype.

    Yields each rival with the results of its check, or None with the row of a rival that can't run here.
    `requests`: a few requests for the check.

    Raises:
        EngineError: a rival generates tokens that rounding doesn't explain.
    """
    if not names:
        return
    with closing(KvqServer(model, "auto", EngineConfig(), requests)) as server:
        alone = one_by_one(server, requests)
    loaded = load_rival(model)
    for name in names:
        try:
            rival = RIVALS[name](loaded, config, model.layout.block_size)
            tokens = rival.generate(requests)
            if isinstance(rival, ContinuousBatching):
                rival.choose_attention(requests)
        except Exception as error:  # noqa: BLE001 - a third-party engine; its row includes the reason
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield None, {"name": name, "kv": own_format(loaded), "reason": reason}
            continue
        check = compare(name, model, alone, tokens)
        if isinstance(rival, ContinuousBatching):
            check["attention"] = rival.attention
        yield rival, check
