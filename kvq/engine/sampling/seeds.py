"""Random numbers that depend only on a seed and a position.

A stateful generator would make a row's tokens depend on earlier draws, and thus on the batch.
Here, number `count` of stream `seed` is a hash of the two. The hash is SplitMix64's, which passes BigCrush,
needs no state to save when a request is preempted, and takes a dozen integer operations for an entire batch.
(Philox is as good, but takes several times the work for a single number.)

Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 16.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:  # D247: one number per token, from seed and position
    """Return the 64-bit seed for sample `index` of a request. Nearby seeds give unrelated results."""
    mixed = _hash(_hash(_words([seed])) + _words([index + 1]) * _GOLDEN)
    return int(mixed[0])


def seed_words(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return `words` for `uniforms`: hashed seeds, so that the streams of n and n + 1 don't overlap."""
    return _hash(_words(seeds))


class Purpose(IntEnum):
    """Purpose of a random number. Every position has a separate number for each purpose."""

    TOKEN = 0  # to sample the token
    DRAFT = 1  # to sample a draft from another model
    KEEPING = 2  # to decide whether the draft is kept


def uniforms(
    words: npt.NDArray[np.uint64], counts: Sequence[int], purpose: Purpose = Purpose.TOKEN
) -> npt.NDArray[np.float64]:
    """Return number `counts[i]` of stream `words[i]`: float64 [rows], in [0, 1), with 53 random bits."""
    if purpose is not Purpose.TOKEN:
        words = _hash(words ^ _hash(_words([purpose])))
    bits = _hash(words + (np.array(counts, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return numbers modulo 2**64, so that negative seeds also work."""
    return np.array([number & _MASK for number in numbers], dtype=np.uint64)


def _hash(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's finalizer: every input bit changes half of the output bits. Overflow wraps."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
