"""Steps that are launched while the one before them runs give what steps one by one give."""

import logging
from dataclasses import replace

import pytest
import torch

import kvq
from kvq.engine import SamplingParams, StructuredOutput
from kvq.engine.device.runner import StepOutput
from kvq.engine.steps.launch import LONG_STEP_S
from kvq.kernels.decoder.whole import ReadyPass
from kvq.kernels.native.library import load
from kvq.models.parts.linear import has_own_products
from tests.engine.device.test_graphs import graphs_over
from tests.engine.kit import assert_balanced, drive, engine, mixed_prompts, opened, pair, submit, text_of
from tests.helpers_models import random_tokens

DRAWN = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
ALL_KINDS = [
    SamplingParams(max_tokens=25),
    DRAWN,
    replace(DRAWN, n=3),
    replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5),
    replace(DRAWN, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=12, beam_width=3),
    SamplingParams(max_tokens=40, ignore_eos=True, stop=[text_of([9]), text_of([40])]),
    SamplingParams(max_tokens=1),
]


@pytest.fixture(autouse=True, params=[1, 2], ids=["in turns", "aside"])
def num_threads(request):
    """With two, steps of a plain model run in kernels' threads while those before them are settled."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def begun(monkeypatch):
    """Steps that ran aside so far."""
    passes, begin = [], ReadyPass.begin
    monkeypatch.setattr(ReadyPass, "begin", lambda self: passes.append(self) or begin(self))
    return passes


def watched(llm):
    """Count an engine's steps that were launched ahead, as `llm.num_ahead`."""
    schedule_ahead, llm.num_ahead = llm.core.scheduler.schedule_ahead, 0

    def count(plan):
        ahead = schedule_ahead(plan)
        llm.num_ahead += ahead is not None
        return ahead

    llm.core.scheduler.schedule_ahead = count
    return llm


def results(outputs):
    for output in outputs:
        assert output.error is None, output.error
    return [[(r.token_ids, r.text, r.finish_reason) for r in o.outputs] for o in outputs]


def logprobs(outputs):
    return [entry.logprob for o in outputs for r in o.outputs for entry in r.logprobs or ()]


@pytest.mark.daily(6)
@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gemma3_text", marks=pytest.mark.long), "gpt_oss"],
)
@pytest.mark.parametrize(
    ("kv", "options"),
    [
        ("fp32", {}),
        ("int4", {"num_blocks": 24}),
        ("fp32", {"max_num_batched_tokens": 19, "max_num_seqs": 5}),
        pytest.param("int4", {}, marks=pytest.mark.long),
        pytest.param("fp32", {"num_blocks": 24}, marks=pytest.mark.long),
        pytest.param("int4", {"max_num_batched_tokens": 19, "max_num_seqs": 5}, marks=pytest.mark.long),
    ],
)
def test_requests_of_all_kinds_get_the_same(family, kv, options, num_threads, begun):
    model = pair(family)[0].with_kv(kv)
    options = {"max_context": 256} | options
    params = 2 * ALL_KINDS
    prompts = mixed_prompts(len(params), seed=21)
    wanted = engine(model, **options).generate(prompts, params)
    llm = watched(engine(model, async_scheduling=True, **options))
    got = llm.generate(prompts, params)
    assert results(got) == results(wanted)
    # Where kvq's kernels don't run experts, their last bits depend on who else is in a step.
    together = family == "gpt_oss" and not has_own_products(torch.float32, "auto")
    assert logprobs(got) == pytest.approx(logprobs(wanted), abs=1e-3 if together else 0)
    assert llm.num_ahead > 10
    runs_concurrently = family != "gpt_oss" and num_threads > 1 and not isinstance(load(), str)
    assert (len(begun) > 10) == runs_concurrently
    assert_balanced(llm)


def test_a_full_engine_runs_ahead_while_others_wait():
    model = pair("llama")[0]
    llm = watched(engine(model, async_scheduling=True, max_num_seqs=4))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for prompt in mixed_prompts(12, seed=22, longest=20):
        submit(llm, prompt, params)
    waiting = []
    for _ in range(2000):
        if not llm.core.has_work:
            break
        before = llm.num_ahead
        llm.step()
        if llm.num_ahead > before:
            waiting.append(llm.core.scheduler.waiting.num_waiting)
    assert len(waiting) > 40
    assert max(waiting) == 8
    assert_balanced(llm)


