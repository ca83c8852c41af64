"""A file of several models: which options reach which model, and what is refused where."""

import json

import pytest

import kvq.server.run
from kvq.cli import main

TWO = """
kv: int4
max-num-seqs: 7
models:
  - {name: one, model: tiny, max_num_seqs: 9}
  - {name: two, model: tiny, kv: int8, served-model-name: [second, zwei], start: lazy}
rollouts:
  chat: {versions: [{model: one, weight: 3}, {model: two, weight: 1}]}
"""


@pytest.fixture
def serve(tmp_path, monkeypatch, capsys):
    """Runs `kvq serve` on a file without serving: (what would be served, exit code, errors)."""

    def serve(text, *options):
        taken = []
        monkeypatch.setattr(kvq.server.run, "serve_models", taken.append)
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        with pytest.raises(SystemExit) as end:
            main(["serve", "--config", str(path), *options])
        return (taken or [None])[0], end.value.code, capsys.readouterr().err

    return serve


def test_options_of_a_model_come_before_those_of_the_file(serve):
    config, code, _ = serve(TWO)

    one, two = config.models
    assert not code
    assert (one.config.kv, one.config.engine["max_num_seqs"]) == ("int4", 9)
    assert (two.config.kv, two.config.engine["max_num_seqs"]) == ("int8", 7)
    assert (one.config.served_model_name, two.config.served_model_name) == (
        ("one",),
        ("two", "second", "zwei"),
    )
    assert (one.entry.start, two.entry.start) == ("eager", "lazy")
    assert config.rollouts["chat"].weights == {"one": 3, "two": 1}


def test_the_command_line_comes_before_both(serve):
    config, _, _ = serve(TWO, "--max-num-seqs", "5", "--port", "8123")

    assert [one.config.engine["max_num_seqs"] for one in config.models] == [5, 5]
    assert config.server.port == 8123


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (TWO, ["tiny"], "name them there"),
        (TWO, ["--model", "tiny"], "name them there"),
        (TWO, ["--served-model-name", "x"], "name them there"),
        ("models: [{name: a, model: tiny, port: 80}]", [], "port is for the whole server"),
        ("models: [{name: a, model: tiny, max-num-seq: 80}]", [], "did you mean 'max-num-seqs'?"),
        ("models: [{name: a, model: tiny, max-num-seqs: zz}]", [], "(model a)"),
        ("models: [{name: a, model: tiny, kv: int99}]", [], "(model a)"),
        ("models: [{name: a, model: tiny}, {name: b, model: tiny, served-model-name: a}]", [], "a names two"),
        ("models: [{name: a, model: ./nowhere}]", [], "nowhere"),
        ("rollouts: {chat: {versions: [{model: a, weight: 1}]}}", [], "lists no models"),
        ("record: chats.jsonl\nmodels: [{name: a, model: tiny}]", [], "a record of its own"),
    ],
)
def test_what_can_not_work_is_refused_in_one_line(serve, text, options, words):
    config, code, err = serve(text, *options)

    assert config is None
    assert code == 2
    assert words in err.splitlines()[-1]


def rollout(path, capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["rollout", str(path), *words])
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


def test_rollout_shows_and_changes_the_weights(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(TWO)

    assert rollout(path, capsys)[:2] == (0, "chat: one=3 two=1\n")
    assert rollout(path, capsys, "set", "chat", "two=2.5")[:2] == (0, "chat: one=0 two=2.5\n")
    assert rollout(path, capsys, "stop", "two", "--reason", "why")[1] == "chat: one=0 two=0\nstopped: two\n"
    assert rollout(path, capsys, "show")[1] == "chat: one=0 two=0\nstopped: two\n"
    lines = (tmp_path / "serve.yaml.audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["", "why"]
    assert json.loads(lines[0])["by"].startswith("operator ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("stop", "three"), "unknown version 'three'"),
        (("set", "talk", "one=1"), "unknown name 'talk'"),
        (("set", "chat", "three=1"), "unknown version of chat 'three'"),
        (("set", "chat", "one=-1"), "one=-1"),
        (("set", "chat", "one=nan"), "one=nan"),
        (("set", "chat", "one=0"), "weight above 0"),
        (("set", "chat"), "stop VERSION"),
        (("halt",), "stop VERSION"),
    ],
)
def test_a_wrong_change_changes_nothing(tmp_path, capsys, words, told):
    path = tmp_path / "serve.yaml"
    path.write_text(TWO)

    code, _, err = rollout(path, capsys, *words)

    assert code == 2
    assert told in err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["serve.yaml"]
