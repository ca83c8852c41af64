"""A mark changes what it says it changes, of rows that are marked, and nothing else."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvq.engine.params import SamplingParams
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.sampling.watermarks import Watermarks, play, token_words
from kvq.watermark import Green, Tournament
from kvq.watermark.key import is_green, key_from, layer_bits
from kvq.watermark.key import token_words as words_of
from tests.engine.sampling.reference import add, bitmask, distribution

KEY = key_from(b"the key of these tests")
CPU = torch.device("cpu")
SCHEMES = [Green(), Tournament()]
CONTEXT = [7, 3, 9, 4, 30, 2]
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.05},
    {"top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
]


def marking(scheme, vocab_size: int, max_rows: int = 1, key=KEY) -> Sampler:
    return Sampler(max_rows=max_rows, vocab_size=vocab_size, device=CPU, watermark=(scheme, key))


def marked(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | options), watermark=True)


def random_logits(vocab_size: int, rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def word(scheme, context) -> np.ndarray:
    return np.array([KEY.word(scheme.tag, context[len(context) - scheme.context :])], dtype=np.uint64)


def won(probabilities: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The definition: two candidates, the one with the higher bit, either if they are equal."""
    for layer in bits.T:  # [tokens] of each layer
        better = (layer[:, None] > layer) + 0.5 * (layer[:, None] == layer)  # [first, second]
        pairs = probabilities[:, None] * probabilities
        probabilities = (pairs * better).sum(axis=1) + (pairs * (1 - better)).sum(axis=0)
        probabilities /= probabilities.sum()  # else rounding doubles in each
    return probabilities


def expected(logits, scheme, params, context) -> np.ndarray:
    """Probabilities by token, from the definitions."""
    vocab = len(logits)
    words = words_of(word(scheme, context), np.arange(vocab))
    scores = logits.double().numpy()
    if isinstance(scheme, Green):
        scores = scores + scheme.delta * is_green(words, scheme)
    kept = distribution(scores, params)
    plain = np.array([kept.get(token, 0.0) for token in range(vocab)])
    return plain if isinstance(scheme, Green) else won(plain, layer_bits(words, scheme.layers))


def drawn(scheme, params, logits, context, times: int, prompt=()) -> Counter:
    target = marking(scheme, logits.shape[-1], times)
    rows = list(range(times))
    for row in rows:
        add(target, row, params, seed=5, prompt=prompt)
    contexts = dict.fromkeys(rows, context)
    return Counter(target.sample(logits.expand(times, -1), rows, rows, contexts=contexts).wait().tokens)


@pytest.mark.daily(8)
@pytest.mark.parametrize("scheme", [*SCHEMES, Tournament(layers=3, context=1)], ids=str)
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_come_as_often_as_the_definition_says(scheme, options):
    params, logits, times = marked(**options), random_logits(33), 6000
    want = expected(logits[0], scheme, params, CONTEXT)
    got = drawn(scheme, params, logits, CONTEXT, times, prompt=CONTEXT)
    assert not [token for token in got if want[token] == 0]
    likely = want * times > 5
    chi = sum((got[t] - want[t] * times) ** 2 / (want[t] * times) for t in np.flatnonzero(likely))
    freedom = max(1, int(likely.sum()) - 1)
    assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 4


def test_a_tournaments_masses_are_those_of_its_rounds():
    pick = np.random.default_rng(1)
    for vocab, layers in ((3, 1), (33, 20), (257, 64)):
        masses = torch.from_numpy(pick.integers(0, 1 << 43, (5, vocab)))
        seeds = pick.integers(0, 1 << 63, 5)
        words = token_words(torch.from_numpy(seeds), torch.arange(vocab)[None])
        got = play(masses, words, layers).numpy()
        for row in range(5):
            bits = layer_bits(words_of(seeds[row : row + 1].astype(np.uint64), np.arange(vocab)), layers)
            plain = masses[row].double().numpy()
            want = won(plain / plain.sum(), bits)
            assert np.allclose(got[row] / got[row].sum(), want, rtol=1e-9, atol=1e-12)


