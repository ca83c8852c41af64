"""Reference `merge_partials`: exact merging of attention over parts of a context."""

import torch
from torch import Tensor


def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention outputs over disjoint sets of keys by their log-sum-exp.

    `outs`: [parts, tokens, heads, dim]; `lses`: fp32 [parts, tokens, heads], natural log; an empty part is
    (0, -inf). `sinks`: fp32 [heads], logits that enter the softmax once and have no value. Returns out
    [tokens, heads, dim] fp32 and lse [tokens, heads]; if all parts are empty, so is the result.

    Source: Dao, "FlashAttention-2", 2023, section 3.1; Xiao et al., "StreamingLLM", 2023, for sinks.
    """
    total = torch.logsumexp(lses, dim=0)  # [tokens, heads]
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float().expand_as(total))
    weights = torch.exp(lses - torch.where(torch.isneginf(total), 0.0, total))
    out = (torch.where(weights[..., None] > 0, outs.float(), 0.0) * weights[..., None]).sum(dim=0)
    return out, total
