"""Problems are cut, judged and counted as they should be; prompts of facts are the same every time."""

import gzip
import json
from copy import copy

import pytest

import kvq
from benchmarks.real.asking import answers, asked
from benchmarks.real.humaneval import Problem, body_of, judge, read_problems, shares
from benchmarks.real.retrieval import Fact, draw_facts, hits, planted, prompts
from kvq.errors import ConfigError, RequestError
from kvq.evals import default_text
from kvq.evals.simulated import simulated

PROMPT = 'def twice(x):\n    """Two times x."""\n'
TEST = "def check(f):\n    assert f(2) == 4\n    assert f(3) == 6\n"


@pytest.fixture(scope="module")
def model():
    return kvq.load("tiny", kv="fp32")


def problem(**given):
    return Problem(
        **{"name": "a/0", "prompt": PROMPT, "solution": "    return 2 * x\n", "test": TEST, "entry": "twice"}
        | given
    )


def test_a_body_ends_where_something_else_begins():
    assert body_of(" return 2 * x\n\nprint(twice(3))") == "    return 2 * x\n"
    assert body_of(" return [\n        1,\n]\n```") == "    return [\n        1,\n]"
    assert (
        body_of(" if x:\n        return 1\n\n    return 2") == "    if x:\n        return 1\n\n    return 2"
    )


def test_right_functions_pass_and_wrong_ones_do_not():
    problems = [problem()] * 4
    bodies = ["    return 2 * x", "    return x + 2", "    while True: break", "    return ("]
    assert judge(problems, bodies) == [True, False, False, False]
    assert judge([problem()], [problem().solution]) == [True]


def test_outcomes_are_told_one_by_one():
    found = shares([True, False, True])
    assert (found["hits"], found["trials"], found["outcomes"]) == (2, 3, "101")
    assert found["share"] == pytest.approx(2 / 3)


def test_problems_are_read_from_their_file(tmp_path):
    file = tmp_path / "problems.jsonl.gz"
    raw = {
        "task_id": "a/0",
        "prompt": PROMPT,
        "canonical_solution": "    return 2 * x\n",
        "test": TEST,
        "entry_point": "twice",
        "more": 1,
    }
    file.write_bytes(gzip.compress(f"{json.dumps(raw)}\n".encode() * 3))
    assert read_problems(file, 2) == [problem()] * 2
    for content in (b"no gzip", gzip.compress(b"{}\n")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="make real"):
            read_problems(file, 2)


def test_facts_and_prompts_are_the_same_every_time(model):
    text = default_text().text
    facts = draw_facts(12, seed=3)
    assert facts == draw_facts(12, seed=3) != draw_facts(12, seed=4)
    assert len({fact.thing for fact in facts}) == len({fact.number for fact in facts}) == 12
    ids = prompts(model.tokenizer, text, facts, 2000)
    assert ids == prompts(model.tokenizer, text, facts, 2000)
    whole = model.tokenizer.decode(ids[0])
    assert all(f"{fact.begun} {fact.number}." in whole for fact in facts)
    assert whole.endswith(facts[0].begun)
    assert 1800 < max(map(len, ids)) < 2000
    shared = next(i for i, pair in enumerate(zip(*ids, strict=False)) if len(set(pair)) > 1)
    assert shared > max(map(len, ids)) - 40


def test_what_does_not_fit_is_refused(model):
    facts = draw_facts(50, seed=0)
    with pytest.raises(RequestError, match="more text"):
        planted(default_text().text, facts, model.tokenizer, 300)
    with pytest.raises(RequestError, match="less text"):
        planted("One. Two.", facts, model.tokenizer, 9000)
    with pytest.raises(RequestError, match="got 626"):
        draw_facts(626, seed=0)


def test_the_first_number_counts():
    fact = Fact("red lamp", "48213")
    assert hits(" 48213, as said. 5", fact)
    assert hits(" 48,213", fact)
    assert not hits(" 4821", fact)
    assert not hits(" unknown", fact)
    assert not hits(" 5 and 48213", fact)


def test_answers_are_in_order_and_share_their_prefix(model):
    prefix = list(range(5, 205))
    ids = [[*prefix, 300 + i] for i in range(5)]
    params = kvq.SamplingParams(max_tokens=3, ignore_eos=True)

    def all_of(first_alone):
        seen = []
        found = answers(
            model, ids, params, at_once=2, first_alone=first_alone, progress=lambda *x: seen.append(x)
        )
        assert seen[-1] == (5, 5)
        return found

    forked, alone = all_of(True), all_of(False)
    assert [one.prompt_token_ids for one in forked] == ids
    assert [one.outputs[0].token_ids for one in forked] == [one.outputs[0].token_ids for one in alone]
    assert min(one.receipt.cached_tokens for one in forked[1:]) >= 192


def test_simulated_methods_do_not_generate(model):
    other = model.with_kv(simulated("kivi-k2v2", model.geometry.head_dims))
    with pytest.raises(ConfigError, match="simulated"):
        answers(other, [[1, 2]], kvq.SamplingParams(max_tokens=2), at_once=1, progress=lambda *_: None)


def test_without_a_template_a_question_is_the_begin_of_a_text(model):
    plain = copy(model.tokenizer)
    plain.chat_template = None
    assert plain.decode(asked(plain, "Why?", "Because"), skip_special_tokens=True) == "Why?\n\nBecause"
    assert "user" in plain.decode(asked(model.tokenizer, "Why?", "Because"))
