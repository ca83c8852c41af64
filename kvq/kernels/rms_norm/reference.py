"""Reference `rms_norm` and `add_norm`: the definition of correct results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NormWeight:
    """An RMS norm: weight [dim] of fp32, bf16 or fp16, and `eps`, which is added to the mean square."""

    weight: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, computed in fp32 and rounded once to x's dtype: [rows, dim].

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 4.
    """
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    norm: NormWeight | None,
    *,
    post: NormWeight | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Add the output of half a layer to the residual, in place, and normalize the sum for the next half.

    y = scale * rms_norm(x, post), or scale * x without `post`; residual += y, in fp32 and rounded once;
    returns rms_norm(residual, norm) in x's dtype, [rows, dim]. x: [rows, dim]; residual: same shape, fp32,
    bf16 or fp16. Without a residual, y itself is normalized; without a norm, the residual is returned.

    Raises:
        ConfigError: there is neither a residual nor a norm, or shapes differ.
    """
    check_add_norm(x, residual, norm, post)
    y = x.float()
    if post is not None:
        y = rms_norm(y, post.weight, post.eps)
    y = y * scale
    if residual is not None:
        residual.copy_(residual.float() + y)
        y = residual.float()
    if norm is None:
        assert residual is not None, "checked"
        return residual
    return rms_norm(y, norm.weight, norm.eps).to(x.dtype)


def check_add_norm(
    x: Tensor, residual: Tensor | None, norm: NormWeight | None, post: NormWeight | None
) -> None:
    """Raise ConfigError unless the arguments of `add_norm` match."""
    shape, dim = x.shape, x.shape[-1:]
    fits = len(shape) == 2 and (norm is not None or residual is not None)
    for own in (norm, post):
        if own is not None:
            fits = fits and own.weight.shape == dim and own.weight.stride(0) == 1
    if residual is not None:
        fits = fits and residual.shape == shape and residual.stride(1) == 1
    if not fits:
        other = "none" if residual is None else list(residual.shape)
        raise ConfigError(
            f"add_norm takes [rows, dim], a residual of this shape, weights [dim], all but the first with "
            f"elements side by side, and a residual or a norm at least; got {list(shape)}, a residual "
            f"{other}, and weights {[list(own.weight.shape) for own in (norm, post) if own]}"
        )
