"""Sessions: what is kept while they pause, moved when a client says so, and brought back in time."""

import random
from typing import Any

import pytest

from kvq.engine import LLM, PrefixPin, SamplingParams
from kvq.engine.requests.sessions import _LEAST_TOKENS, _MOST_TOKENS
from kvq.errors import EngineError, RequestError
from tests.engine.kit import BLOCK, assert_balanced, drive, engine, pair, submit
from tests.helpers_models import random_tokens

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LENGTH = 5 * BLOCK + 3


class Kit:
    """A small engine with a clock that tests move."""

    def __init__(self, **options: Any) -> None:
        self.llm: LLM = engine(pair("llama")[0], num_blocks=24, max_num_seqs=2, **options)
        self.now, core = 100.0, self.llm.core
        for part in (core, core.sessions, core.intake):
            name = "clock" if part is core.intake else "_clock"
            setattr(part, name, lambda: self.now)
        self.manager = core.scheduler.manager

    def ask(self, number: int, session: str | None = None, **options: Any) -> Any:
        """Run one request; return its receipt."""
        job = submit(self.llm, random_tokens(LENGTH, seed=number), SHORT, session=session, **options)
        drive(self.llm, [job])
        return job[1].output.receipt

    def crowd(self, first: int = 1000, count: int = 6) -> None:
        """Requests without a session that need the whole pool."""
        for number in range(first, first + count):
            self.ask(number)

    @property
    def num_pinned(self) -> int:
        return self.manager.pins.num_pinned(0)


def test_a_session_is_kept_through_its_pause_and_others_are_not() -> None:
    kit = Kit()
    kit.ask(1, "agent")
    kit.ask(2)
    assert kit.num_pinned == 5
    kit.crowd()
    assert kit.ask(1, "agent").cached_tokens == 5 * BLOCK
    assert kit.ask(2).cached_tokens == 0
    kit.now += 400.0  # longer than any session is kept
    kit.crowd(2000)
    assert kit.num_pinned == 0
    assert kit.ask(1, "agent").cached_tokens == 0
    assert_pins_end(kit)


def assert_pins_end(kit: Kit) -> None:
    kit.now += 10_000.0
    kit.ask(3)
    assert_balanced(kit.llm)


@pytest.mark.parametrize(("retain_s", "is_kept"), [(0.0, False), (50.0, True)])
def test_a_request_says_how_long_its_kv_is_kept(retain_s: float, is_kept: bool) -> None:
    kit = Kit()
    kit.ask(1, "agent", retain_s=retain_s)
    kit.now += 40.0
    kit.crowd()
    assert (kit.ask(1, "agent").cached_tokens == 5 * BLOCK) == is_kept


def test_sessions_keep_half_of_the_pool_at_most() -> None:
    kit = Kit()
    for number in range(10):
        kit.ask(number, f"agent {number}", retain_s=1000.0)
    assert 0 < kit.num_pinned <= 12
    assert_pins_end(kit)


def test_hints_move_a_session_down_bring_it_back_and_drop_it() -> None:
    kit = Kit(kv_host="1MiB")
    hint = kit.llm.core.sessions.hint
    tiers = kit.manager.blocks.tiers
    assert tiers is not None
    kit.ask(1, "agent")
    hint("", "agent", "demote")
    kit.llm.core.upkeep.when_idle()  # carries the orders out
    assert kit.num_pinned == 0
    assert kit.manager.usage()[0].cached == 0
    assert len(tiers) == 5
    hint("", "agent", "prefetch")
    drive(kit.llm, [])
    assert kit.manager.usage()[0].cached == 5
    hint("", "agent", "retain", 30.0)
    assert kit.num_pinned == 5
    hint("", "agent", "release")
    assert kit.manager.usage()[0].free == 24
    receipt = kit.ask(1, "agent")
    assert receipt.cached_tokens == receipt.host_tokens == 5 * BLOCK, "host memory decides for itself"
    assert_pins_end(kit)