def test_over_keys_a_tournament_changes_no_probability():
    """Non-distortion: the mean over keys of what a tournament leaves is what it was given."""
    plain = torch.softmax(random_logits(33)[0].double(), dim=0)
    masses = (plain * 2**43).long().expand(20_000, -1)
    words = token_words(
        torch.from_numpy(np.random.default_rng(2).integers(0, 1 << 63, 20_000)), torch.arange(33)[None]
    )
    left = play(masses, words, 20) / 2**52
    error = left.std(dim=0) / len(left) ** 0.5
    assert ((left.mean(dim=0) - plain).abs() < 4.5 * error).all()
    assert (left.std(dim=0) > 0.1 * plain.sqrt()).all()  # each key changes them a lot


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_without_a_mark_are_the_same_beside_marked_ones(scheme):
    """And as in a sampler that knows of no watermarks."""
    logits = random_logits(257, rows=6)
    params = [
        SamplingParams(temperature=t, top_k=k, logprobs=1) for t, k in ((0, None), (1.0, None), (0.7, 9))
    ]
    plain, mixed = Sampler(max_rows=6, vocab_size=257, device=CPU), marking(scheme, 257, 6)
    for row, one in enumerate(params):
        add(plain, row, one, seed=row)
        add(mixed, row, one, seed=row)
        add(mixed, 3 + row, marked(temperature=1.0 + row), seed=row)
    alone = plain.sample(logits[:3], [0, 1, 2], [4] * 3).wait()
    beside = mixed.sample(logits, list(range(6)), [4] * 6, contexts=dict.fromkeys((3, 4, 5), CONTEXT)).wait()
    assert beside.tokens[:3] == alone.tokens
    assert beside.logprobs[:3] == alone.logprobs


def test_unmarked_rows_are_drawn_from_the_very_logits(monkeypatch):
    """No copy, and no call."""
    target = marking(Green(), 33)
    monkeypatch.setattr(Watermarks, "apply", None)
    add(target, 0, SamplingParams(temperature=1.0), seed=1)
    seen = []
    monkeypatch.setattr(
        target, "_draw", lambda scores, *rest: seen.append((scores, rest[-1])) or (None, None)
    )
    monkeypatch.setattr(target, "_pending", lambda *_: None)
    logits = random_logits(33)
    target.sample(logits, [0], [0])
    assert seen[0][0].data_ptr() == logits.data_ptr()
    assert seen[0][1] is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("vocab_size", [33, 4097])
def test_a_marked_row_is_the_same_alone_and_in_any_batch(scheme, vocab_size):
    pick = random.Random(vocab_size)
    logits = random_logits(vocab_size, rows=24)
    params = [
        SamplingParams(**({"temperature": 1.0} | pick.choice(FILTERS)), watermark=pick.choice([None, True]))
        for _ in range(24)
    ]
    texts = [[pick.randrange(33) for _ in range(pick.randrange(40))] for _ in range(24)]

    def run(chosen, rows):
        target = marking(scheme, vocab_size, 24)
        for row, i in zip(rows, chosen, strict=True):
            add(target, row, params[i], seed=i, prompt=texts[i][:9])
        contexts = {place: texts[i] for place, i in enumerate(chosen) if params[i].watermark}
        return target.sample(logits[chosen], rows, chosen, contexts=contexts).wait().tokens

    alone = [run([i], [pick.randrange(24)])[0] for i in range(24)]
    for _ in range(4):
        chosen = pick.sample(range(24), k=pick.randint(2, 24))
        assert run(chosen, pick.sample(range(24), k=len(chosen))) == [alone[i] for i in chosen]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_with_several_places_is_marked_at_each_by_what_is_before_it(scheme):
    """As when several drafted tokens are looked at in one step."""
    logits = random_logits(257, rows=3)
    target = marking(scheme, 257, 2)
    add(target, 0, marked(), seed=1, prompt=CONTEXT)
    texts = [CONTEXT, [*CONTEXT, 11], [*CONTEXT, 11, 12]]
    scores = target._watermarks.apply(logits, [0, 0, 0], dict(enumerate(texts)))
    for i in range(3):
        alone = target._watermarks.apply(logits[i : i + 1], [0], {0: texts[i]})
        assert torch.equal(scores[i], alone[0])
        assert not torch.equal(scores[i], logits[i])


