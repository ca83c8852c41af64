"""Random words of tokens: 64 bits after a context, SplitMix64 of the context's word and the token.

The sampler has the same in torch (`kvq/engine/sampling/watermarks.py`); a test holds them together.

Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 16.
"""

import numpy as np
import numpy.typing as npt

from kvq.watermark.schemes import Green

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GREEN_BITS = 32  # of a word, its highest, decide whether a token is green

Words = npt.NDArray[np.uint64]


def token_words(contexts: Words, tokens: npt.NDArray[np.integer]) -> Words:  # D264
    """Return the words of tokens. `contexts`: `Key.word` of each token's context, in a fitting shape."""
    words = contexts + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def green_bar(scheme: Green) -> int:
    """Return the bound below which the highest 32 bits of a green token's word lie."""
    return int(scheme.gamma * (1 << GREEN_BITS))


def is_green(words: Words, scheme: Green) -> npt.NDArray[np.bool_]:
    """Return a mask of the green tokens, in the shape of their words."""
    return words >> np.uint64(64 - GREEN_BITS) < np.uint64(green_bar(scheme))


def layer_bits(words: Words, layers: int) -> npt.NDArray[np.uint8]:
    """Return the bits of tokens in a tournament's layers, [..., layers]; the lowest is the first layer's."""
    shifts = np.arange(layers, dtype=np.uint64)
    return (words[..., None] >> shifts & np.uint64(1)).astype(np.uint8)