def test_what_other_prompts_share_stays_where_it_is() -> None:
    kit = Kit(kv_host="1MiB")
    shared = random_tokens(2 * BLOCK, seed=50)
    for number, name in enumerate(["a", "b"]):
        tokens = shared + random_tokens(2 * BLOCK + 1, seed=60 + number)
        drive(kit.llm, [submit(kit.llm, tokens, SHORT, session=name)])
    for name in ("a", "b"):
        kit.llm.core.sessions.hint("", name, "retain", 0.0)
    kit.llm.core.sessions.hint("", "a", "demote")
    assert kit.manager.usage()[0].cached == 4


def test_a_session_that_returns_regularly_is_brought_back_before_it_does() -> None:
    kit = Kit(kv_host="1MiB")
    for _ in range(4):
        kit.ask(1, "agent")
        kit.now += 20.0
    kit.ask(1, "agent")
    kit.now += 1.0
    kit.llm.core.sessions.hint("", "agent", "demote")
    assert kit.manager.usage()[0].cached == 0
    began = kit.now
    while not kit.llm.core.upkeep.when_idle():
        wait_s = kit.llm.core.sessions.wait_s()
        assert wait_s is not None
        kit.now += wait_s
    assert 5 < kit.now - began < 20
    drive(kit.llm, [])
    assert kit.manager.usage()[0].cached == 5
    receipt = kit.ask(1, "agent")
    assert (receipt.cached_tokens, receipt.host_tokens) == (5 * BLOCK, 0)
    assert kit.llm.core.sessions.num_prefetched == 1
    assert_pins_end(kit)


def test_no_session_is_brought_back_while_requests_wait() -> None:
    kit = Kit(kv_host="1MiB")
    for _ in range(4):
        kit.ask(1, "agent")
        kit.now += 20.0
    kit.ask(1, "agent")
    kit.llm.core.sessions.hint("", "agent", "demote")
    jobs = [submit(kit.llm, random_tokens(LENGTH, seed=70 + i), SHORT) for i in range(5)]
    kit.now += 25.0
    kit.llm.step()
    assert kit.llm.core.sessions.num_prefetched == 0
    drive(kit.llm, jobs)


def test_sessions_of_other_tenants_are_other_sessions() -> None:
    kit = Kit()
    kit.ask(1, "agent", tenant="a")
    kit.llm.core.sessions.hint("b", "agent", "release")
    assert kit.num_pinned == 5
    kit.llm.core.sessions.hint("a", "agent", "release")
    assert kit.num_pinned == 0


def test_a_growing_session_has_one_pin_and_its_release_ends_it() -> None:
    kit = Kit()
    prompt = random_tokens(2 * BLOCK - 4, seed=1)  # with the answer whole blocks, the last of which is open
    for turn in range(4):
        job = submit(kit.llm, prompt, SHORT, session="agent", retain_s=1000.0)
        drive(kit.llm, [job])
        assert len(kit.manager.pins) == 1
        prompt = prompt + job[1].output.outputs[0].token_ids + random_tokens(BLOCK - 4, seed=2 + turn)
    kit.llm.core.sessions.hint("", "agent", "release")
    assert (kit.num_pinned, kit.manager.usage()[0].live) == (0, 0)


@pytest.mark.parametrize("action", ["retain", "demote", "release"])
def test_what_ends_for_one_session_stays_pinned_for_others(action: Any) -> None:
    kit = Kit(kv_host="1MiB")
    kit.ask(1, "a", retain_s=1000.0)
    kit.ask(1, "b", retain_s=500.0)
    kit.llm.core.sessions.hint("", "a", action, 0.0)
    assert kit.num_pinned == 5
    kit.crowd()
    assert kit.ask(1).cached_tokens == 5 * BLOCK
    kit.llm.core.sessions.hint("", "b", action, 0.0)
    assert kit.num_pinned == 0


def test_a_session_leaves_the_pins_of_requests() -> None:
    kit = Kit()
    kit.ask(1, pins=[PrefixPin(length=5 * BLOCK, seconds=600.0)])
    kit.ask(1, "agent")
    kit.llm.core.sessions.hint("", "agent", "release")
    assert kit.num_pinned == 5
    assert_pins_end(kit)


