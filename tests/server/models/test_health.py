"""A version past a limit is found, and one within its limits, or hardly used, never is."""

import random

import pytest

from kvq.server.admission.transcript import Transcript, transcript
from kvq.server.models.config import Limits
from kvq.server.models.health import Health


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def health(clock, *, good=0, bad=0, ttft=(), kind="error"):
    found = Health(clock)
    for ending in ["success"] * good + [kind] * bad:
        found.ended(ending)
    for seconds in ttft:
        found.began(seconds)
    return found


@pytest.mark.parametrize("kind", ["error", "timeout", "refused"])
def test_errors_beyond_the_share_are_named(clock, kind):
    limits = Limits(errors=0.1)

    assert "3 of 21" in health(clock, good=18, bad=3, kind=kind).why_unfit(limits, [])
    assert health(clock, good=18, bad=2, kind=kind).why_unfit(limits, []) is None  # exactly a tenth
    assert health(clock, good=0, bad=19, kind=kind).why_unfit(limits, []) is None  # too few to tell


@pytest.mark.parametrize("kind", ["invalid", "limited", "cancelled", "stop", "length"])
def test_what_clients_cause_is_no_error(clock, kind):
    assert health(clock, good=20, bad=500, kind=kind).why_unfit(Limits(), []) is None


def test_old_requests_no_longer_count(clock):
    own = health(clock, good=10, bad=30)
    assert own.why_unfit(Limits(window_s=60), [])

    clock.now += 61
    assert own.why_unfit(Limits(window_s=60), []) is None


def test_ttft_is_compared_with_the_others_and_needs_enough_of_both(clock):
    slow, usual = health(clock, ttft=[0.1] * 10 + [0.9] * 10), health(clock, ttft=[0.1] * 20)
    limits = Limits(ttft_ratio=2.0)

    assert "9.0 times" in slow.why_unfit(limits, [usual])
    assert usual.why_unfit(limits, [slow]) is None
    assert slow.why_unfit(limits, [health(clock, ttft=[0.1] * 19)]) is None
    assert slow.why_unfit(limits, [health(clock, ttft=[0.1] * 10)] * 2)  # together they are enough
    assert slow.why_unfit(Limits(), [usual]) is None


def test_alerts_count_within_the_window_and_from_the_first_look(clock):
    own, limits = Health(clock), Limits(guard_alerts=2, window_s=60)
    own.guarded(7)  # from before
    assert own.why_unfit(limits, []) is None
    own.guarded(8)
    assert own.why_unfit(limits, []) is None
    clock.now += 61
    own.guarded(9)
    assert own.why_unfit(limits, []) is None
    own.guarded(10)
    assert "2 times" in own.why_unfit(limits, [])
    own.forget()
    assert own.why_unfit(limits, []) is None


def test_copies_for_comparison_do_not_count(clock):
    token = transcript.set(Transcript(seed=1, is_shadow=True))
    try:
        assert health(clock, bad=100, ttft=[9] * 100).why_unfit(Limits(ttft_ratio=2), [Health(clock)]) is None
    finally:
        transcript.reset(token)


def test_a_random_sequence_is_judged_as_by_the_definition(clock):
    chance, own, seen = random.Random(3), Health(clock), []
    limits = Limits(errors=0.3, window_s=10, least=5)
    for _ in range(2_000):
        clock.now += chance.expovariate(1)
        failed = chance.random() < 0.25
        own.ended("error" if failed else "success")
        seen.append((clock.now, failed))
        recent = [failed for at, failed in seen if at >= clock.now - 10]
        expected = len(recent) >= 5 and sum(recent) / len(recent) > 0.3
        assert (own.why_unfit(limits, []) is not None) == expected
