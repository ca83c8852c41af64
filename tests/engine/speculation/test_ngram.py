"""N-grams: what is found followed the longest known end, and nobody learns of another tenant's answers."""

import random
from array import array

import pytest

from kvq.engine import SamplingParams
from kvq.engine.speculation import ngram
from kvq.engine.speculation.ngram import NGrams, _Recent
from tests.engine.kit import drive, submit
from tests.engine.speculation.kit import counts, speculating


def found(text: list[int], context: list[int] | None = None, count: int = 4) -> list[int]:
    known = NGrams()
    known.extend(text)
    return known.following(array("I", text if context is None else context), count)


def by_hand(text: list[int], context: list[int], count: int) -> list[int]:
    """The rule, slowly: the longest n-gram that came before, where it came last."""
    for length in ngram._LENGTHS:
        if len(context) < length:
            continue
        ends = [end for end in range(length, len(text)) if text[end - length : end] == context[-length:]]
        if ends:
            period = text[ends[-1] :]
            return (period * count)[:count]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_follows_the_longest_end_that_came_before(seed):
    rng = random.Random(seed)
    known, text = NGrams(), []
    for _ in range(300):
        piece = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        text += piece
        known.extend(piece)
        assert known.following(array("I", text), 5) == by_hand(text, text, 5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 4], []),
        ([5, 5, 5], [5, 5, 5, 5]),
        ([7, 8, 7, 8, 7], [8, 7, 8, 7]),
        ([1], []),
        ([], []),
    ],
)
def test_repetition_goes_on(text, wanted):
    assert found(text) == wanted


def test_another_text_is_searched_by_the_end_of_ones_own():
    assert found([1, 2, 3, 4, 5], [9, 9, 2, 3], 2) == [4, 5]
    assert found([1, 2, 3, 4, 5], [9, 9, 3, 2], 2) == []


def test_answers_are_kept_by_owner_and_bounded():
    recent = _Recent(most_tokens=100)
    for i in range(50):
        recent.add(("a", None), [i, i + 1, i + 2] * 10)
    text = recent.of(("a", None))
    assert text is not None
    assert len(text.tokens) <= 200 + 30
    assert text.following(array("I", [49, 50]), 1) == [51]
    assert text.following(array("I", [3, 4]), 1) == [], "the oldest were not forgotten"
    assert recent.of(("b", None)) is recent.of(("a", "salt")) is None


def test_of_many_tenants_those_heard_of_last_are_known():
    recent = _Recent(most_tokens=100, most_in_all=300)
    for i in range(40):
        recent.add((str(i), None), [i, 1, 2] * 10)
        recent.add(("never says anything", None), [])
    known = [owner for owner, _ in recent._texts]
    assert known == [str(i) for i in range(30, 40)]
    assert sum(len(text.tokens) for text in recent._texts.values()) == recent._total == 300


def test_a_long_text_is_indexed_in_several_steps(monkeypatch):
    """Each of which does a bounded part, and in the end all is found."""
    monkeypatch.setattr(ngram, "_AT_ONCE", 100)
    known = NGrams()
    known.extend([*range(1000), 0, 1])
    context = array("I", [0, 1])
    assert [known.following(context, 2) for _ in range(2)] == [[2, 3], [2, 3]]
    late = array("I", [898, 899])
    found = [bool(known.following(late, 1)) for _ in range(10)]
    assert found == sorted(found), "what is found once is found again"
    assert found[-1]
    assert not found[0]


@pytest.mark.parametrize(
    ("other", "salt", "finds"), [("a", None, True), ("b", None, False), ("a", "x", False)]
)
def test_only_a_tenants_own_answers_are_proposed(tiny, other, salt, finds):
    """An answer that was given before is known to its tenant, under the same salt, and to nobody else."""
    prompt, params = [1000, 17, 333], SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    llm = speculating(tiny)
    first, before = submit(llm, prompt, params, tenant="a"), None
    drive(llm, [first])
    before = counts(llm)
    drive(llm, [submit(llm, prompt, params, tenant=other, cache_salt=salt)])
    after = counts(llm)
    assert (after[1] - before[1] > 5) == finds
