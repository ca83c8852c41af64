"""Every format is asked the same over its own blocks, and scores mean what they say."""

import itertools
import math

import pytest
import torch

from kvq.errors import ConfigError, RequestError
from kvq.evals import default_text
from kvq.evals.needle import needle
from kvq.evals.needle.needle import NeedleRow, summarize_needle
from kvq.evals.needle.prompts import SENTENCE, TOKENS, NeedlePlan, NeedlePrompts
from kvq.evals.report.bootstrap import wilson_interval
from kvq.evals.watch import Watch
from kvq.models import Session
from kvq.models.run.session import StepResult

TEXT = default_text().text
SMALL = {"lengths": [96, 160], "depths": [0, 0.5, 1], "trials": 2}


def measure_needle(model, kv, text, progress=lambda done, total: None, **plan):
    """`kvq.evals.measure_needle` with the fields of its plan by name."""
    return needle.measure_needle(model, kv, text, NeedlePlan(**plan), Watch(progress))


class Recorder:
    """Stands in for Session.forward: notes what every session is fed and decides what it answers."""

    def __init__(self, monkeypatch, answer=None):
        self.fed = {}  # session -> token ids of each of its sequences
        self.steps = []  # tokens per step
        self._answer = answer
        self._real = Session.forward
        monkeypatch.setattr(Session, "forward", lambda *args: self(*args))

    def __call__(self, session, work):
        ((sequence, ids),) = work
        sequences = self.fed.setdefault(session, {})
        sequences.setdefault(id(sequence), (sequence, []))[1].extend(ids)
        self.steps.append(len(ids))
        if self._answer is None:
            return self._real(session, work)
        logits = torch.zeros(1, session.weights.geometry.vocab_size)
        logits[0, self._answer(sequences[id(sequence)][1])] = 1
        return [StepResult(logits=logits, finite=True)]

    def texts(self):
        """What each session was fed, sequence by sequence."""
        return [[ids for _, ids in sequences.values()] for sequences in self.fed.values()]


def follow(ids, size=4):
    """What a perfect retriever says: the token that followed the last `size` tokens when they came first."""
    for at in range(len(ids) - size):
        if ids[at : at + size] == ids[-size:]:
            return ids[at + size]
    return 0


def test_a_cell_is_the_same_in_every_grid(tiny, monkeypatch):
    recorder = Recorder(monkeypatch)
    measure_needle(tiny, "fp32", TEXT, lengths=[96, 160], depths=[0, 1], trials=2)
    measure_needle(tiny, "fp32", TEXT, lengths=[160], depths=[1], trials=1)
    whole, part = recorder.texts()
    assert part[0] == whole[3]


def test_every_format_is_asked_the_same_in_chunks_and_single_tokens(tiny, monkeypatch):
    recorder = Recorder(monkeypatch, answer=follow)
    rows = measure_needle(tiny, ["fp32", "int8", "int4"], TEXT, chunk=50, **SMALL)
    first, *others = recorder.texts()
    assert len(first) == 2 * 3 * 2
    assert others == [first, first]
    assert set(recorder.steps) - {50} < set(range(1, 50))
    assert recorder.steps.count(1) >= 3 * 12 * 4  # one-token steps of decoding
    assert [(r.kv, r.length, r.depth) for r in rows] == list(
        itertools.product(("fp32", "int8", "int4"), (96, 160), (0, 0.5, 1))
    )


@pytest.mark.parametrize("needle", [SENTENCE, TOKENS])
def test_a_perfect_retriever_scores_one(tiny, monkeypatch, needle):
    Recorder(monkeypatch, answer=lambda ids: follow(ids, size=3))
    rows = measure_needle(tiny, "fp32", TEXT, needle=needle, **SMALL)
    assert {(r.retrieved, r.token_accuracy, r.hits) for r in rows} == {(1, 1, 2)}


def test_a_broken_retriever_scores_zero(tiny, monkeypatch):
    Recorder(monkeypatch, answer=lambda ids: 0)
    rows = measure_needle(tiny, "fp32", TEXT, **SMALL)
    assert {(r.retrieved, r.token_accuracy, r.hits) for r in rows} == {(0, 0, 0)}


def test_a_half_right_answer_is_no_hit_but_counts_its_tokens(tiny, monkeypatch):
    Recorder(monkeypatch, answer=lambda ids: 0 if len(ids) % 2 else follow(ids, size=3))
    row = measure_needle(tiny, "fp32", TEXT, needle=TOKENS, lengths=[96], depths=[0.5], trials=2)[0]
    assert (row.retrieved, row.hits) == (0, 0)
    assert row.token_accuracy == pytest.approx(1 / 6)  # only the first: the second follows a wrong one


