"""How a format's codes lie in memory, as numbers that the Triton kernels are specialized by."""

from kvq.formats import Code

KINDS = {Code.FP32: 0, Code.BF16: 0, Code.FP16: 0, Code.FP8: 1, Code.INT8: 2, Code.INT4: 3}
