"""Random words are random, and the same wherever they are computed."""

import random

import numpy as np
import pytest
import torch

from kvq.engine.sampling import watermarks
from kvq.watermark import Green
from kvq.watermark.key import is_green, key_from, layer_bits, token_words


def seeds(count: int) -> np.ndarray:
    pick = random.Random(7)
    return np.array([pick.getrandbits(64) for _ in range(count)], dtype=np.uint64)


def test_the_sampler_has_the_words_of_the_detector():
    contexts = np.append(seeds(63), np.array([0, (1 << 64) - 1], dtype=np.uint64))
    tokens = np.array([0, 1, 2, 4095, 131_071, (1 << 20) - 1])
    there = token_words(contexts[:, None], tokens)
    here = watermarks.token_words(torch.from_numpy(contexts.view(np.int64)), torch.from_numpy(tokens)[None])
    assert np.array_equal(here.numpy().view(np.uint64), there)


def test_words_are_what_they_were():
    """Texts that were marked before would not be found any more. The first outputs of SplitMix64 from 0."""
    words = token_words(np.array([0], dtype=np.uint64), np.array([0, 1, 2]))
    assert [int(word) for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    key = key_from(b"sixteen letters!")
    assert key.word(b"green", [1, 2]) == 0xA32B271DAB254201


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_as_many_tokens_are_green_as_was_asked(gamma):
    words = token_words(seeds(63)[:, None], np.arange(5000))
    green = is_green(words, Green(gamma=gamma))
    spread = np.sqrt(gamma * (1 - gamma) / green.size)
    assert abs(green.mean() - gamma) < 4 * spread
    assert abs(green.mean(axis=1) - gamma).max() < 4.5 * np.sqrt(gamma * (1 - gamma) / 5000)


def test_bits_of_layers_are_even_and_unrelated():
    bits = layer_bits(token_words(seeds(31)[:, None], np.arange(2000)), 64).reshape(-1, 64).astype(float)
    spread = 0.5 / np.sqrt(len(bits))
    assert abs(bits.mean(axis=0) - 0.5).max() < 4.5 * spread
    related = np.corrcoef(bits.T) - np.eye(64)
    assert abs(related).max() < 5 / np.sqrt(len(bits))