def test_answers_are_those_of_the_models_logits(tiny):
    """Real steps over real blocks: what is scored is greedy decoding over the whole prompt."""
    made = NeedlePrompts(tiny.tokenizer, TEXT, NeedlePlan(needle=TOKENS), vocab_size=4096)
    prompt = made.make(length=120, depth=0.5, trial=0)
    ids, right = list(prompt.ids), 0
    for wanted in prompt.answer:
        ids.append(int(tiny.with_kv("int8").logits(ids)[-1].argmax()))
        right += ids[-1] == wanted
    row = measure_needle(tiny, "int8", TEXT, needle=TOKENS, lengths=[120], depths=[0.5], trials=1, chunk=33)[
        0
    ]
    assert row.token_accuracy == right / len(prompt.answer)


def test_progress_counts_up_to_its_total(tiny, monkeypatch):
    monkeypatch.setattr("kvq.evals.needle.needle._answer", lambda session, prompt, chunk: prompt.answer)
    calls = []
    options = {"lengths": [80], "depths": [0, 1], "trials": 2}
    measure_needle(tiny, ["fp32", "int4"], TEXT, progress=lambda *a: calls.append(a), **options)
    assert calls == [(i, 8) for i in range(1, 9)]


def test_the_summary_weighs_every_trial_alike():
    rows = [
        NeedleRow(
            kv=kv, length=512, depth=d, trials=n, hits=h, retrieved=h / n, token_accuracy=a, seconds=2.0
        )
        for kv, d, n, h, a in (("fp32", 0, 10, 10, 1.0), ("fp32", 1, 30, 20, 0.8), ("int2", 0, 10, 0, 0.1))
    ]
    full, int2 = summarize_needle(rows)
    assert (full.kv, full.trials, full.retrieved, full.seconds) == ("fp32", 40, 0.75, 4.0)
    assert full.token_accuracy == pytest.approx(0.85)
    assert full.retrieved_low < 0.75 < full.retrieved_high
    assert (int2.retrieved, int2.retrieved_low) == pytest.approx((0, 0), abs=1e-12)
    assert int2.retrieved_high == pytest.approx(0.2775, abs=1e-4)


def test_wilsons_interval_is_the_one_of_the_books():
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"lengths": [5000]}, RequestError, "5000 tokens was asked for; this model takes 1 to 4096"),
        ({"lengths": [0]}, RequestError, "length of 0"),
        ({"lengths": [20]}, RequestError, "no room for a haystack"),
        ({"lengths": []}, RequestError, "at least one length"),
        ({"depths": []}, RequestError, "at least one length and one depth"),
        ({"depths": [1.5]}, RequestError, "0 to 1, got 1.5"),
        ({"depths": [-0.1]}, RequestError, "0 to 1, got -0.1"),
        ({"depths": [math.nan]}, RequestError, "0 to 1, got nan"),
        ({"trials": 0}, RequestError, "trials must be at least 1"),
        ({"chunk": 0}, RequestError, "chunk must be at least 1"),
        ({"text": "too short"}, RequestError, "the text has . tokens, a length of 512 needs"),
        ({"needle": "The number is {value}."}, RequestError, "{key} and then {value}"),
        ({"needle": "{value} belongs to {key}"}, RequestError, "{key} and then {value}"),
        ({"distractors": -1}, RequestError, "distractors must be 0 to 24"),
        ({"distractors": 25}, RequestError, "distractors must be 0 to 24"),
        ({"kv": []}, RequestError, "no KV format"),
        ({"kv": ["fp32", "int9"]}, ConfigError, "did you mean 'int8'"),
    ],
)
def test_what_can_not_be_asked_is_refused_before_any_work(tiny, monkeypatch, options, error, says):
    recorder = Recorder(monkeypatch)
    given = {"kv": ["fp32"], "text": TEXT, "lengths": [512], "trials": 1} | options
    with pytest.raises(error, match=says):
        measure_needle(tiny, given.pop("kv"), given.pop("text"), **given)
    assert not recorder.steps


def test_lengths_are_those_the_model_takes_unless_named(tiny, monkeypatch):
    made = []

    def answer(session, prompt, chunk):
        made.append(prompt)
        return prompt.answer

    monkeypatch.setattr("kvq.evals.needle.needle._answer", answer)
    measure_needle(tiny, "fp32", TEXT, depths=[0], trials=1)
    assert [len(p.ids) + len(p.answer) for p in made] == [512, 1024, 2048, 4096]


def test_a_refused_answer_gives_its_blocks_back(tiny, monkeypatch):
    session = tiny.session(max_tokens=512)
    monkeypatch.setattr(type(tiny), "session", lambda self, **_: session)
    monkeypatch.setattr(StepResult, "trusted_logits", refuse)
    free = [pool.num_free for pool in session.manager.pools]
    with pytest.raises(RequestError, match="not finite"):
        measure_needle(tiny, "fp32", TEXT, lengths=[128], depths=[0], trials=1)
    assert [pool.num_free for pool in session.manager.pools] == free


def refuse(result):
    raise RequestError("K or V is not finite")
