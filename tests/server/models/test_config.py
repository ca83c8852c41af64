"""What a file of several models may say, and that errors name the place."""

from pathlib import Path

import pytest

from kvq.errors import ConfigError
from kvq.server.models.config import read_entries, read_rollouts

FILE = Path("serve.yaml")
GOOD = {"versions": [{"model": "a", "weight": 90}, {"model": "b", "weight": 10}]}


def test_an_entry_is_split_into_what_the_server_and_what_the_engine_takes():
    [(entry, options)] = read_entries(
        FILE, [{"name": "a", "model": "tiny", "idle-s": 5, "start": "lazy", "max-num-seqs": 3, "memory": 0.5}]
    )

    assert (entry.name, entry.start, entry.idle_s, entry.memory) == ("a", "lazy", 5, 0.5)
    assert options == {"model": "tiny", "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "lists no models"),
        ([], "lists no models"),
        ({"a": 1}, "array"),
        ([3], "object"),
        ([{"model": "tiny"}], "name"),
        ([{"name": "a"}], "no model"),
        ([{"name": "with space", "model": "tiny"}], "name"),
        ([{"name": "ü", "model": "tiny"}], "name"),
        ([{"name": "a", "model": "tiny", "start": "later"}], "start"),
        ([{"name": "a", "model": "tiny", "idle_s": 0}], "idle_s"),
        ([{"name": "a", "model": "tiny", "idle_s": True}], "idle_s"),
        ([{"name": "a", "model": "tiny", "memory": 1.5}], "memory"),
        ([{"name": "a", "model": "tiny", "memory": 0}], "memory"),
    ],
)
def test_bad_entries_are_refused(given, words):
    with pytest.raises(ConfigError, match=words) as found:
        read_entries(FILE, given)
    assert "serve.yaml" in str(found.value)


def test_a_rollout_is_read_with_its_weights_in_order():
    given = {"chat": GOOD | {"shadow": {"model": "b", "share": 1}, "fall-back": {"ttft-ratio": 2}}}

    found = read_rollouts(FILE, given, ["a", "b"])["chat"]

    assert list(found.weights.items()) == [("a", 90), ("b", 10)]
    assert (found.shadow.share, found.fall_back.ttft_ratio, found.fall_back.errors) == (1, 2, 0.1)
    assert read_rollouts(FILE, None, ["a"]) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": GOOD}, "a names two"),
        ({"alias": GOOD}, "alias names two"),
        ({"chat": {"versions": []}}, "versions"),
        ({"chat": {"versions": [{"model": "c", "weight": 1}]}}, "unknown model 'c'"),
        ({"chat": {"versions": [{"model": "alias", "weight": 1}]}}, "unknown model 'alias'"),
        ({"chat": {"versions": [{"model": "a", "weight": 0}]}}, "weight above 0"),
        ({"chat": {"versions": [{"model": "a", "weight": -1}]}}, "weight"),
        ({"chat": {"versions": [{"model": "a", "weight": float("nan")}]}}, "weight"),
        ({"chat": {"versions": [{"model": "a", "weight": 1}] * 2}}, "twice"),
        ({"chat": GOOD | {"shadow": {"model": "c", "share": 1}}}, "unknown model 'c'"),
        ({"chat": GOOD | {"shadow": {"model": "a", "share": 0}}}, "share"),
        ({"chat": GOOD | {"fall_back": {"error": 0.1}}}, "error"),
        ({"chat": GOOD | {"fall_back": {"least": 0}}}, "least"),
        ({"chat": GOOD | {"rollback": {}}}, "rollback"),
        ({"chat": 3}, "chat"),
        ([], "rollouts"),
    ],
)
def test_bad_rollouts_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        read_rollouts(FILE, given or [1], ["a", "b"], ["alias"])
