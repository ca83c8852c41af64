"""Weights are kept, sessions stick, and a change of weights moves no session without need."""

from collections import Counter
from math import sqrt

import pytest

from kvq.server.models.versions import choose_version, session_key


def keys(count, salt=""):
    return [session_key("", {}, {"session_id": f"{salt}{i}"}) for i in range(count)]


@pytest.mark.parametrize("weights", [{"a": 90, "b": 10}, {"a": 1, "b": 2, "c": 7}, {"a": 0.5, "b": 0}])
def test_ten_thousand_sessions_are_shared_by_weight_within_three_standard_deviations(weights):
    found = Counter(choose_version(weights, key) for key in keys(10_000))
    total = sum(weights.values())

    for version, weight in weights.items():
        share = weight / total
        assert abs(found[version] - 10_000 * share) <= 3 * sqrt(10_000 * share * (1 - share))


def test_a_change_of_weights_moves_only_sessions_to_versions_that_grow():
    before, after = {"a": 60, "b": 30, "c": 10}, {"a": 60, "b": 20, "c": 20}

    moves = Counter((choose_version(before, key), choose_version(after, key)) for key in keys(5_000))

    assert {(one, other) for one, other in moves if one != other} <= {("b", "c"), ("b", "a"), ("a", "c")}
    assert 0 < sum(n for (one, other), n in moves.items() if one != other) < 1_000


def test_a_version_without_a_weight_gets_nothing_and_moves_none_of_the_others_sessions():
    for key in keys(500):
        chosen = choose_version({"a": 3, "b": 1, "c": 2}, key)
        assert choose_version({"a": 3, "b": 0, "c": 2}, key) == chosen or chosen == "b"
    assert choose_version({"a": 0, "b": 0}, b"") is None


TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
LATER = [*TURNS, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": TURNS}, {"messages": LATER, "temperature": 0}),
        ({"input": TURNS}, {"input": LATER}),
        ({"session_id": "x", "messages": TURNS}, {"session_id": "x", "prompt": "other"}),
        ({"user": "x", "prompt": "a"}, {"user": "x", "prompt": "b"}),
        ({"prompt": "a", "max_tokens": 3}, {"prompt": "a"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 2]}),
    ],
)
def test_requests_of_one_session_have_one_key(one, other):
    assert session_key("t", {}, one) == session_key("t", {}, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("t", {}, {"user": "x"}), ("u", {}, {"user": "x"})),
        (("t", {}, {"user": "x"}), ("t", {}, {"user": "y"})),
        (("t", {b"x-session-id": b"1"}, {"user": "x"}), ("t", {b"x-session-id": b"2"}, {"user": "x"})),
        (("t", {}, {"messages": TURNS[:1]}), ("t", {}, {"messages": TURNS})),
        (("t", {}, {"prompt": "a"}), ("t", {}, {"prompt": "b"})),
    ],
)
def test_other_tenants_headers_users_and_conversations_are_other_sessions(one, other):
    assert session_key(*one) != session_key(*other)


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"messages": [1, None, {"role": 2}]}, {"user": [1]}])
def test_any_body_has_a_key(body):
    assert session_key("", {}, body) == session_key("", {}, dict(body))
