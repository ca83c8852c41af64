"""Evaluation of the quality cost of KV formats, on the code path that serves requests."""

from typing import TYPE_CHECKING

from kvq.lazy import lazily

if TYPE_CHECKING:
    from kvq.evals.data import read_text
    from kvq.evals.perplexity import PerplexityRow, measure_perplexity
    from kvq.evals.text import EvalText, calibration_text, default_text
else:
    __getattr__ = lazily(
        __name__,
        {
            "kvq.evals.data": ("read_text",),
            "kvq.evals.perplexity": ("PerplexityRow", "measure_perplexity"),
            "kvq.evals.text": ("EvalText", "calibration_text", "default_text"),
        },
    )

__all__ = ["EvalText", "PerplexityRow", "calibration_text", "default_text", "measure_perplexity", "read_text"]
