"""Reference `rope`: the definition of correct results."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply RoPE in place: y = x cos + (-second half, first half) sin, for x [rows, heads, dim].

    cos and sin: [rows, dim], in x's dtype.

    Source: Su et al., "RoFormer", 2021, section 3.2, in GPT-NeoX order: paired elements are dim / 2 apart.
    """
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    x.copy_(x * cos[:, None] + turned * sin[:, None])
