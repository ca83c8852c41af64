"""Sampling in Triton: no row is sorted, and the number of launches doesn't depend on rows or vocabulary size.

    peaks      each span's likeliest token                      every row
    brackets   masses and counts of 16 brackets                 rows that sample
    open       which brackets to split                          rows that rank tokens, down to `gather`
    bins       masses and counts of the bins of those brackets
    plan       which of the 2,048 bins to search
    gather     the tokens of those bins
    choose     searches in those bins; every row's token        every row

All sums are integers, so the order in which programs add to them doesn't matter.
"""

import torch
import triton
from torch import Tensor

from kvq.kernels.draw.parameters import Kind
from kvq.kernels.draw.triton_rows import (
    SPAN,
    SPAN_SLOTS,
    SPANS,
    bins_kernel,
    brackets_kernel,
    gather_kernel,
    peaks_kernel,
)
from kvq.kernels.draw.triton_search import choose_kernel, open_kernel, plan_kernel
from kvq.kernels.gpu.launch import launch

_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}  # masses are the same in every kernel


def draw(
    logits: Tensor, parameters: Tensor | None, most: Kind, raw: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row as `draw_whole` and `draw_ranked` of the reference do.

    `logits`: any float type, [rows, vocab]; `parameters`: int64 [rows, COLUMNS] on the device, or None if all
    rows are greedy; `most`: the most expensive kind among the rows; `raw`: the logits before changes, if they
    were changed. Returns the tokens, int64 [rows], and fp64 [3 * rows]: the tokens, then the highest logits
    before and after changes, NaN if a row contains NaN. If a row's highest logit isn't finite, its token is
    meaningless.
    """
    assert (parameters is None) == (most is Kind.GREEDY), "rows that draw have parameters"
    logits = _dense(logits)
    (rows, vocab), device, stride = logits.shape, logits.device, logits.stride(0)
    before, spans = logits if raw is None else _dense(raw), triton.cdiv(vocab, SPAN.value)
    slots = triton.cdiv(SPANS.value + SPAN_SLOTS.value * spans, 16) * 16  # rows begin aligned
    # Memory between launches; it needs no zeros, as launches read only what an earlier one has written.
    scratch = torch.empty(rows, slots, dtype=torch.int64, device=device)
    padded, changed = {"SPANS_PAD": triton.next_power_of_2(spans), **_LAUNCH}, {"CHANGED": raw is not None}
    by_span, by_row = (spans, rows, 1), (rows, 1, 1)  # programs
    strides = stride, before.stride(0), slots
    launch(peaks_kernel, by_span, (logits, before, scratch), (vocab, *strides), {**changed, **_LAUNCH})
    if parameters is not None:
        launch(brackets_kernel, by_span, (logits, parameters, scratch), (vocab, stride, slots), padded)
    if parameters is not None and most is Kind.RANKED:
        for choose, read in ((open_kernel, bins_kernel), (plan_kernel, gather_kernel)):
            launch(choose, by_row, (parameters, scratch), (vocab, slots), padded)
            launch(read, by_span, (logits, parameters, scratch), (vocab, stride, slots), padded)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    numbers = torch.empty(3 * rows, dtype=torch.float64, device=device)
    tensors = logits, tokens if parameters is None else parameters, scratch, tokens, numbers
    flags = {"ALL_GREEDY": parameters is None, **changed}
    launch(choose_kernel, by_row, tensors, (vocab, stride, slots), {**flags, **padded})
    return tokens, numbers


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()
