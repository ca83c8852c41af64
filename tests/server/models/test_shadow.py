"""Two answers are compared token by token, and their distributions up to where they part."""

from math import isclose, log

import pytest

from kvq.engine import TokenLogprobs
from kvq.server.admission.transcript import Transcript
from kvq.server.models.shadow import compare


def answer(tokens, tops=()):
    logprobs = [
        TokenLogprobs(token, dict(top).get(token, -9.0), 1, tuple((one, log(p)) for one, p in top))
        for token, top in zip(tokens, tops, strict=False)
    ]
    return Transcript(seed=0, token_ids=list(tokens), logprobs=logprobs, is_complete=True)


@pytest.mark.parametrize(
    ("one", "other", "is_equal", "num_same"),
    [
        ([1, 2, 3], [1, 2, 3], True, 3),
        ([1, 2, 3], [1, 5, 3], False, 1),
        ([1, 2, 3], [1, 2], False, 2),
        ([4], [5], False, 0),
        ([], [], True, 0),
        ([], [1], False, 0),
    ],
)
def test_equality_and_the_first_difference(one, other, is_equal, num_same):
    found = compare(answer(one), answer(other))

    assert (found.is_equal, found.num_same, found.kl) == (is_equal, num_same, None)


def test_kl_is_exact_where_the_likeliest_tokens_are_all_there_is():
    p, q = ((1, 0.75), (2, 0.25)), ((1, 0.5), (2, 0.5))

    found = compare(answer([1], [p]), answer([1], [q]))

    assert isclose(found.kl, 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5), abs_tol=1e-9)


def test_other_tokens_count_as_one_and_equal_distributions_as_zero():
    p, q = ((1, 0.5), (2, 0.2), (9, 0.1)), ((2, 0.3), (1, 0.4), (8, 0.1))  # 1 and 2 are in both

    found = compare(answer([1], [p]), answer([1], [q]))

    assert isclose(found.kl, 0.5 * log(0.5 / 0.4) + 0.2 * log(0.2 / 0.3) + 0.3 * log(0.3 / 0.3), abs_tol=1e-9)
    assert compare(answer([1], [p]), answer([1], [p])).kl == pytest.approx(0, abs=1e-12)


def test_positions_after_the_first_difference_have_other_contexts_and_do_not_count():
    p, q, far = ((1, 0.9), (2, 0.1)), ((1, 0.8), (2, 0.2)), ((1, 0.01), (2, 0.99))

    two = compare(answer([1, 1, 1], [p, p, p]), answer([1, 2, 1], [q, q, far]))
    one = compare(answer([1], [p]), answer([1], [q]))

    assert isclose(two.kl, one.kl)


def test_a_token_that_is_impossible_for_one_of_them_gives_a_finite_divergence():
    found = compare(answer([1], [((1, 1.0),)]), answer([1], [((1, 1e-300),)]))

    assert 50 < found.kl <= 1000
