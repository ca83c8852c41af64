"""The sampler's rules one row at a time, in plain Python and float64."""

import math

import torch

from kvq.engine.params import SamplingParams
from kvq.engine.sampling.sampler import Sampler


def adjusted(logits, params: SamplingParams, prompt=(), generated=(), forbidden=(), allowed=None):
    """Logits after penalties, bias, forbidden stops and the set of allowed tokens."""
    scores = [float(x) for x in logits]
    for token in set(prompt) | set(generated):
        r = params.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token in set(generated):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(generated).count(token)
    for token, amount in (params.logit_bias or {}).items():
        scores[token] += amount
    for token in range(len(scores)):
        if token in forbidden or (allowed is not None and token not in allowed):
            scores[token] = -math.inf
    return scores


def distribution(scores, params: SamplingParams):
    """Token -> probability of what the filters leave; equal scores by token id."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.is_greedy:
        return {order[0]: 1.0}
    peak = scores[order[0]]
    weight = {t: math.exp((scores[t] - peak) / params.temperature) for t in order}
    kept = [t for t in order if weight[t] > 0 and weight[t] >= params.min_p]
    kept = kept[: params.top_k]
    total, mass, nucleus = sum(weight[t] for t in kept), 0.0, []
    for token in kept:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(token)
        mass += weight[token]
    return {token: weight[token] / mass for token in nucleus}


def sampler(vocab_size: int, max_rows: int = 1) -> Sampler:
    return Sampler(max_rows=max_rows, vocab_size=vocab_size, device=torch.device("cpu"))


def add(target: Sampler, row: int, params: SamplingParams, *, prompt=(), generated=(), seed=0, stop_ids=()):
    target.add(row, params, prompt=prompt, generated=generated, seed=seed, stop_ids=stop_ids)


def draws(logits: torch.Tensor, params: SamplingParams, times: int, seed: int = 1) -> list[int]:
    """The tokens of `times` positions of one stream over the same logits."""
    one = sampler(len(logits), times)
    for row in range(times):
        add(one, row, params, seed=seed)
    rows = list(range(times))
    return one.sample(logits.expand(times, -1), rows, rows).wait().tokens


def bitmask(allowed, vocab_size: int) -> torch.Tensor:
    """llguidance's mask of a set of tokens."""
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32)
