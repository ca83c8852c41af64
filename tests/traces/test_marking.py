"""Marked windows: as long as asked for, and marked where a session decides something."""

import pytest

import kvq
from kvq.errors import RequestError
from kvq.traces.marking import marked_windows
from tests.traces.test_measure import session


@pytest.fixture(scope="module")
def prepared():
    return kvq.load("tiny", "fp32").prepared


def test_windows_of_sessions(prepared):
    found = marked_windows(prepared, [session(i, turns=4) for i in range(3)], 64)
    assert len(found) >= 3
    for window in found:
        assert len(window.ids) == len(window.weights) == 64
        marked = prepared.tokenizer.decode(
            [id for id, weight in zip(window.ids, window.weights, strict=True) if weight]
        )
        assert 4 <= sum(window.weights) < 64
        assert "Tell me" not in marked
    whole = "".join(prepared.tokenizer.decode(one.ids) for one in found)
    assert "weather" in whole


def test_sessions_that_are_too_short(prepared):
    with pytest.raises(RequestError, match="the longest has"):
        marked_windows(prepared, [session(0)], 900)
