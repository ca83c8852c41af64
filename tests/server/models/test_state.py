"""The state file is whole at any time, its changes are all in the audit log, and writers take turns."""

import json
import multiprocessing
import random

import pytest

from kvq.errors import ConfigError
from kvq.server.models.config import read_rollouts
from kvq.server.models.state import RolloutState, StateFile

ROLLOUTS = {
    "chat": {"versions": [{"model": "a", "weight": 90}, {"model": "b", "weight": 10}]},
    "code": {"versions": [{"model": "b", "weight": 1}, {"model": "c", "weight": 1}]},
}


def state_file(folder):
    path = folder / "serve.yaml"
    return StateFile(path, read_rollouts(path, ROLLOUTS, ["a", "b", "c"]))


@pytest.fixture
def file(tmp_path):
    return state_file(tmp_path)


def weights(file):
    rollouts = read_rollouts(file.path, ROLLOUTS, ["a", "b", "c"])
    return {name: file.read().of(name, one) for name, one in rollouts.items()}


def audit(file):
    return [json.loads(line) for line in file.audit.read_text().splitlines()]


def test_without_a_file_the_weights_are_those_of_the_configuration(file):
    assert weights(file) == {"chat": {"a": 90, "b": 10}, "code": {"b": 1, "c": 1}}
    assert file.mark() is None


def test_a_stop_is_for_every_name_and_a_weight_ends_it(file):
    file.stop("b", "me", "it is rude")
    assert weights(file) == {"chat": {"a": 90, "b": 0}, "code": {"b": 0, "c": 1}}
    before = file.mark()

    file.set_weights("chat", {"a": 50, "b": 50}, "me", "")

    assert weights(file) == {"chat": {"a": 50, "b": 50}, "code": {"b": 1, "c": 1}}
    assert file.mark() != before
    first, second = audit(file)
    assert (first["by"], first["what"], first["reason"]) == ("me", "stop b", "it is rude")
    assert (first["from"]["code"], first["to"]["code"]) == ({"b": 1, "c": 1}, {"b": 0, "c": 1})
    assert second["to"] == {"chat": {"a": 50, "b": 50}, "code": {"b": 1, "c": 1}}


def test_weights_of_some_versions_leave_the_others_and_their_stops(file):
    file.set_weights("chat", {"b": 0.0}, "server", "errors")

    assert weights(file)["chat"] == {"a": 90, "b": 0}
    assert audit(file)[0]["from"] == {"chat": {"a": 90, "b": 10}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format_version": 2}',
        b'{"format_version": 1, "weights": {"chat": {"a": -1}}}',
        b"\xff",
    ],
)
def test_a_broken_file_is_refused_and_never_overwritten(file, content):
    file.path.write_bytes(content)

    with pytest.raises(ConfigError, match="delete it"):
        file.read()
    with pytest.raises(ConfigError, match="delete it"):
        file.stop("a", "me", "")
    assert file.path.read_bytes() == content


def test_versions_that_are_no_longer_configured_are_left_out(file):
    file.path.write_bytes(
        b'{"format_version": 1, "weights": {"chat": {"a": 3, "gone": 7}, "old": {}}, "stopped": ["x"]}'
    )

    assert weights(file)["chat"] == {"a": 3, "b": 0}


def test_a_failed_write_leaves_the_old_state(file, monkeypatch):
    file.set_weights("chat", {"a": 1, "b": 2}, "me", "")
    before = file.path.read_bytes()

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("kvq.fileio.os.replace", fail)
    with pytest.raises(ConfigError, match="no space"):
        file.stop("a", "me", "")
    assert file.path.read_bytes() == before


def _write(folder, seed):
    file, chance = state_file(folder), random.Random(seed)
    for i in range(20):
        if chance.random() < 0.3:
            file.stop(chance.choice("abc"), f"writer {seed}", str(i))
        else:
            file.set_weights("chat", {chance.choice("ab"): chance.randint(0, 9)}, f"writer {seed}", str(i))


def test_writers_at_the_same_time_lose_no_change(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, seed)) for seed in range(3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()

    file = state_file(tmp_path)
    lines = audit(file)
    assert len(lines) == 60
    known = {"chat": {"a": 90, "b": 10}, "code": {"b": 1, "c": 1}}
    for line in lines:  # each change begins where the one before it ended
        assert all(known[name] == own for name, own in line["from"].items())
        known |= line["to"]
    assert weights(file) == known
    assert isinstance(file.read(), RolloutState)
