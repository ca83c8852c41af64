"""Temperature, min-p, top-k and top-p, sampling after these filters, and the acceptance of drafted tokens.

The filters act in this order, each on the tokens that the previous one kept:

    min_p   drops tokens less than min_p times as likely as the likeliest
    top_k   keeps the k likeliest
    top_p   keeps the fewest likeliest tokens whose share of the mass reaches top_p

Each filter keeps a prefix of the tokens in order of likelihood, so a filter is just a length, and nothing is
renormalized. Sources: Fan et al. 2018 (top-k), Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p).

Probabilities are integers, whose sum is the same in any order. A floating-point softmax adds its terms in an
order that depends on the batch, the alignment of a row and the device's threads, and so do its last bits. A
token's mass is

    mass = floor(2**43 * exp((logit - highest logit) / temperature))

The exponential is computed in fp32: its error of 1e-7 is far below that of the logits, and fp64 is slow on
many GPUs. Tokens less than 2**-43 as likely as the likeliest have no mass and are never sampled. The sum for
fewer than 2**20 tokens can't overflow int64.

Libraries do not define the order of equal values, and it changes with the requested width. To rank tokens,
each logit and its token id are therefore packed into one integer, and these integers, which are all
different, are sorted:

    key = rank of the logit, likeliest first (32 bits) | token id (32 bits)

On CPUs, NumPy is used: its vectorized argmax, sort and partition take a tenth of torch's time. To find a few
of many tokens, only those are packed whose logits reach a bar that at least as many reach.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

MASS_OF_LIKELIEST = 1 << 43
MAX_VOCAB = (1 << 20) - 1
_LANE = 32  # tokens whose highest logit may be a bar
_FEW = 256, 4096  # numbers of tokens in which a nucleus is looked for before all are sorted


def masses(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return the tokens' masses, int64, in the shape of `logits`, which is fp32, [rows, width].

    `peaks`: each row's highest logit, [rows]; `temperature`: [rows], positive; None means 1.
    """
    scores = logits - peaks[:, None]  # before the division, which then can't overflow upwards
    if temperature is not None:
        scores.div_(temperature[:, None])
    return scores.exp_().mul_(MASS_OF_LIKELIEST).to(torch.int64)


def draw(sums: Tensor, totals: Tensor, uniform: Tensor) -> Tensor:
    """Return the column sampled for each row, [rows] int64: the first whose running sum exceeds u * total.

    `sums`: running sums of masses, [rows, width]; `totals`: int64, [rows], the running sum in each row beyond
    which no column is sampled; `uniform`: u in [0, 1), fp64, [rows].
    """
    marks = (uniform * totals.double()).to(torch.int64)
    marks = torch.minimum(marks, totals - 1)  # a product near the total may round up to it
    columns = torch.searchsorted(sums, marks[:, None], right=True)[:, 0]
    return columns.clamp_(max=sums.shape[-1] - 1)  # a row of NaN may find none


