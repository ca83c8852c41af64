"""Drawing in Triton: no row is sorted, and the launches are as many for any rows and any vocabulary.

    peaks      each span's likeliest token                      every row
    brackets   masses and counts by 8 bins                      rows that draw
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
from kvq.kernels.draw.triton_passes import bins_kernel, brackets_kernel, gather_kernel, peaks_kernel
from kvq.kernels.draw.triton_plan import open_kernel, plan_kernel
from kvq.kernels.draw.triton_rows import BINS, BRACKETS, PLAN, ROOM, SPAN
from kvq.kernels.draw.triton_search import choose_kernel

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
        rows.sum_brackets()
    if most is Kind.RANKED:
        rows.gather_candidates()
    return rows.choose()


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _Rows:
    """One call's rows, and what its launches leave for each other on the device.

    Nothing is zeroed: what is read was written by an earlier launch, or belongs to rows of another kind.
    """

    def __init__(self, logits: Tensor, raw: Tensor | None, parameters: Tensor | None) -> None:
        self._logits, self._raw, self._parameters = logits, raw, parameters
        self._rows, self._vocab = logits.shape
        self._spans = triton.cdiv(self._vocab, SPAN.value)
        self._pad = triton.next_power_of_2(self._spans)
        self._tops = self._longs(self._spans)  # the key of a span's likeliest token
        self._lows = self._ints(self._spans)  # the rank of its lowest finite logit
        self._raws = self._lows if raw is None else self._ints(self._spans)  # of its highest before changes
        self._masses, self._plans, self._gathered = self._tops, self._tops, self._tops

    def find_peaks(self) -> None:
        raw = self._logits if self._raw is None else self._raw
        peaks_kernel[(self._spans, self._rows)](
            self._logits, raw, self._tops, self._lows, self._raws,
            self._vocab, self._logits.stride(0), raw.stride(0),
            CHANGED=self._raw is not None, **_LAUNCH,
        )  # fmt: skip

    def sum_brackets(self) -> None:
        self._masses = self._longs(self._spans, BRACKETS.value)
        self._counts = self._ints(self._spans, BRACKETS.value)
        self._pass(brackets_kernel, self._masses, self._counts)

    def gather_candidates(self) -> None:
        self._plans = self._longs(PLAN.value)
        self._gathered = self._longs(ROOM.value)
        bins = self._longs(BINS.value), self._ints(BINS.value)
        self._per_row(open_kernel, self._masses, self._counts, self._plans, *bins)
        self._pass(bins_kernel, self._plans, *bins)
        self._per_row(plan_kernel, self._plans, *bins)
        self._pass(gather_kernel, self._plans, self._gathered)

    def choose(self) -> tuple[Tensor, Tensor]:
        tokens = self._longs()
        numbers = torch.empty(3 * self._rows, dtype=torch.float64, device=tokens.device)
        choose_kernel[(self._rows,)](
            self._logits, tokens if self._parameters is None else self._parameters,
            self._tops, self._lows, self._raws, self._masses, self._plans, self._gathered, tokens, numbers,
            self._vocab, self._logits.stride(0), self._spans,
            SPANS_PAD=self._pad, CHANGED=self._raw is not None,
            ALL_GREEDY=self._parameters is None, **_LAUNCH,
        )  # fmt: skip
        return tokens, numbers

    def _pass(self, kernel: Any, *between: Tensor) -> None:
        """A launch that reads all logits, a program a span."""
        kernel[(self._spans, self._rows)](
            self._logits, self._parameters, self._tops, self._lows, *between,
            self._vocab, self._logits.stride(0), SPANS_PAD=self._pad, **_LAUNCH,
        )  # fmt: skip

    def _per_row(self, kernel: Any, *between: Tensor) -> None:
        kernel[(self._rows,)](
            self._parameters, self._tops, self._lows, *between,
            self._spans, SPANS_PAD=self._pad, **_LAUNCH,
        )  # fmt: skip

    def _longs(self, *shape: int) -> Tensor:
        return torch.empty(self._rows, *shape, dtype=torch.int64, device=self._logits.device)

    def _ints(self, *shape: int) -> Tensor:
        return torch.empty(self._rows, *shape, dtype=torch.int32, device=self._logits.device)