def test_a_tournament_passes_over_contexts_that_came_before():
    scheme = Tournament(context=2)
    logits = random_logits(33)
    plain = torch.log_softmax(logits, dim=-1)
    for text, start, is_played in (
        ([1, 2, 3, 1, 2], 0, False),
        ([1, 2, 3, 1, 2], 2, False),  # the context of the first generated token is the prompt's end
        ([1, 2, 3, 1, 2], 3, True),  # nothing was drawn by it
        ([1, 1, 1], 0, False),
        ([1, 1, 1], 2, False),
        ([2, 1, 1], 0, True),
        ([1, 2, 3, 2, 2], 0, True),
        ([1], 0, False),
    ):
        target = Watermarks(scheme, KEY, max_rows=1, vocab_size=33, device=CPU)
        target.add(0, marked(), prompt_length=start)
        scores = target.apply(logits, [0], {0: text})
        left = torch.log_softmax(scores, dim=-1)
        assert torch.allclose(left, plain, atol=1e-5) != is_played, (text, start)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_bad_rows_are_flagged_and_their_neighbours_untouched(scheme):
    logits = random_logits(4097, rows=6)
    good = logits.clone()
    logits[0, 17], logits[2, 4096], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, 1:] = good[5, 1:] = -torch.inf  # legal: one token is left
    outcomes = []
    for batch in (logits, good):
        target = marking(scheme, 4097, 6)
        for row in range(6):
            add(target, row, marked(top_p=0.9 if row % 2 else 1.0), seed=row)
        rows = list(range(6))
        outcomes.append(target.sample(batch, rows, [0] * 6, contexts=dict.fromkeys(rows, CONTEXT)).wait())
    assert outcomes[0].finite == [False, True, False, True, False, True]
    for row in (1, 3, 5):
        assert outcomes[0].tokens[row] == outcomes[1].tokens[row]
    assert outcomes[0].tokens[5] == 0


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_forbidden_stays_so(scheme):
    target = marking(scheme, 33, 63)
    rows = list(range(63))
    for row in rows:
        add(target, row, marked(logit_bias={5: -100}, min_tokens=3), seed=row, stop_ids=[6])
    masks = {row: bitmask({5, 6, 7, 8, 9}, 33) for row in rows}
    contexts = {row: [row, *CONTEXT, row, row + 1, row] for row in rows}
    got = target.sample(random_logits(33).expand(63, -1), rows, [0] * 63, masks=masks, contexts=contexts)
    assert set(got.wait().tokens) == {7, 8, 9}


def test_greedy_rows_are_marked_by_green_lists_and_left_by_tournaments():
    logits = random_logits(33)
    green = marking(Green(delta=50.0), 33)
    add(green, 0, marked(temperature=0.0))
    words = words_of(word(Green(), CONTEXT), np.arange(33))
    best = np.where(is_green(words, Green()), logits[0].numpy(), -np.inf).argmax()
    assert green.sample(logits, [0], [0], contexts={0: CONTEXT}).wait().tokens == [best]
    other = marking(Tournament(), 33)
    add(other, 0, marked(temperature=0.0))
    assert other.sample(logits, [0], [0], contexts={0: CONTEXT}).wait().tokens == [int(logits.argmax())]


def test_a_row_that_was_marked_leaves_nothing_behind():
    for scheme in SCHEMES:
        target = marking(scheme, 33)
        for one in (marked(top_k=3), SamplingParams(temperature=1.0), marked(), marked(temperature=0.0)):
            add(target, 0, one)
            assert (0 in target._watermarks) == (
                one.watermark is True and not (scheme == Tournament() and one.is_greedy)
            )
            target.remove(0)
            assert 0 not in target._watermarks


def test_log_probabilities_are_the_models_own():
    logits = random_logits(33)
    for scheme in SCHEMES:
        target = marking(scheme, 33)
        add(target, 0, marked(logprobs=0), seed=3)
        got = target.sample(logits, [0], [0], contexts={0: CONTEXT}).wait()
        want = torch.log_softmax(logits[0].double(), dim=0)[got.tokens[0]]
        assert got.logprobs[0].logprob == pytest.approx(float(want), abs=1e-5)


def test_deltas_raise_green_tokens():
    """The stronger the mark, the more tokens are green."""
    logits = random_logits(257)
    words = words_of(word(Green(), CONTEXT), np.arange(257))
    green = set(np.flatnonzero(is_green(words, Green())))
    shares = []
    for delta in (0.01, 1.0, 3.0):
        got = drawn(Green(delta=delta), marked(), logits, CONTEXT, 1000)
        shares.append(sum(count for token, count in got.items() if token in green) / 1000)
    assert all(b > a + 0.05 for a, b in pairwise(shares))
