"""How a format's codes lie in memory, as numbers that the Triton kernels are specialized by."""

from kvq.formats import Code

FLOAT, FP8, INT8, INT4, GROUPED = range(5)


def kind_of(code: Code) -> int:
    """Grouped codes of 4 bits have a way of their own; those of any other width are unpacked one by one."""
    if code.is_grouped:
        return INT4 if code.bits == 4 else GROUPED
    return {Code.FP8: FP8, Code.INT8: INT8}.get(code, FLOAT)
