"""Log-probabilities under the model's own distribution, in natural logarithms."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvq.engine.device.transfers import upload
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.kernels.draw.reference import likeliest, log_probability, masses, ranked

# In elements. On a CPU, the copies of a chunk stay in its cache, which halves the time; elsewhere, larger
# chunks mean fewer launches, and 64 MiB of fp32 limits the memory for 256 rows over a vocabulary of 128k.
_CPU_ELEMENTS = 1 << 18
_DEVICE_ELEMENTS = 1 << 24


def chunks(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of `num_rows` rows whose temporary copies stay small. Slicing never affects results."""
    elements = _CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def measure(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return the values per row that `read_logprobs` needs, fp64, [rows, 4 + 2 * top], on the device.

    `logits`: fp32, [rows, vocab]; `tokens`: int64, [rows]; `top`: at most the vocabulary size. Columns:
    highest logit, total mass, the token's logit, the token's rank, the top logits, and the top tokens. All
    are whole numbers below 2**53 or fp32, which fp64 represents exactly; only the total is rounded.
    """
    peaks, _ = likeliest(logits)
    totals = masses(logits, peaks).sum(dim=-1)
    chosen = logits.gather(1, tokens[:, None])  # [rows, 1]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))
    columns = [peaks[:, None], totals[:, None], chosen, ahead.sum(dim=-1, keepdim=True) + 1]
    if top:
        columns += ranked(logits, top)
    return torch.cat([column.double() for column in columns], dim=-1)


def read_logprobs(token: int, measured: Sequence[float], top: int) -> TokenLogprobs:
    """Convert a row from `measure` to log-probabilities. `top` may be lower than in the call of `measure`."""
    peak, total, chosen, rank, *ranking = measured
    width = len(ranking) // 2
    pairs = zip(ranking[:top], ranking[width : width + top], strict=True)
    return TokenLogprobs(
        token=token,
        logprob=log_probability(chosen, peak, total),
        rank=int(rank),
        top=tuple((int(other), log_probability(value, peak, total)) for value, other in pairs),
    )


@torch.no_grad()
def prompt_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log-probability of each token in `targets`, the actual next tokens.

    `logits`: any float type, [rows, vocab]; `targets`: one token per row; `top`: number of most likely tokens
    to return in addition.
    """
    num_rows, vocab_size = logits.shape
    tokens = upload(targets, logits.device)
    top, found = min(top, vocab_size), []
    for part in chunks(num_rows, vocab_size, logits.device):
        rows = measure(logits[part].float(), tokens[part], top).tolist()
        found += [read_logprobs(token, row, top) for token, row in zip(targets[part], rows, strict=True)]
    return found


@torch.no_grad()
def beam_candidates(logits: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return each row's `count` most likely tokens, as log-probabilities and ids, on the host.

    `logits`: any float type, [beams, vocab]. A vocabulary smaller than `count` is returned in full.
    """
    num_rows, vocab_size = logits.shape
    width = min(count, vocab_size)
    values: list[list[float]] = []
    tokens: list[list[int]] = []
    for part in chunks(num_rows, vocab_size, logits.device):
        logits_part = logits[part].float()
        best, ids = ranked(logits_part, width)
        totals = masses(logits_part, best[:, 0]).sum(dim=-1)
        for row in torch.cat((totals[:, None].double(), best.double(), ids.double()), dim=-1).tolist():
            values.append([log_probability(value, row[1], row[0]) for value in row[1 : width + 1]])
            tokens.append([int(token) for token in row[width + 1 :]])
    return values, tokens
