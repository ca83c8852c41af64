"""Sessions measured on the embedded model: the same from run to run, unquantized KV is without damage."""

import json
from dataclasses import asdict, replace

import pytest

import kvq
from kvq.errors import ConfigError, RequestError
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.watch import Watch
from kvq.traces import measure
from kvq.traces.measure import TraceMeasurement, TracePlan, trace_rows
from kvq.traces.rendering import Rendering
from kvq.traces.sessions import RecordedSession

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Lima", "Cairo"]},
        "days": {"type": "integer"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("weather", "trains")
]


def session(number, turns=2):
    messages = []
    for turn in range(turns):
        arguments = json.dumps({"city": ("Oslo", "Lima", "Cairo")[(number + turn) % 3], "days": 3 + number})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages += [
            {"role": "user", "content": f"Tell me about days {number} to {turn}. " * 3},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": f"rain, {turn} degrees"},
        ]
    messages.append({"role": "assistant", "content": "It rains."})
    return RecordedSession(name=f"s{number}", messages=messages, tools=TOOLS)


@pytest.fixture(scope="module")
def models():
    model = kvq.load("tiny", "fp32")
    return [model, model.with_kv("int4"), model.with_kv("int2")]


def measured(models, plan, **more):
    measurement = TraceMeasurement(models, plan, **more)
    figures = measurement.run()
    return figures, trace_rows(figures, models, Bootstrap(resamples=200), 0.02)


PLAN = TracePlan(sessions=[session(i) for i in range(3)], is_forced=True, kv_memory="64MiB")


def test_rows(models):
    steps, said = [], []
    watch = Watch(lambda done, total: steps.append((done, total)), say=said.append)
    figures, rows = measured(models, PLAN, watch=watch)
    assert [text[:7] for text in said] == ["6 turns"]
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1], "progress ends at its end"
    base, *others = rows
    assert [row.kv for row in rows] == [model.recipe.name for model in models]
    assert base.verdict == "baseline"
    assert (base.kl_mean, base.top1_agreement, base.undiverged) == (0, 1, 1)
    assert (base.sessions, base.turns, base.asked) == (3, 9, 6), "a plain text is scored, not asked"
    assert base.invalid == 0, "a grammar leaves only calls that fit"
    assert base.foreseen == base.failed == base.changed == 0
    assert others[-1].kl_mean > others[0].kl_mean > 0
    turn = figures.turns["fp32"][0]
    assert set(turn.kinds) >= {"name", "key", "value", "structure"}
    outcomes = figures.outcomes["fp32"]
    assert all(one.calls[0].name in ("weather", "trains") for one in outcomes.values())


def test_two_runs_are_the_same(models):
    def numbers():
        rows = [asdict(row) for row in measured(models, PLAN)[1]]
        return json.dumps(rows)

    assert numbers() == numbers()


def test_goes_on(models, tmp_path, monkeypatch):
    plan = replace(PLAN, finished=tmp_path / "parts")
    whole = [asdict(row) for row in measured(models, PLAN)[1]]
    stopped = []

    def stop(done, total):
        if done > total / 2 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(models, plan, watch=Watch(stop))
    assert [asdict(row) for row in measured(models, plan)[1]] == whole
    monkeypatch.setattr("kvq.traces.measure.generate", None)  # everything is there
    monkeypatch.setattr("kvq.traces.measure.Replay", None)
    assert [asdict(row) for row in measured(models, plan)[1]] == whole
    with pytest.raises(ConfigError, match="another measurement"):
        measured(models, replace(plan, sessions=plan.sessions[:2]))


def test_generated_turns_are_kept_in_small_parts(models, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_PART", 2)
    made, generate = [], measure.generate

    def counted(llm, questions, progress):
        if len(made) == 2:
            made.append(None)
            raise KeyboardInterrupt
        made.append([one.key for one in questions])
        return generate(llm, questions, progress)

    monkeypatch.setattr(measure, "generate", counted)
    plan = replace(PLAN, finished=tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        measured(models, plan)
    rows = [asdict(row) for row in measured(models, plan)[1]]
    parts = [one for one in made if one is not None]
    assert len(parts) == 3 * 3, "three parts for each of three formats, none of them twice"
    assert all(len(part) == 2 for part in parts)
    monkeypatch.setattr(measure, "generate", generate)
    assert rows == [asdict(row) for row in measured(models, PLAN)[1]], "parts change nothing"


def test_answers_that_are_no_calls_are_told_early(models):
    said = []
    figures, _ = measured(models[:1], replace(PLAN, is_forced=False), watch=Watch(say=said.append))
    assert not any(one.is_valid for one in figures.outcomes["fp32"].values())
    assert said[1:] == [
        "6 of the first 6 answers are no calls or JSON that fit; stop, and try --forced-calls"
    ]


def test_scores_only(models):
    figures, rows = measured(models, replace(PLAN, is_free=False))
    assert not figures.outcomes
    assert [row.asked for row in rows] == [0, 0, 0]
    assert rows[1].verdict.startswith("not judged")


def test_sessions_that_cannot_be_replayed(models):
    long = RecordedSession(
        name="long",
        messages=[{"role": "user", "content": "word " * 30000}, {"role": "assistant", "content": "x"}],
    )
    figures, _ = measured(models, replace(PLAN, sessions=[session(0), long], is_free=False))
    assert list(figures.left_out) == ["long"]
    assert " tokens" in figures.left_out["long"]
    with pytest.raises(RequestError, match="none of the sessions"):
        TraceMeasurement(models, replace(PLAN, sessions=[long]))


def test_answers_are_where_the_template_put_them(models):
    rendering = Rendering(models[0].prepared, 1024)
    (stretch,) = rendering.stretches(0, session(1, turns=3))
    texts = ["".join(rendering.texts(stretch.tokens[one.first : one.end])) for one in stretch.answers]
    assert texts[-1].startswith("It rains.")
    assert all(('"weather"' in text and '"days\\": 4' in text) or '"days": 4' in text for text in texts[:-1])
    assert [one.message for one in stretch.answers] == [1, 4, 7, 9]
