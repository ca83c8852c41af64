"""Sampling parameters of a row, in the columns that GPU kernels read."""

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvq.kernels.draw.reference import MASS_OF_LIKELIEST

# Columns of a row's parameters, 64-bit integers; floats are stored as the bits of an fp64.
KIND, UNIFORM, TEMPERATURE, BAR, TOP_K, TOP_P = range(6)
COLUMNS = 6


class Kind(IntEnum):
    """Ways to choose a row's token, in order of increasing work."""

    GREEDY = 0  # the most likely token
    WHOLE = 1  # from running sums in token order
    RANKED = 2  # from running sums in order of likelihood


def packed(
    kind: Kind, *, temperature: float, min_p: float, top_k: int, top_p: float
) -> npt.NDArray[np.int64]:
    """Return a row's parameters, [COLUMNS], without its random number. All tokens are kept if `top_k` is the
    size of the vocabulary."""
    line = np.zeros(COLUMNS, dtype=np.int64)
    line[[KIND, BAR, TOP_K]] = kind, math.ceil(min_p * MASS_OF_LIKELIEST), top_k
    line[[TEMPERATURE, TOP_P]] = np.array([temperature, top_p]).view(np.int64)
    return line
