"""A mark is found with its key and no other; a text without one is called marked as rarely as p says."""

import random
import subprocess
import sys

import numpy as np
import pytest

from kvq.watermark import Green, Tournament, detect
from kvq.watermark.detection import least_p
from kvq.watermark.key import Key, is_green, key_from, layer_bits, token_words

SCHEMES = [Green(), Green(gamma=0.5, context=1), Tournament(), Tournament(layers=3, context=2)]
VOCAB = 600


def key(number: int) -> Key:
    return key_from(f"key number {number} of tests".encode())


def choices(scheme, secret: Key, context: list[int], some: list[int]) -> int:
    """The best of a few drawn tokens, as the mark wants them."""
    words = token_words(np.array([secret.word(scheme.tag, context)], dtype=np.uint64), np.array(some))
    if isinstance(scheme, Green):
        return some[int(is_green(words, scheme).argmax())]
    return some[int(layer_bits(words, scheme.layers).sum(axis=-1).argmax())]


def text(scheme, secret: Key | None, length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    pick = random.Random(seed)
    tokens = [pick.randrange(vocab) for _ in range(scheme.context)]
    while len(tokens) < length:
        some = [pick.randrange(vocab) for _ in range(3)]
        context = tokens[len(tokens) - scheme.context :]
        tokens.append(some[0] if secret is None else choices(scheme, secret, context, some))
    return tokens


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_mark_is_found_with_its_key_only(scheme):
    tokens = text(scheme, key(1), 200, seed=1)
    assert detect(tokens, scheme, key(1)).p < 1e-8
    assert detect(tokens, scheme, key(1)).z > 5
    assert min(detect(tokens, scheme, key(other)).p for other in range(2, 42)) > 1e-4
    other = Tournament() if isinstance(scheme, Green) else Green()
    assert detect(tokens, other, key(1)).p > 1e-4


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_mark_of_a_part_is_found_without_what_is_before(scheme):
    tokens = text(scheme, key(3), 300, seed=4)
    assert detect(tokens[77:], scheme, key(3)).p < 1e-8


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("vocab", [6, VOCAB], ids=["repetitive", "varied"])
def test_p_is_the_share_of_unmarked_texts_below_it(scheme, vocab):
    """1,000 keys; repetitive texts too, whose n-grams come again and again."""
    tokens = text(scheme, None, 203, seed=5, vocab=vocab)
    ps = np.array([detect(tokens, scheme, key(number)).p for number in range(1000)])
    for bar in (0.5, 0.1, 0.01):
        spread = np.sqrt(bar * (1 - bar) / len(ps))
        assert (ps <= bar).mean() < bar + 4 * spread
        assert (ps <= bar).mean() > bar * 0.4 - 3 * spread  # a binomial has steps


def test_each_context_and_token_counts_once():
    tokens = [1, 2, 3, 4, 5, 6] * 40
    assert detect(tokens, Green(context=2), key(1)).counted == 6
    assert detect([1, 2, 3, 1, 2, 4, 1, 2, 3], Green(context=2), key(1)).counted == 6
    assert detect([1, 2, 3, 1, 2, 4, 1, 2, 3], Tournament(context=2), key(1)).counted == 5


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_text_too_short_for_a_context_says_nothing(scheme):
    for length in range(scheme.context + 1):
        found = detect([5] * length, scheme, key(1))
        assert (found.tokens, found.counted, found.z, found.p) == (length, 0, 0.0, 1.0)
    assert least_p(0, scheme) == 1
    assert least_p(3, scheme) == (0.25**3 if scheme == Green() else least_p(1, scheme) ** 3)


def test_detection_loads_no_torch():
    code = (
        "import sys; from kvq.watermark import detect, Green; from kvq.watermark.key import key_from;"
        "detect(range(99), Green(), key_from(b'x' * 20)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