def test_a_newcomer_starts_in_the_next_step_but_one():
    llm = watched(engine(pair("llama")[0], async_scheduling=True))
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    first, _ = submit(llm, random_tokens(9, seed=1), params)
    for _ in range(5):
        llm.step()
    second, collector = submit(llm, random_tokens(9, seed=2), params)
    llm.step()
    llm.step()
    assert [len(piece.token_ids) for piece in collector.pieces] == [1]
    llm.core.cancel(first)
    llm.core.cancel(second)
    assert not llm.step(), "what was launched for requests that ended is dropped"
    assert_balanced(llm)


def test_cancelling_and_ending_in_turns_leaves_nothing_behind():
    llm = watched(engine(pair("llama")[0], async_scheduling=True, max_num_seqs=6))
    jobs = [submit(llm, prompt, DRAWN)[0] for prompt in mixed_prompts(30, seed=23, longest=40)]
    for i in range(3000):
        if not llm.core.has_work:
            break
        llm.step()
        if i % 3 == 0:
            llm.core.cancel(jobs[(7 * i) % 30])
    assert llm.num_ahead > 10
    assert_balanced(llm)


def test_a_step_that_raises_when_launched_ahead_is_run_again_with_its_tokens(caplog):
    model = pair("llama")[0]
    prompts = mixed_prompts(6, seed=24)
    params = [replace(DRAWN, max_tokens=5 + 4 * i) for i in range(6)]
    wanted = results(engine(model).generate(prompts, params))
    llm = watched(engine(model, async_scheduling=True))
    forward, get_ready, raised = llm.core.runner.forward, llm.core.runner.get_ready, []

    def raising(plan, *, tokens=None, **options):
        if plan.follows is not None and plan.number % 2:
            raised.append(plan.number)
            raise RuntimeError("not ahead")
        return forward(plan, tokens=tokens, **options)

    def refusing(plan):
        if plan.number % 2:
            raise RuntimeError("not ready")
        return get_ready(plan)

    llm.core.runner.forward, llm.core.runner.get_ready = raising, refusing
    with caplog.at_level(logging.CRITICAL, "kvq"):
        assert results(llm.generate(prompts, params)) == wanted
    assert len(raised) > 5
    assert_balanced(llm)


@pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
def test_a_step_that_fails_aside_is_run_again_with_its_tokens(num_threads, begun, monkeypatch, caplog):
    model = pair("llama")[0]
    prompts = mixed_prompts(6, seed=24)
    params = [replace(DRAWN, max_tokens=5 + 4 * i) for i in range(6)]
    wanted = results(engine(model).generate(prompts, params))
    wait, failed = StepOutput.wait, []

    def failing(self):
        fails = self.concurrent is not None and len(begun) % 3 == 0
        wait(self)
        if fails:
            failed.append(1)
            raise MemoryError("no room")

    monkeypatch.setattr(StepOutput, "wait", failing)
    llm = watched(engine(model, async_scheduling=True, num_blocks=60))
    with caplog.at_level(logging.CRITICAL, "kvq"):
        assert results(llm.generate(prompts, params)) == wanted
    assert (len(failed) > 5) == (num_threads > 1)
    assert_balanced(llm)


@pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
def test_short_steps_of_a_cpu_run_ahead_without_being_asked_to_and_long_ones_do_not(num_threads, begun):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for seconds, asked in ((LONG_STEP_S / 2, None), (2 * LONG_STEP_S, None), (LONG_STEP_S / 2, False)):
        begun.clear()
        llm = watched(engine(pair("llama")[0], async_scheduling=asked))
        llm.core.scheduler.costs.decode_s = lambda _, seconds=seconds: seconds
        llm.generate(mixed_prompts(3, seed=26), params)
        runs_ahead = asked is None and num_threads > 1 and seconds < LONG_STEP_S
        assert (llm.num_ahead > 10, len(begun) > 10) == (runs_ahead, runs_ahead)
        assert_balanced(llm)


@pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
def test_an_engine_whose_steps_find_no_threads_takes_them_in_turns(num_threads, monkeypatch):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    wanted = results(engine(pair("llama")[0]).generate([[5, 6, 7]], params))
    monkeypatch.setattr(ReadyPass, "begin", lambda self: bool(self.run()))  # as while another engine's runs
    llm = watched(engine(pair("llama")[0], async_scheduling=None))
    assert results(llm.generate([[5, 6, 7]], params)) == wanted
    assert llm.num_ahead == int(num_threads > 1), "the one that found none"


def test_a_step_that_is_interrupted_while_another_runs_waits_for_that(num_threads, begun):
    model, params = pair("llama")[0], SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = results(engine(model).generate([[5, 6, 7]], params))
    llm = engine(model, async_scheduling=True)
    get_ready, kept = llm.core.runner.get_ready, []

    def interrupted(plan):
        if plan.number > 8 and not kept:
            raise KeyboardInterrupt
        return get_ready(plan)

    llm.core.runner.get_ready = interrupted
    try:
        llm.generate([[5, 6, 7]], params)
    except KeyboardInterrupt as error:
        kept.append(error)  # and with it whatever its frames hold, as an interactive shell does
    assert kept
    assert not any(step._runs for step in begun)
    assert (len(begun) > 3) == (num_threads > 1)
    assert results(llm.generate([[5, 6, 7]], params)) == wanted
    assert_balanced(llm)


def test_an_engine_that_is_dropped_while_a_step_runs_leaves_nothing_behind(num_threads):
    model = pair("llama")[0]
    for closes in (True, False):
        llm = engine(model, async_scheduling=True)
        submit(llm, [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
        for _ in range(6):
            llm.step()
        if closes:
            llm.close()
        opened.remove(llm)
        del llm
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert engine(model).generate([[5, 6, 7]], params)[0].error is None


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_fails_ahead_of_its_end_fails_only_if_it_goes_on(ends, caplog):
    """Its last token was drawn when the step behind it raises: then that step was not needed."""
    model = pair("llama")[0]
    [wanted] = engine(model).generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))
    tokens = wanted.outputs[0].token_ids
    at = next(i for i in range(5, 20) if tokens[i] not in tokens[:i])
    llm = engine(model, async_scheduling=True)

    def check(_module, inputs):
        if bool((inputs[0] == tokens[at]).any()):
            raise RuntimeError("no")

    hook = model.weights.model.model.embed_tokens.register_forward_pre_hook(check)
    stop = (tokens[at],) if ends else ()
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=stop)
    with caplog.at_level(logging.CRITICAL, "kvq"):
        [output] = llm.generate([[5, 6, 7]], params)
    hook.remove()
    assert (output.error is None) == ends
    assert output.outputs[0].token_ids == tokens[: at + 1]
    assert_balanced(llm)


