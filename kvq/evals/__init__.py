"""Measuring what a KV format costs in quality, over the path that serves."""

from kvq.evals.data import read_text
from kvq.evals.perplexity import PerplexityRow, measure_perplexity
from kvq.evals.text import EvalText, calibration_text, default_text

__all__ = ["EvalText", "PerplexityRow", "calibration_text", "default_text", "measure_perplexity", "read_text"]
