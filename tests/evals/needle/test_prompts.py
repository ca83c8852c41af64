"""Needles lie where they should, in prompts of exactly the length that was asked for."""

import itertools

import pytest

from kvq.evals import default_text
from kvq.evals.needle.prompts import SENTENCE, TOKENS, NeedlePlan, NeedlePrompts
from kvq.evals.text import text_ids

TEXT = default_text().text


def prompts(tiny, *, needle=SENTENCE, distractors=0, seed=0, text=TEXT):
    plan = NeedlePlan(needle=needle, distractors=distractors, seed=seed)
    return NeedlePrompts(tiny.tokenizer, text, plan, vocab_size=4096)


@pytest.mark.parametrize("needle", [SENTENCE, TOKENS, "The code of {key}: {value}"])
@pytest.mark.parametrize("distractors", [0, 3])
def test_a_prompt_and_its_answer_have_exactly_the_length(tiny, needle, distractors):
    made = prompts(tiny, needle=needle, distractors=distractors)
    for length, depth, trial in itertools.product((150, 333, 1024), (0, 0.3, 1), (0, 1)):
        prompt = made.make(length=length, depth=depth, trial=trial)
        assert len(prompt.ids) + len(prompt.answer) == length


@pytest.mark.parametrize("needle", [SENTENCE, TOKENS])
def test_the_needle_stands_at_its_depth_and_is_asked_for_at_the_end(tiny, needle):
    haystack = text_ids(tiny.tokenizer, TEXT)
    made = prompts(tiny, needle=needle)
    for depth in (0, 0.25, 0.5, 0.9, 1):
        prompt = made.make(length=400, depth=depth, trial=0)
        at, size, answer = prompt.needle_at, prompt.needle_size, prompt.answer
        found = prompt.ids[at : at + size]
        value_at = next(i for i in range(size) if found[i : i + len(answer)] == answer)
        cue = found[:value_at]
        assert prompt.ids[-len(cue) :] == cue
        hay = prompt.ids[:at] + prompt.ids[at + size : -len(cue)]
        assert at == round(depth * len(hay))
        assert any(haystack[i : i + len(hay)] == hay for i in range(len(haystack) - len(hay) + 1))


def test_a_sentence_reads_as_written(tiny):
    prompt = prompts(tiny).make(length=200, depth=0.5, trial=0)
    at, size = prompt.needle_at, prompt.needle_size
    needle = tiny.tokenizer.decode(prompt.ids[at : at + size])
    value = tiny.tokenizer.decode(prompt.answer).strip()
    assert len(value) == 7
    assert value.isdigit()
    key = needle.split()[4]
    assert needle == f"\nThe secret number of {key} is {value}.\n"
    assert tiny.tokenizer.decode(prompt.ids).endswith(f"\nThe secret number of {key} is")


def test_tokens_of_a_random_needle_do_not_occur_nearby(tiny):
    made = prompts(tiny, needle=TOKENS)
    for trial in range(5):
        prompt = made.make(length=500, depth=0.5, trial=trial)
        at, size = prompt.needle_at, prompt.needle_size
        needle = prompt.ids[at : at + size]
        nearby = prompt.ids[at - 64 : at] + prompt.ids[at + size : at + size + 64] + prompt.ids[-67:-3]
        assert not set(needle) & set(nearby)
        assert len(set(needle)) == size


def test_distractors_have_other_keys_and_other_values(tiny):
    prompt = prompts(tiny, distractors=4).make(length=600, depth=0.5, trial=0)
    said = tiny.tokenizer.decode(prompt.ids).split("The secret number of ")[1:]
    keys = [part.split(" is")[0] for part in said]
    assert len(said) == 6  # five needles and the question
    assert len(set(keys)) == 5
    assert keys.count(keys[-1]) == 2
    values = [part.split(" is ")[1][:7] for part in said[:-1]]
    assert len(set(values)) == 5


def test_the_seed_decides_and_trials_differ(tiny):
    one, same, other = (prompts(tiny, seed=s).make(length=300, depth=0.5, trial=0) for s in (1, 1, 2))
    assert one == same
    assert one.ids != other.ids
    assert one.answer != prompts(tiny, seed=1).make(length=300, depth=0.5, trial=1).answer
