"""Promises: numbers depend on seed and count alone, are even, and streams are unrelated."""

import numpy as np

from kvq.engine.sampling.seeds import Purpose, mix_seed, seed_words, uniforms


def test_the_hash_is_splitmix64():
    """The generator seeded with 0 begins with this published number."""
    assert uniforms(np.zeros(1, dtype=np.uint64), [0])[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_a_number_depends_on_its_own_seed_and_count_only():
    seeds, counts = [5, -(1 << 63), (1 << 64) - 1, 5], [0, 7, 123456, 1]
    together = uniforms(seed_words(seeds), counts)
    alone = [uniforms(seed_words([s]), [c])[0] for s, c in zip(seeds, counts, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert all(0 <= u < 1 for u in alone)


def test_numbers_are_even_along_a_stream_and_across_neighbouring_seeds():
    streams = uniforms(seed_words([3] * 20000), range(20000)), uniforms(seed_words(range(20000)), [0] * 20000)
    for numbers in streams:
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 95  # chi-square, 49 degrees: 1 in 10,000 is above
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_samples_of_a_request_have_seeds_of_their_own():
    mixed = {mix_seed(seed, index) for seed in range(-5, 100) for index in range(128)}
    assert len(mixed) == 105 * 128
    assert all(0 <= seed < 1 << 64 for seed in mixed)
    assert mix_seed(-1, 3) == mix_seed((1 << 64) - 1, 3)


def test_a_position_has_a_number_of_its_own_for_every_purpose():
    words, counts = seed_words(range(5000)), [7] * 5000
    numbers = [uniforms(words, counts, purpose) for purpose in Purpose]
    assert (numbers[Purpose.TOKEN] == uniforms(words, counts)).all()
    for i, one in enumerate(numbers):
        for other in numbers[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
            assert not (one == other).any()