def test_a_tenant_with_all_pins_makes_room_for_others() -> None:
    kit = Kit()
    for number in range(3):
        kit.ask(number, f"agent {number}", retain_s=80_000.0 + number, tenant="hog")
    assert kit.num_pinned == 10
    kit.ask(9, "agent", retain_s=60.0, tenant="other")
    assert kit.num_pinned == 10
    kit.ask(8, "more", retain_s=60.0, tenant="other")
    kit.crowd()
    assert kit.ask(9, "agent", tenant="other").cached_tokens == 5 * BLOCK
    assert kit.ask(1, "agent 1", tenant="hog").cached_tokens == 5 * BLOCK, "each has its share"
    assert_pins_end(kit)


def test_requests_that_fail_do_not_stop_their_session_from_being_brought_back() -> None:
    kit = Kit(kv_host="1MiB")
    kit.ask(1, "agent", retain_s=0.0)
    for _ in range(3):
        job, collector = submit(kit.llm, random_tokens(LENGTH, seed=2), SHORT, session="agent")
        kit.llm.step()
        kit.llm.core.end(job, EngineError("broken"), "error")
        assert collector.output.error is not None
        assert kit.num_pinned == 0
    for _ in range(4):
        kit.now += 20.0
        kit.ask(1, "agent")
    kit.llm.core.sessions.hint("", "agent", "demote")
    while not kit.llm.core.upkeep.when_idle():
        wait_s = kit.llm.core.sessions.wait_s()
        assert wait_s is not None, "the session counts as running"
        kit.now += wait_s
    assert kit.llm.core.sessions.num_prefetched == 1
    drive(kit.llm, [])


def test_sessions_are_bounded_and_only_their_own_tenant_forgets_them() -> None:
    kit = Kit()
    sessions, most = kit.llm.core.sessions, _MOST_TOKENS // _LEAST_TOKENS
    kit.ask(1, "mine", retain_s=1000.0, tenant="other")
    job, _ = submit(kit.llm, random_tokens(8, seed=1), SHORT, session="x")
    drive(kit.llm, [job])
    for number in range(most + 50):
        job.session = f"s{number}"
        sessions.end(job, kit.now)
    assert len(sessions._sessions) == most
    assert sessions._num_tokens == {"": (most - 1) * _LEAST_TOKENS, "other": _LEAST_TOKENS}
    assert ("", f"s{number}") in sessions._sessions
    assert ("other", "mine") in sessions._sessions
    assert kit.num_pinned == 5
    sessions.hint("other", "mine", "release")
    assert "other" not in sessions._num_tokens


def test_random_hints_break_nothing() -> None:
    kit, rng = Kit(kv_host="40KiB", kv_ladder="int4"), random.Random(5)
    jobs: list[Any] = []
    for _ in range(300):
        kit.now += rng.random() * 5
        name = f"s{rng.randrange(4)}"
        roll = rng.random()
        if roll < 0.4:
            tokens = random_tokens(rng.randint(1, LENGTH), seed=rng.randrange(6))
            jobs.append(submit(kit.llm, tokens, SHORT, session=name, retain_s=rng.choice([None, 0.0, 20.0])))
        elif roll < 0.7:
            action: Any = rng.choice(["retain", "demote", "prefetch", "release"])
            kit.llm.core.sessions.hint("", name, action, rng.choice([None, 10.0]))
        elif jobs and roll < 0.75:
            kit.llm.core.cancel(rng.choice(jobs)[0])
        kit.llm.step()
        kit.manager.check_integrity()
    drive(kit.llm, jobs)
    assert_pins_end(kit)


def test_an_unknown_action_is_refused_and_an_unknown_session_is_not() -> None:
    kit = Kit()
    with pytest.raises(RequestError, match="retain, demote, prefetch, release"):
        kit.llm.hint("x", "forget")  # type: ignore[arg-type]
    kit.llm.hint("x", "demote")
    with pytest.raises(RequestError, match="session"):
        kit.llm.stream([1, 2], session="")
    with pytest.raises(RequestError, match="retain_s"):
        kit.llm.stream([1, 2], session="x", retain_s=-1.0)
    with pytest.raises(RequestError, match="retain_s needs the name of a session"):
        kit.llm.stream([1, 2], retain_s=1.0)