def log_probability(logit: float, peak: float, total: float) -> float:
    """Return the natural log-probability of a token in a row of masses that add up to `total`.

    The result is NaN if the row's highest logit isn't finite.
    """
    if not math.isfinite(peak):
        return math.nan
    return logit - peak - math.log(total / MASS_OF_LIKELIEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sampling parameters of rows, each [rows] on the device.

    Filters are named as in SamplingParams; a filter is None if all rows use SamplingParams' default.
    """

    uniform: Tensor  # fp64, in [0, 1)
    temperature: Tensor  # fp32, above 0
    min_p: Tensor | None  # fp64, like all filters
    top_k: Tensor | None
    top_p: Tensor | None

    def __getitem__(self, part: slice) -> "Settings":
        """Return the settings of a slice of the rows."""
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {name: held if held is None else held[part] for name, held in given.items()}
        return Settings(**chosen)


def draw_whole(logits: Tensor, peaks: Tensor, settings: Settings) -> Tensor:
    """Return a token for each row, [rows] int64, without sorting; no row may have a top_k or top_p.

    `logits`: fp32, [rows, vocab]; `peaks`: each row's highest logit, [rows].
    """
    sums = _after_min_p(masses(logits, peaks, settings.temperature), settings.min_p).cumsum_(dim=-1)
    return draw(sums, sums[:, -1], settings.uniform)


def draw_ranked(logits: Tensor, peaks: Tensor, settings: Settings, width: int) -> Tensor:
    """Return a token for each row, [rows] int64, sampled from its `width` likeliest tokens.

    `width` is at least every row's top_k, or the vocabulary size if a row has none.
    """
    vocab, widths, needed = logits.shape[-1], [width], None
    if settings.top_p is not None and settings.top_k is None and logits.device.type == "cpu":
        every = _after_min_p(masses(logits, peaks, settings.temperature), settings.min_p)
        needed = _needed(every.sum(dim=-1), settings.top_p)
        widths = [*(few for few in _FEW if few <= vocab // _LANE), width]
    for few in widths:
        tokens, mass = _ranked_masses(logits, peaks, settings, few)
        sums = mass.cumsum(dim=-1)
        if needed is None or bool((sums[:, -1] >= needed).all()):
            break
    if settings.top_p is not None and needed is None:
        needed = _needed(sums[:, -1], settings.top_p)
    totals = sums[:, -1] if needed is None else _nucleus(sums, needed)
    chosen = draw(sums, totals, settings.uniform)
    return tokens.gather(1, chosen[:, None])[:, 0]


def kept_masses(logits: Tensor, peaks: Tensor, settings: Settings, width: int) -> tuple[Tensor, Tensor]:
    """Return the tokens from which `draw_ranked` samples, and their masses, 0 if a filter drops them.

    Both are int64, [rows, width]; if no row has a top_k or top_p, tokens are [1, vocab], in token order.
    """
    if settings.top_k is None and settings.top_p is None:
        tokens = torch.arange(logits.shape[-1], device=logits.device)[None]
        return tokens, _after_min_p(masses(logits, peaks, settings.temperature), settings.min_p)
    tokens, mass = _ranked_masses(logits, peaks, settings, width)
    if settings.top_p is not None:
        sums = mass.cumsum(dim=-1)
        mass.masked_fill_(sums > _nucleus(sums, _needed(sums[:, -1], settings.top_p))[:, None], 0)
    return tokens, mass


def _ranked_masses(logits: Tensor, peaks: Tensor, settings: Settings, width: int) -> tuple[Tensor, Tensor]:
    """Return each row's `width` likeliest tokens, and their masses after min-p and top-k: [rows, width]."""
    values, tokens = ranked(logits, width)
    mass = _after_min_p(masses(values, peaks, settings.temperature), settings.min_p)
    if settings.top_k is not None:
        columns = torch.arange(mass.shape[-1], device=mass.device)
        mass = mass.masked_fill_(columns >= settings.top_k.long()[:, None], 0)
    return tokens, mass


def _after_min_p(mass: Tensor, min_p: Tensor | None) -> Tensor:
    """Set masses below min_p times that of the likeliest token to 0, in place, and return the masses."""
    if min_p is None:
        return mass
    bar = (min_p * MASS_OF_LIKELIEST).ceil().to(torch.int64)
    return mass.masked_fill_(mass < bar[:, None], 0)


def _needed(totals: Tensor, top_p: Tensor) -> Tensor:
    """Return the share top_p of each row's total, int64 [rows]."""
    needed = (top_p * totals.double()).ceil().to(torch.int64)
    needed = torch.minimum(needed, totals).clamp_(min=1)  # rounding up may pass the total
    return torch.where(top_p < 1, needed, totals)  # a large total, in fp64, may be rounded down


def _nucleus(sums: Tensor, needed: Tensor) -> Tensor:
    """Return each row's first running sum that reaches what is needed, or the last one: [rows]."""
    last = torch.searchsorted(sums, needed[:, None]).clamp_(max=sums.shape[-1] - 1)
    return sums.gather(1, last)[:, 0]


def draw_sums(sums: Tensor, uniform: Tensor) -> Tensor:
    """Return each row's first column whose running sum exceeds u * total; `sums`: fp64 [rows, width]."""
    totals = sums[:, -1]
    marks = torch.minimum(uniform * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.searchsorted(sums, marks[:, None], right=True)[:, 0].clamp_(max=sums.shape[-1] - 1)


def keep_or_replace(  # D255: one comparison keeps drafts
    target: Tensor, draft: Tensor, tokens: Tensor, keeping: Tensor, uniform: Tensor
) -> Tensor:
    """Return each row's token, int64 [rows]: the drafted token, or a different one that replaces it.

    A token x sampled from the draft's distribution q is kept with probability min(1, p(x) / q(x)), where p is
    the target's distribution; a rejected token is replaced by one sampled from max(0, p - q), normalized. The
    result has distribution p, for any q. A draft token without a distribution, such as one found in the text
    so far, has probability 1: it is kept with probability p(x), and its replacement is sampled from p without
    x. This is equivalent to sampling from p and comparing with x, and needs no rule. Sources: Leviathan,
    Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", section 2.3; Chen et
    al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", theorem 1.

    `target`, `draft`: masses proportional to p and q, int64 [rows, vocab]; `tokens`: sampled from the draft,
    int64 [rows]; `keeping`, `uniform`: random numbers in [0, 1), fp64 [rows], to decide and to sample.
    """
    p, q = _normalized(target), _normalized(draft)
    columns = tokens[:, None]
    is_kept = keeping * q.gather(1, columns)[:, 0] < p.gather(1, columns)[:, 0]
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # p is q: every draft is kept
    return torch.where(is_kept, tokens, draw_sums(rest.cumsum(dim=-1), uniform))


def _normalized(masses: Tensor) -> Tensor:
    return masses.double() / masses.sum(dim=-1, keepdim=True).double()


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's highest logit and the first token that has it: [rows] fp32, [rows] int64.

    If a row contains NaN, its value is NaN. `logits` is fp32, [rows, vocab].
    """
    if logits.device.type != "cpu":
        values, tokens = logits.max(dim=-1)
        return values, tokens
    array = logits.detach().numpy()
    best = array.argmax(axis=-1)
    return torch.from_numpy(array[np.arange(len(array)), best]), torch.from_numpy(best)


def ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each row's `width` highest logits and their tokens, likeliest first.

    `logits` is fp32, [rows, vocab]; the results are fp32 and int64, [rows, width]. A smaller width returns a
    prefix of the result for a larger one. The order is undefined for rows that contain NaN.
    """
    if logits.device.type == "cpu" and len(logits) and width <= logits.shape[-1] // _LANE:
        rows = ((row, _reaching(row, width)) for row in logits.detach())
        keys = torch.cat([_lowest(_pack(row[own], own)[None], width) for row, own in rows])
    else:
        keys = _lowest(_pack(logits, torch.arange(logits.shape[-1], device=logits.device)), width)
    return _unpack_logits(keys), keys & 0xFFFFFFFF


def _reaching(row: Tensor, width: int) -> Tensor:
    """Return the tokens of one row, [vocab], that may be among its `width` likeliest: int64, in order."""
    values = row.numpy()
    lanes = len(values) // _LANE
    highest = values[: lanes * _LANE].reshape(_LANE, lanes).max(axis=0)
    bar = np.partition(highest, lanes - width)[lanes - width]
    return torch.from_numpy(np.flatnonzero(~(values < bar)))  # NaN ranks above all numbers


def _pack(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return integers that increase as the logit decreases and, for equal logits, with the token id."""
    bits = (logits.detach() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which it equals
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards; now they don't
    return rising.bitwise_not().to(torch.int64).bitwise_left_shift_(32).bitwise_or_(tokens)


def _unpack_logits(keys: Tensor) -> Tensor:
    rising = (keys >> 32).to(torch.int32).bitwise_not()
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _lowest(keys: Tensor, width: int) -> Tensor:
    """Return the `width` lowest keys of each row in increasing order."""
    everything = width >= keys.shape[-1]
    if keys.device.type != "cpu":
        if everything:
            return keys.sort(dim=-1).values
        return keys.topk(width, dim=-1, largest=False, sorted=True).values
    array = keys.numpy()
    if not everything:
        array = np.partition(array, width - 1, axis=-1)[:, :width]
    return torch.from_numpy(np.sort(array, axis=-1))
