"""Merges found from scores give what SentencePiece gives."""

import random
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models

from kvq.models.gguf.tokenizer import scored_merges


def joined_by_score(text, rank):
    """SentencePiece's own loop: the best pair, the leftmost of equal ones, until none is left."""
    pieces = list(text)
    while True:
        pairs = [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in rank]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def vocabulary_of(rng, letters, count):
    """Letters and random strings of them, in any order: also ones that are ranked before their parts."""
    tokens = {"".join(rng.choices(letters, k=rng.choice((2, 2, 3, 4, 5, 9)))) for _ in range(count)}
    return rng.sample(sorted({*letters, *tokens}), len({*letters, *tokens}))


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "aé\U0001f999"])
def test_ids_are_those_of_the_plain_loop_whatever_the_order_of_scores(letters):
    rng = random.Random(len(letters))
    for _ in range(60):
        tokens = vocabulary_of(rng, letters, rng.choice((1, 5, 30)))
        rank = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=rank, merges=scored_merges(tokens)))
        for _ in range(10):
            text = "".join(rng.choices(letters, k=rng.randrange(1, 63)))
            assert tokenizer.encode(text).tokens == joined_by_score(text, rank), (tokens, text)


def test_every_token_that_can_be_made_has_a_pair_and_the_best_come_first():
    rng = random.Random(0)
    tokens = vocabulary_of(rng, "abcd", 400)
    rank = {token: number for number, token in enumerate(tokens)}
    made = [left + right for left, right in scored_merges(tokens)]
    assert made == sorted(made, key=rank.__getitem__)
    possible = {token for token in tokens if len(token) > 1 and joined_by_score(token, rank) == [token]}
    assert possible <= set(made)


@pytest.mark.parametrize("tokens", [[], ["a"], ["ab"], ["ab", "cd"]])
def test_vocabularies_without_pairs_have_no_merges(tokens):
    assert scored_merges(tokens) == []


def test_the_same_tokens_give_the_same_merges():
    tokens = vocabulary_of(random.Random(1), "xyz", 300)
    assert scored_merges(tokens) == scored_merges(list(tokens))
