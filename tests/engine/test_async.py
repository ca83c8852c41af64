"""The engine under asyncio: streams, cancellation, failures that reach those who wait, an orderly end."""

import asyncio
import itertools
import logging
import threading
import time
from functools import partial

import pytest

from kvq.engine import AsyncLLM, SamplingParams
from kvq.engine import loop as loop_module
from kvq.engine.loop import _Watchdog
from kvq.engine.requests.request_options import RequestOptions
from kvq.engine.requests.request_state import Job
from kvq.errors import EngineError, RequestError
from tests.engine.kit import assert_balanced, mixed_prompts, pair, tokens_of
from tests.waiting import HANG_S, wait_for

PROMPTS = mixed_prompts(24, seed=80, longest=40)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return pair("llama")[0]


def make(model, **options):
    return AsyncLLM(model, **({"num_blocks": 256, "max_num_seqs": 8} | options))


def run(main):
    """Run a coroutine; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(main, HANG_S))


def hold(engine):
    """Stop an engine in its fourth step, however slow its callers are: when it does, and until when."""
    is_held, goes_on, steps = threading.Event(), threading.Event(), itertools.count(1)

    def wait(_stats):
        if next(steps) == 4:
            is_held.set()
            goes_on.wait(HANG_S)

    engine.on_step(wait)
    return is_held, goes_on


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_many_streams_at_once_give_each_its_own_result(model):
    async def main():
        async with make(model) as engine:
            alone = [await engine.generate(prompt, GREEDY) for prompt in PROMPTS]

            async def collect(prompt):
                return [piece async for piece in engine.stream(prompt, GREEDY)]

            streams = await asyncio.gather(*map(collect, PROMPTS))
            assert engine.core.scheduler.counters.added == 48
        return alone, streams, engine

    alone, streams, engine = run(main())
    assert tokens_of([pieces[-1].output for pieces in streams]) == tokens_of(alone)
    for pieces in streams:
        result = pieces[-1].output.outputs[0]
        assert "".join(piece.text for piece in pieces) == result.text
        assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert_balanced(engine)


def test_a_subscription_to_steps_ends_when_it_is_told_to(model):
    async def main():
        async with make(model) as engine:
            seen, others = [], []
            end = engine.on_step(seen.append)
            engine.on_step(others.append)
            await engine.generate(PROMPTS[0], GREEDY)
            end()
            before = len(seen)
            assert before
            await engine.generate(PROMPTS[0], GREEDY)
            assert len(seen) == before
            assert len(others) > before

    run(main())


@pytest.mark.parametrize("how", ["break", "cancel", "close"])
def test_leaving_a_stream_ends_its_request_within_a_step(model, how):
    async def main():
        async with make(model) as engine:
            steps, asked, ask = [], [], engine._ask
            engine.on_step(lambda stats: steps.append(stats.running))

            def noting(command, *, quiet=False):
                ask(command, quiet=quiet)
                if quiet:  # to end a request
                    asked.append(len(steps))

            engine._ask = noting
            if how == "break":
                async for piece in engine.stream(PROMPTS[0], ENDLESS):
                    if piece.token_ids:
                        break
                await until(lambda: asked)  # asyncio closes the generator in one of its next turns
            elif how == "close":
                stream = engine.stream(PROMPTS[0], ENDLESS)
                await anext(stream)
                await stream.aclose()
            else:
                is_held, goes_on = hold(engine)
                task = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS))
                await until(is_held.is_set)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                goes_on.set()
            await until(lambda: not engine.core.has_work)
            assert len(steps) <= asked[0] + 2, "one step may be under way, one more between two looks"
            assert (await engine.generate(PROMPTS[1], GREEDY)).error is None
        return engine

    assert_balanced(run(main()))


def test_a_cancelled_stream_does_not_disturb_the_others(model):
    async def main():
        async with make(model) as engine:
            wanted = [(await engine.generate(prompt, GREEDY)).outputs[0].token_ids for prompt in PROMPTS[:6]]
            doomed = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS[6:10]]
            tasks = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in PROMPTS[:6]]
            for task in doomed:
                await asyncio.sleep(0.003)
                task.cancel()
            got = [(await task).outputs[0].token_ids for task in tasks]
            assert got == wanted
            await until(lambda: not engine.core.has_work)
        return engine

    assert_balanced(run(main()))


def test_a_request_that_cannot_be_served_is_refused_to_its_own_caller(model):
    async def main():
        async with make(model) as engine:
            with pytest.raises(RequestError, match="outside the vocabulary"):
                await engine.generate([5000], GREEDY)
            with pytest.raises(RequestError, match="priority must be one of"):
                await engine.generate([5], GREEDY, priority="soon")
            return await engine.generate([5], GREEDY, priority="batch", tenant="a", request_id="mine")

    output = run(main())
    assert (output.request_id, output.error) == ("mine", None)


def test_an_error_in_one_request_reaches_its_own_caller(model):
    def check(_module, inputs):
        if bool((inputs[0] == 190).any()):
            raise RuntimeError("not this token")

    hook = model.weights.model.model.embed_tokens.register_forward_pre_hook(check)

    async def main():
        async with make(model) as engine:
            calm = SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={190: -100.0})
            others = [asyncio.create_task(engine.generate([5, i], calm)) for i in range(10, 14)]
            with pytest.raises(EngineError, match="not this token"):
                await engine.generate([5, 190], calm)
            assert [(await task).error for task in others] == [None] * 4

    try:
        run(main())
    finally:
        hook.remove()


def test_a_request_that_cannot_be_queued_fails_alone(model, monkeypatch):
    async def run():
        async with make(model) as engine:
            submit, calls = engine.core.submit, []

            def failing(job):
                calls.append(job)
                if len(calls) == 2:
                    raise ValueError("odd")
                submit(job)

            monkeypatch.setattr(engine.core, "submit", failing)
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            found = await asyncio.gather(
                *(engine.generate([5, 6 + i], params) for i in range(4)), return_exceptions=True
            )
            assert [isinstance(one, EngineError) for one in found] == [False, True, False, False]
            assert "could not be queued: ValueError: odd" in str(found[1])

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_down_says_so_to_everybody_who_waits(model):
    async def main():
        engine = make(model, async_scheduling=False)
        is_held, goes_on = hold(engine)
        tasks = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS[:12]]
        await until(is_held.is_set)

        def broken(now):
            raise AssertionError("a bug")

        engine.core.scheduler.schedule = broken
        goes_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineError), result
            assert "the engine broke down: AssertionError: a bug" in str(result)
        with pytest.raises(EngineError, match="broke down"):
            await engine.generate([5], GREEDY)
        engine.close()

    run(main())


def test_closing_answers_everybody_and_refuses_what_comes_after(model):
    async def main():
        engine = make(model, max_num_seqs=2)
        is_held, goes_on = hold(engine)
        tasks = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS]
        await until(is_held.is_set)
        closer = asyncio.get_running_loop().run_in_executor(None, engine.close)
        await until(lambda: not engine._loop._commands.empty())
        goes_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await closer
        for result in results:
            assert isinstance(result, EngineError), result
            assert "the engine was closed" in str(result)
        with pytest.raises(EngineError, match="the engine was closed"):
            await engine.generate([5], GREEDY)
        engine.close()
        return engine

    assert_balanced(run(main()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_everybody_is_answered_even_if_requests_cannot_be_ended_in_order(model, caplog):
    async def main():
        engine = make(model, async_scheduling=False)
        is_held, goes_on = hold(engine)
        tasks = [asyncio.create_task(engine.generate(prompt, ENDLESS)) for prompt in PROMPTS[:12]]
        await until(is_held.is_set)
        engine.core.scheduler.schedule = engine.core.scheduler.fail = None  # calls to it raise
        goes_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert ["TypeError" in str(result) for result in results] == [True] * 12
        assert {type(result) for result in results} == {EngineError}
        engine.close()

    with caplog.at_level(logging.CRITICAL, "kvq"):
        run(main())


def test_a_request_that_comes_while_the_engine_closes_is_answered(model):
    async def main():
        engine = make(model)
        ask, closer = engine._loop.ask, threading.Thread(target=engine.close)

        class Slow:
            """A loop that lets the engine close between the look whether it is open and the sending."""

            def __getattr__(self, name):
                return getattr(loop, name)

            def ask(self, command):
                if command is not None and command.func == engine._submit:
                    closer.start()
                    time.sleep(0.2)
                ask(command)

        loop, engine._loop = engine._loop, Slow()
        with pytest.raises(EngineError, match="the engine was closed"):
            await asyncio.wait_for(engine.generate([5], GREEDY), HANG_S)
        closer.join()

    run(main())


@pytest.mark.parametrize("refused", [True, False])
def test_a_refusal_that_cannot_be_told_and_a_failing_tokenizer_stop_nobody_else(
    model, caplog, monkeypatch, refused
):
    engine = make(model)

    def deaf(piece):
        raise OSError("the client is gone")

    def broken(*_args):
        raise RequestError("too many") if refused else KeyError("no such piece")

    job = engine.core.intake.new_job([5], RequestOptions(params=GREEDY), listener=deaf)
    if refused:
        submit = engine.core.submit
        engine.core.submit = lambda one: broken() if one is job else submit(one)
    else:
        begin = Job.begin
        monkeypatch.setattr(Job, "begin", lambda one, *rest: broken() if one is job else begin(one, *rest))
    with caplog.at_level(logging.CRITICAL, "kvq"):
        engine._ask(partial(engine._submit, job))
        assert run(engine.generate(PROMPTS[1], GREEDY)).error is None
    engine.close()
    assert_balanced(engine)


def test_closing_an_idle_engine_wakes_its_threads_and_ends_them(model):
    before = set(threading.enumerate())
    engine = make(model)
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"kvq-engine", "kvq-watchdog"}
    wake = engine._loop.watchdog._wake
    wait, waited = wake.wait, threading.Event()

    def until_woken(timeout=None):
        waited.set()
        return wait(HANG_S)

    wake.wait = until_woken
    waited.wait(HANG_S)
    engine.close()
    assert set(threading.enumerate()) <= before


def test_two_event_loops_may_share_an_engine(model):
    engine, results = make(model), {}

    async def collect(prompts):
        return await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))

    def work(name, prompts):
        results[name] = tokens_of(run(collect(prompts)))

    wanted = tokens_of(run(collect(PROMPTS)))
    threads = [
        threading.Thread(target=work, args=(i, PROMPTS[i::2]), name=f"loop-{i}", daemon=True)
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert results == {0: wanted[0::2], 1: wanted[1::2]}
    engine.close()
    assert_balanced(engine)


def test_a_caller_whose_loop_is_gone_does_not_stop_the_engine(model, caplog):
    engine = make(model)
    loop = asyncio.new_event_loop()
    stream = engine.stream(PROMPTS[0], ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()
    with caplog.at_level(logging.CRITICAL, "kvq"):
        output = run(engine.generate(PROMPTS[1], GREEDY))
    assert output.error is None
    engine.close()
    assert_balanced(engine)


def test_a_stuck_step_is_reported_once_while_it_lasts(model, caplog, monkeypatch):
    """By a clock that stands still but for the stuck step."""
    stuck, looks, slow, now = [], [], threading.Event(), [100.0]

    def hold(_module, _inputs):
        if slow.is_set():
            slow.clear()
            now[0] += 0.3
            wait_for(lambda: stuck, "the report")
            seen = len(looks)
            wait_for(lambda: len(looks) > seen + 3, "further looks at the same step")

    async def main():
        engine = AsyncLLM(model, num_blocks=64, max_num_seqs=8, step_deadline_s=0.1, on_stuck=stuck.append)
        wake = engine._loop.watchdog._wake
        wait = wake.wait
        wake.wait = lambda timeout: looks.append(timeout) or wait(timeout)
        async with engine:
            await engine.generate([5, 6], GREEDY)
            assert stuck == []
            slow.set()
            assert (await engine.generate([5, 6], GREEDY)).error is None

    monkeypatch.setattr(loop_module, "monotonic", lambda: now[0])
    hook = model.weights.model.model.embed_tokens.register_forward_pre_hook(hold)
    try:
        with caplog.at_level(logging.ERROR, "kvq"):
            run(main())
    finally:
        hook.remove()
    assert stuck == [pytest.approx(0.3)]
    assert caplog.messages.count("a step has taken 0.3 s, its deadline is 0.1 s") == 1


def test_a_watchdog_goes_on_when_whom_it_tells_fails(caplog):
    told = []

    def fail(seconds):
        told.append(seconds)
        raise OSError("no mail today")

    watchdog = _Watchdog(0.02, fail)
    with caplog.at_level(logging.ERROR, "kvq"):
        for number in (1, 2):
            watchdog.began = time.monotonic()
            wait_for(lambda number=number: len(told) == number, "the report of a step")
    watchdog.close()
    assert len(told) == caplog.messages.count("the callback for stuck steps failed") == 2


def test_streams_begin_while_others_run_and_everybody_gets_on(model):
    async def main():
        async with make(model, max_num_seqs=4, num_blocks=40) as engine:
            first_pieces = []

            async def late(i):
                await asyncio.sleep(0.002 * i)
                output = None
                async for piece in engine.stream(PROMPTS[i], GREEDY):
                    first_pieces.append(i)
                    output = piece.output
                return output

            outputs = await asyncio.gather(*(late(i) for i in range(len(PROMPTS))))
        assert set(first_pieces) == set(range(len(PROMPTS)))
        return engine, outputs

    engine, outputs = run(main())
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    for output in outputs:
        timing = output.timing
        assert 0 <= timing.queue_s <= timing.ttft_s <= timing.e2e_s
        assert len(timing.itl_s) == 11
    assert_balanced(engine)
