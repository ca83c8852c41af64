"""Weights and inputs of several kinds, and GPTQ as the paper writes it."""

import torch
from torch import Tensor

from kvq.formats.weights import WeightFormat
from kvq.weights.statistics import InputStatistics

KINDS = ("independent", "correlated", "outliers", "low rank")


def inputs(kind: str, tokens: int, width: int, *, seed: int) -> Tensor:
    """Inputs fp32 [tokens, width]; other seeds give other tokens of one distribution."""
    shared = torch.Generator().manual_seed(7)
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=own)
    if kind == "correlated":
        mix = torch.randn(width, width, generator=shared) / width**0.5
        x = x @ (torch.eye(width) + mix * torch.logspace(0.7, -1.5, width))
    if kind == "outliers":
        x = x * torch.exp(0.6 * torch.randn(width, generator=shared))
        x[:, torch.randperm(width, generator=shared)[: width // 64]] *= 20
    if kind == "low rank":
        basis = torch.randn(width // 8, width, generator=shared)
        x = torch.randn(tokens, width // 8, generator=own) @ basis / 3 + 0.05 * x
    return x


def weights(out: int, width: int, *, seed: int = 0) -> Tensor:
    """A weight fp32 [out, width], some of it heavy-tailed."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(out, width, generator=generator) * 0.05
    w[::7] = w[::7] * torch.exp(0.5 * torch.randn(w[::7].shape, generator=generator))
    return w


def statistics(x: Tensor, **options: int) -> InputStatistics:
    """Of those inputs, taken in pieces."""
    found = InputStatistics("layer", x.shape[1], x.device, **options)
    for piece in x.split(100):
        found.add(piece)
    return found


def output_error(x: Tensor, weight: Tensor, stored: Tensor) -> float:
    """|(W - Q) X|^2 in fp64."""
    return float(((stored.double() - weight.double()) @ x.double().T).square().sum())


def plain_gptq(
    weight: Tensor, x: Tensor, fmt: WeightFormat, *, damping: float = 0.01, by_activity: bool = False
) -> Tensor:
    """The paper's algorithm without blocks, in fp64: the weight as stored, [out, in].

    Every step inverts what the paper's inverse Hessian would be after the columns before it were taken
    out, through one Gaussian elimination per column (the paper's equation 3), not through a Cholesky factor.
    """
    w = weight.double().clone()
    h = 2 * x.double().T @ x.double() / len(x)
    order = torch.argsort(h.diagonal(), descending=True, stable=True) if by_activity else torch.arange(len(h))
    w, h = w[:, order], h[order][:, order]
    h += damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    inverse = torch.linalg.inv(h)
    size = fmt.group_size or w.shape[1]
    half = 2 ** (fmt.code.bits - 1)
    stored = torch.empty_like(w)
    for i in range(w.shape[1]):
        if i % size == 0:
            scale, zero = _range(w[:, i : i + size], fmt, half)
        q = (torch.round(w[:, i] / scale) + zero).clamp(-half, half - 1)
        stored[:, i] = (q - zero) * scale
        error = (w[:, i] - stored[:, i]) / inverse[i, i]
        w[:, i + 1 :] -= error[:, None] * inverse[i, None, i + 1 :]
        inverse -= inverse[:, i, None] * inverse[i, None, :].clone() / inverse[i, i].clone()
    return torch.empty_like(stored).index_copy_(1, order, stored)


def _range(group: Tensor, fmt: WeightFormat, half: int) -> tuple[Tensor, Tensor]:
    if fmt.symmetric:
        return group.abs().amax(1) / (half - 0.5), torch.zeros(len(group), dtype=torch.float64)
    low, high = group.amin(1).clamp(max=0), group.amax(1).clamp(min=0)
    scale = (high - low) / (2 * half - 1)
    return scale, (-half - torch.round(low / scale)).clamp(-half, half - 1)
