"""Drawing in Triton: no row is sorted, and the launches are as many for any rows and any vocabulary.

    peaks      each span's likeliest token                      every row
    brackets   masses and counts by 4 brackets                      rows that draw
    open       which of them to tell apart                      rows that rank tokens, and below
    bins       masses and counts by 2,048 bins, in those
    plan       which bins to search
    gather     their tokens
    choose     searches them; everybody's token                 every row

Sums are of whole numbers, so it doesn't matter in which order programs add to them.
"""

from typing import Any

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

    `logits`: any float type, [rows, vocab]; `parameters`: int64 [rows, COLUMNS] on the device, None if all
    rows are greedy; `most`: the kind with most work among the rows; `raw`: the logits before changes, if
    there were any. Returns the tokens, int64 [rows], and fp64 [3 * rows]: the tokens, then the highest logits
    before changes and after, NaN where a row holds NaN. Where the highest isn't finite, the token means
    nothing.
    """
    assert (parameters is None) == (most is Kind.GREEDY), "rows that draw have parameters"
    rows = _Rows(_dense(logits), None if raw is None else _dense(raw), parameters)
    rows.find_peaks()
    if most is not Kind.GREEDY:
        rows.run(brackets_kernel)
    if most is Kind.RANKED:
        rows.run_by_row(open_kernel)
        rows.run(bins_kernel)
        rows.run_by_row(plan_kernel)
        rows.run(gather_kernel)
    return rows.choose()


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _Rows:
    """One call's rows, and the scratch memory in which its launches leave things for each other.

    Nothing of it is zeroed by the host: what is read was written by an earlier launch.
    """

    def __init__(self, logits: Tensor, raw: Tensor | None, parameters: Tensor | None) -> None:
        self._logits, self._raw, self._parameters = logits, raw, parameters
        self._rows, self._vocab = logits.shape
        self._stride = logits.stride(0)
        self._spans = triton.cdiv(self._vocab, SPAN.value)
        slots = triton.cdiv(SPANS.value + SPAN_SLOTS.value * self._spans, 16) * 16  # rows begin aligned
        self._scratch = torch.empty(self._rows, slots, dtype=torch.int64, device=logits.device)
        self._slots = slots
        self._launch = {"SPANS_PAD": triton.next_power_of_2(self._spans), **_LAUNCH}

    def find_peaks(self) -> None:
        """Launch `peaks_kernel`."""
        raw = self._logits if self._raw is None else self._raw
        strides = self._stride, raw.stride(0), self._slots
        grid, tensors = (self._spans, self._rows, 1), (self._logits, raw, self._scratch)
        launch(
            peaks_kernel,
            grid,
            tensors,
            (self._vocab, *strides),
            {"CHANGED": self._raw is not None, **_LAUNCH},
        )

    def run(self, kernel: Any) -> None:
        """Launch a pass over all logits, a program a span."""
        assert self._parameters is not None, "rows that draw have parameters"
        tensors = self._logits, self._parameters, self._scratch
        numbers = self._vocab, self._stride, self._slots
        launch(kernel, (self._spans, self._rows, 1), tensors, numbers, self._launch)

    def run_by_row(self, kernel: Any) -> None:
        """Launch a program a row."""
        assert self._parameters is not None, "rows that draw have parameters"
        tensors, numbers = (self._parameters, self._scratch), (self._vocab, self._slots)
        launch(kernel, (self._rows, 1, 1), tensors, numbers, self._launch)

    def choose(self) -> tuple[Tensor, Tensor]:
        """Launch `choose_kernel`, and return what `draw` returns."""
        tokens = torch.empty(self._rows, dtype=torch.int64, device=self._logits.device)
        numbers = torch.empty(3 * self._rows, dtype=torch.float64, device=self._logits.device)
        greedy = self._parameters is None
        read = tokens if self._parameters is None else self._parameters
        tensors = self._logits, read, self._scratch, tokens, numbers
        sizes, flags = (self._vocab, self._stride, self._slots), {"CHANGED": self._raw is not None}
        grid = self._rows, 1, 1
        launch(choose_kernel, grid, tensors, sizes, {"ALL_GREEDY": greedy, **flags, **self._launch})
        return tokens, numbers
