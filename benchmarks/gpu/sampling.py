"""One step's choice of tokens: many rows of logits in, tokens on the host out."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvq.bench.timing import in_turn, percentile
from kvq.engine import SamplingParams
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.sampling.seeds import mix_seed
from kvq.errors import KVQError

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}
_WARM_UP = 3
_ROUNDING = 1e-4  # of a sum of probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingWorkload:
    """The logits of one step."""

    rows: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    def logits(self) -> Tensor:
        """Random, [rows, vocab], with a few likely tokens in each row."""
        source = torch.Generator(self.device).manual_seed(self.seed)
        shape = (self.rows, self.vocab_size)
        return (2.5 * torch.randn(shape, generator=source, device=self.device)).to(self.dtype)


def bench_sampling(
    workload: SamplingWorkload, kinds: Sequence[str] = tuple(KINDS), *, repeats: int = 20
) -> list[dict[str, Any]]:
    """Rows of each kind of parameters, checked, then timed interleaved until the tokens are on the host.

    Raises:
        KVQError: a token that its parameters exclude; nothing was timed.
    """
    logits = workload.logits()
    samplers = {kind: _sampler(workload, KINDS[kind]) for kind in kinds}
    for kind, sampler in samplers.items():
        for count in range(_WARM_UP):
            _check(kind, logits, _tokens(sampler, logits, count))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat, kind in in_turn(list(kinds), repeats):
        began = perf_counter()
        _tokens(samplers[kind], logits, _WARM_UP + repeat)
        times[kind].append(1e3 * (perf_counter() - began))
    return [
        {
            "name": "kvq",
            "sampling": kind,
            "rows": workload.rows,
            "vocab_size": workload.vocab_size,
            "ms_median": percentile(ms, 50),
            "ms_p10": percentile(ms, 10),
            "ms_p90": percentile(ms, 90),
            "gb_per_s": logits.nbytes / percentile(ms, 50) / 1e6,  # as if logits were read once
        }
        for kind, ms in times.items()
    ]


def _sampler(workload: SamplingWorkload, params: SamplingParams) -> Sampler:
    """One whose rows all have these parameters."""
    sampler = Sampler(max_rows=workload.rows, vocab_size=workload.vocab_size, device=workload.device)
    for row in range(workload.rows):
        sampler.add(row, params, prompt=(), generated=(), seed=mix_seed(0, row), stop_ids=())
    return sampler


def _tokens(sampler: Sampler, logits: Tensor, count: int) -> list[int]:
    rows = list(range(len(logits)))
    return sampler.sample(logits, rows, [count] * len(rows)).wait().tokens


def _check(kind: str, logits: Tensor, tokens: Sequence[int]) -> None:
    """No token may lie below the smallest set that `top_k` and `top_p` leave."""
    params = KINDS[kind]
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    scores = logits.float() / (params.temperature or 1)
    above = scores > scores.gather(1, chosen)
    most = 1 if params.temperature == 0 else params.top_k or logits.shape[1]
    mass = torch.where(above, scores.softmax(-1), 0).sum(-1)
    wrong = (above.sum(-1) >= most) | (mass > params.top_p + _ROUNDING)
    if bool(wrong.any()):
        raise KVQError(f"{kind}: {int(wrong.sum())} of {len(tokens)} tokens are excluded; nothing was timed")