def test_a_value_that_is_not_finite_in_a_token_computed_in_vain_fails_nobody():
    model = pair("llama")[0]
    found = []
    for ahead in (False, True):
        llm = watched(engine(model, async_scheduling=ahead))
        plain = SamplingParams(max_tokens=30, ignore_eos=True, n=2, temperature=1.0, seed=11)
        first = engine(model).generate([[5, 6, 7]], plain)[0].outputs[0].token_ids
        at = next(i for i in range(4, 30) if first[i] not in first[:i])
        llm.plan, prepare = None, llm.core.runner.prepare

        def keep(plan, llm=llm, prepare=prepare):
            llm.plan = plan
            return prepare(plan)

        def poison(layer, k, v, llm=llm, at=at):
            for row, branch in enumerate(llm.plan.branches):
                is_first = branch is branch.request.branches[0]
                if is_first and llm.plan.counts[row] == 1 and llm.plan.ends[row] == 3 + at + 1:
                    k[row] = float("nan")

        llm.core.runner.prepare, llm.core.runner.observer = keep, poison
        params = replace(plain, stop_token_ids=(first[at],))
        [output] = llm.generate([[5, 6, 7]], params)
        assert output.error is None, output.error
        assert output.outputs[0].finish_reason == "stop"
        found.append(results([output]))
        assert_balanced(llm)
    assert found[0] == found[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_costs_are_those_of_the_step_itself(ahead, monkeypatch):
    llm = engine(pair("llama")[0], async_scheduling=ahead)
    seen, forward, slow, now = [], llm.core.runner.forward, 0.02, [0.0]  # by a clock that nothing else moves
    llm.core._clock = llm.core._launcher.clock = lambda: now[0]
    observe = llm.core.scheduler.costs.observe
    llm.core.scheduler.costs.observe = lambda **step: seen.append(step) or observe(**step)

    def slower(plan, **options):
        now[0] += slow * len(plan.branches)
        return forward(plan, **options)

    def later(self):
        now[0] += slow * len(self.bad_tokens) * (self.concurrent is not None)
        wait(self)
        self.concurrent_s = 0.0

    wait = StepOutput.wait
    monkeypatch.setattr(StepOutput, "wait", later)
    llm.core.runner.forward = slower
    jobs = [submit(llm, [5, 6 + i], SamplingParams(max_tokens=4 + 4 * i, ignore_eos=True)) for i in range(3)]
    drive(llm, jobs)
    decodes = [step for step in seen if step["num_decodes"] and not step["prefill_tokens"]]
    assert len(decodes) > 8
    for step in decodes:
        assert step["seconds"] >= 0.999 * slow * step["num_decodes"]
    least = min(step["seconds"] for step in decodes if step["num_decodes"] == 1)
    assert least < 2 * slow


@pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
def test_costs_count_what_ran_while_nobody_called_for_the_next_step(num_threads, monkeypatch):
    llm, took = engine(pair("llama")[0], async_scheduling=True), 0.25
    monkeypatch.setattr(ReadyPass, "took_s", took)
    seen, observe = [], llm.core.scheduler.costs.observe
    llm.core.scheduler.costs.observe = lambda **step: seen.append(step["seconds"]) or observe(**step)
    drive(llm, [submit(llm, [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))])
    assert sum(seconds >= took for seconds in seen) >= 5 * (num_threads > 1)


def test_a_grammar_decides_over_tokens_of_steps_that_were_launched_ahead(tiny):
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=1, structured=StructuredOutput(regex="[a-c]{8,30}d")
    )
    found = []
    for ahead in (False, True):
        with kvq.LLM(tiny, num_blocks=64, max_num_seqs=4, async_scheduling=ahead) as llm:
            watched(llm)
            found.append([o.outputs[0].text for o in llm.generate(["one", "two", "three"], params)])
            assert (llm.num_ahead > 5) == ahead
    assert found[0] == found[1]


def test_graphs_take_the_tokens_from_the_device(tiny):
    prompts = [[5 + i] * (3 + 11 * i) for i in range(5)]
    params = [SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True) for i in range(5)]
    with kvq.LLM(tiny, "fp32", num_blocks=24, max_num_seqs=7, max_context=128) as plain:
        wanted = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    options = {"num_blocks": 24, "max_num_seqs": 7, "max_context": 128, "prefix_caching": False}
    with kvq.LLM(tiny, "fp32", async_scheduling=True, **options) as llm:
        graphs, _ = graphs_over(llm.core.runner, spare=24)
        llm.core.runner._graphs, fed = graphs, []
        run = graphs.run

        def watch(plan, tokens=None):
            fed.append(tokens is not None)
            return tuple(map(torch.clone, run(plan, tokens)))  # what a device would have copied by then

        graphs.run = watch
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
        assert sum(fed) > 10


def test_time_and_counts_of_steps_add_up():
    llm = engine(pair("llama")[0], async_scheduling=True)
    seen = []
    llm.on_step(seen.append)
    jobs = [submit(llm, prompt, DRAWN) for prompt in mixed_prompts(5, seed=25)]
    drive(llm, jobs)
    assert sum(stats.finished for stats in seen) == 5
    assert [stats.number for stats in seen] == list(range(len(seen)))
    for stats in seen:
        assert stats.scheduling_s > 0
        assert stats.forward_s > 0
        assert stats.sampling_s > 0
