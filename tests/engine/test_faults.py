"""What goes wrong in one request ends that request alone, with a typed error, and leaves nothing behind."""

import logging
import math

import pytest
import torch

from kvq.engine import RequestOutput, SamplingParams
from kvq.errors import EngineError, NumericalError, RequestError
from tests.engine.kit import BLOCK, assert_balanced, drive, engine, mixed_prompts, pair, submit, tokens_of
from tests.helpers_models import random_tokens

pytestmark = pytest.mark.usefixtures("_ahead")

MARK = 190  # a token that only the victim has
PARAMS = SamplingParams(max_tokens=10, logprobs=2, ignore_eos=True, logit_bias={MARK: -100.0})
KINDS = ["fp32", "bf16", "fp8", "int8", "int4", "k8v4"]
LAYERS = 2


def batch_of_eight() -> list[list[int]]:
    """Prompts of 20 to 90 tokens; number 3 is the victim's, the only one with MARK."""
    prompts = [[t if t != MARK else 3 for t in random_tokens(20 + 10 * i, seed=40 + i)] for i in range(8)]
    prompts[3][29] = MARK
    return prompts


VICTIM = 3


def outcome(outputs):
    """Tokens and log-probabilities of all but the victim, to the last bit."""
    others = [output for i, output in enumerate(outputs) if i != VICTIM]
    for output in others:
        assert output.error is None, output.error
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in others]


def victims_rows(llm, when: str) -> list[int]:
    """Packed rows of the victim in the step under way: the one of MARK, or that of its 5th token."""
    plan, rows, at = llm.plan, [], 0
    for branch, count, end in zip(plan.branches, plan.counts, plan.ends, strict=True):
        position = 29 if when == "prefill" else branch.request.prompt_length + 4
        if MARK in branch.request.tokens and end - count <= position < end:
            rows.append(at + position - (end - count))
        at += count
    return rows


def watched(llm):
    """Keep the plan of the step under way as `llm.plan`, and the blocks the victim held in its last step."""
    prepare, llm.plan, llm.victims = llm.core.runner.prepare, None, set()

    def keep(plan):
        llm.plan = plan
        mine = [branch.sequence for branch in plan.branches if MARK in branch.request.tokens]
        if mine:
            llm.victims = {
                (group, block)
                for sequence in mine
                for group, table in enumerate(sequence.tables)
                for block in table[sequence.starts[group] :]
            }
        return prepare(plan)

    llm.core.runner.prepare = keep
    return llm


def poison(llm, when: str, layer: int, value: float, part: int):
    """Overwrite one number of K or V in one layer, in the victim's row alone."""

    def observe(at, k, v):
        if at == layer:
            for row in victims_rows(llm, when):
                (k, v)[part][row, 1, 7] = value

    llm.core.runner.observer = observe


def check_only_the_victim_failed(llm, outputs, wanted):
    assert isinstance(outputs[VICTIM].error, NumericalError)
    assert outputs[VICTIM].outputs[0].finish_reason == "error"
    assert sum(output.error is not None for output in outputs) == 1
    assert outcome(outputs) == wanted
    check_nothing_stays(llm, outputs[VICTIM].prompt_token_ids)


def check_nothing_stays(llm, prompt):
    manager = llm.core.scheduler.manager
    assert manager.lookup(manager.prompt([*prompt, 1])).length == 0
    assert llm.victims
    llm.core.runner.cache.carry_out(manager.take_orders())
    for group, block in llm.victims:
        assert not llm.core.runner.cache.read_block(group, block).view(torch.uint8).any(), "left in a block"
    assert_balanced(llm)


@pytest.mark.daily(16)
@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_nan_in_one_layer_ends_that_request_alone_and_nothing_of_it_stays(kv, layer, when):
    model = pair("llama")[0].with_kv(kv)
    prompts = batch_of_eight()
    wanted = outcome(engine(model).generate(prompts, PARAMS))
    llm = watched(engine(model))
    value, part = (math.nan, 0) if layer == 0 else (math.inf, 1)
    poison(llm, when, layer, value, part)
    outputs = llm.generate(prompts, PARAMS)
    assert len(outputs[VICTIM].outputs[0].token_ids) == (0 if when == "prefill" else 5)
    check_only_the_victim_failed(llm, outputs, wanted)


@pytest.mark.parametrize("chunk", [16, 33])
def test_a_nan_in_a_later_chunk_takes_the_earlier_chunks_out_of_the_index(chunk):
    model = pair("llama")[0]
    prompts = batch_of_eight()
    wanted = outcome(engine(model, max_num_batched_tokens=chunk).generate(prompts, PARAMS))
    llm = watched(engine(model, max_num_batched_tokens=chunk))
    poison(llm, "prefill", 1, math.nan, 0)
    outputs = llm.generate(prompts, PARAMS)
    assert [o[0] for o in outcome(outputs)] == [w[0] for w in wanted]
    check_only_the_victim_failed(llm, outputs, outcome(outputs))


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=10, beam_width=3)])
def test_nan_logits_end_that_request_alone(params):
    model = pair("llama")[0]
    prompts = batch_of_eight()
    every = [params if i == VICTIM else PARAMS for i in range(8)]
    wanted = outcome(engine(model).generate(prompts, every))
    llm = watched(engine(model))

    def poison_logits(_module, _inputs, logits):
        wanted_rows = [b for b, samples in zip(llm.plan.branches, llm.plan.samples, strict=True) if samples]
        for row, branch in enumerate(wanted_rows):
            if MARK in branch.request.tokens and branch.num_generated == 2:
                logits[0, row, 11] = math.nan

    hook = model.weights.model.lm_head.register_forward_hook(poison_logits)
    try:
        outputs = llm.generate(prompts, every)
    finally:
        hook.remove()
    check_only_the_victim_failed(llm, outputs, wanted)


@pytest.mark.parametrize("n", [2, 4])
def test_a_nan_in_one_of_several_results_leaves_nothing_of_the_request(n):
    model = pair("llama")[0]
    llm = watched(engine(model))
    victim = batch_of_eight()[VICTIM]

    def observe(layer, k, v):
        for row in victims_rows(llm, "decode")[1:2]:  # one of its results
            k[row] = math.nan

    llm.core.runner.observer = observe
    [output] = llm.generate(
        [victim], SamplingParams(n=n, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    )
    assert isinstance(output.error, NumericalError)
    assert len(output.outputs) == n
    check_nothing_stays(llm, victim)


def test_requests_that_wait_for_a_prefix_go_on_when_its_owner_fails():
    model, _ = pair("llama")
    owner = batch_of_eight()[VICTIM]
    followers = [owner[:28] + random_tokens(12, seed=60 + i) for i in range(3)]
    followers = [[t if t != MARK else 3 for t in tokens] for tokens in followers]
    wanted = tokens_of(engine(model).generate(followers, PARAMS))
    llm = watched(engine(model, max_num_batched_tokens=16))
    poison(llm, "prefill", 0, math.nan, 1)
    collectors = [submit(llm, prompt, PARAMS)[1] for prompt in [owner, *followers]]
    drive(llm, collectors)
    assert isinstance(collectors[0].output.error, NumericalError)
    assert tokens_of([c.output for c in collectors[1:]]) == wanted
    assert_balanced(llm)


# Exceptions


@pytest.fixture
def raising_model():
    """A model that raises when it sees MARK, as a faulty kernel or hook might."""
    model, _ = pair("llama")

    def check(_module, inputs):
        if bool((inputs[0] == MARK).any()):
            raise RuntimeError(f"token {MARK} is not to my taste")

    hook = model.weights.model.model.embed_tokens.register_forward_pre_hook(check)
    yield model
    hook.remove()


@pytest.mark.parametrize("chunk", [16, 2048])
def test_an_exception_in_one_requests_part_of_a_step_ends_that_request_alone(raising_model, caplog, chunk):
    prompts = batch_of_eight()
    calm = [p if i != VICTIM else [5, 6] for i, p in enumerate(prompts)]
    wanted = tokens_of(engine(raising_model).generate(calm, PARAMS))
    llm = engine(raising_model, max_num_batched_tokens=chunk)
    with caplog.at_level(logging.CRITICAL, "kvq"):
        outputs = llm.generate(prompts, PARAMS)
    assert isinstance(outputs[VICTIM].error, EngineError)
    assert "token 190 is not to my taste" in str(outputs[VICTIM].error)
    got = tokens_of([output for i, output in enumerate(outputs) if i != VICTIM])
    assert got == [tokens for i, tokens in enumerate(wanted) if i != VICTIM]
    manager = llm.core.scheduler.manager
    assert manager.lookup(manager.prompt(prompts[VICTIM])).length == 0
    assert_balanced(llm)


def test_a_request_that_fails_alone_in_its_step_leaves_the_engine_ready(raising_model):
    llm = engine(raising_model)
    for _ in range(2):
        [failed] = llm.generate([[5, MARK]], PARAMS)
        assert isinstance(failed.error, EngineError)
    [output] = llm.generate([[5, 6]], PARAMS)
    assert output.error is None
    assert_balanced(llm)


def test_beams_and_several_results_fail_as_one(raising_model):
    llm = engine(raising_model)
    every = [
        SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=9, logit_bias={MARK: 4.0}),
        SamplingParams(beam_width=3, max_tokens=9),
        PARAMS,
    ]
    outputs = llm.generate([[5, 6, 7], [5, MARK], [8, 9]], every)
    assert [type(output.error) for output in outputs] == [EngineError, EngineError, type(None)]
    assert len(outputs[0].outputs) == 3
    assert_balanced(llm)


def test_a_listener_that_raises_ends_its_own_request_alone():
    llm = engine(pair("llama")[0])
    prompts = mixed_prompts(5, seed=50)
    wanted = tokens_of(llm.generate(prompts, PARAMS))
    calls, collectors = [], []
    for i, prompt in enumerate(prompts):
        job, collector = submit(llm, prompt, PARAMS)
        collectors.append(collector)
        if i == 2:

            def raising(piece):
                calls.append(piece)
                if len(calls) >= 3:
                    raise OSError("the client is gone")

            job.listener = raising
    drive(llm, collectors)
    assert tokens_of([c.output for i, c in enumerate(collectors) if i != 2]) == wanted[:2] + wanted[3:]
    assert isinstance(calls[-1].error, EngineError)
    assert "the client is gone" in str(calls[-1].error)
    assert_balanced(llm)


@pytest.mark.parametrize("whom", ["itself", "others"])
@pytest.mark.parametrize("at", [1, 10])
@pytest.mark.parametrize("n", [1, 2])
def test_a_listener_may_cancel_requests_in_the_middle_of_a_step(whom, at, n):
    llm = engine(pair("llama")[0])
    params = SamplingParams(max_tokens=10, ignore_eos=True, n=n)
    jobs = [submit(llm, prompt, params) for prompt in mixed_prompts(4, seed=51)]
    job, _ = jobs[1]
    told = []

    def cancelling(piece):
        told.append(piece)
        if len(told) == at:
            for other, _ in jobs:
                if (other is job) == (whom == "itself"):
                    llm.core.cancel(other)

    job.listener = cancelling
    drive(llm, jobs)
    assert sum(isinstance(event, RequestOutput) for event in told) == 1
    assert_balanced(llm)


def test_a_subscriber_that_raises_is_dropped_and_the_others_go_on():
    model, _ = pair("llama")
    llm = engine(model)
    seen, calls = [], []

    def raising(stats):
        calls.append(stats)
        raise ValueError("no")

    llm.on_step(raising)
    end = llm.on_step(seen.append)
    tokens_of(llm.generate([[5, 6]], PARAMS))
    assert (len(calls), len(seen)) == (1, 10)
    assert sum(stats.finished for stats in seen) == 1
    assert sum(stats.prefill_tokens for stats in seen) == 2
    end()
    end()
    tokens_of(llm.generate([[5, 6]], PARAMS))
    assert len(seen) == 10


def test_nothing_is_measured_any_more_once_the_last_subscriber_failed():
    model, _ = pair("llama")
    llm = engine(model)

    def raising(stats):
        raise ValueError("no")

    llm.on_step(raising)
    tokens_of(llm.generate([[5, 6]], PARAMS))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.weights.model.modules()]
    assert sum(hooks) == 0


def test_a_pin_gives_way_to_a_request_that_never_fits_beside_it():
    model, _ = pair("llama")
    llm = engine(model, num_blocks=8, max_context=8 * BLOCK)
    tokens = random_tokens(4 * BLOCK, seed=70)
    llm.generate([tokens], SamplingParams(max_tokens=1))
    manager = llm.core.scheduler.manager
    assert manager.pin(manager.prompt(tokens), 1e9) == 4 * BLOCK
    big, small = llm.generate(
        [random_tokens(6 * BLOCK, seed=71), random_tokens(BLOCK, seed=72)], SamplingParams(max_tokens=8)
    )
    assert big.error is None
    assert small.error is None
    assert len(manager.pins) == 0
    assert_balanced(llm)


def test_a_refused_request_is_a_request_error_and_costs_nothing():
    llm = engine(pair("llama")[0], num_blocks=4)
    with pytest.raises(RequestError, match="blocks of 16 tokens, the pool has 4"):
        llm.generate([[5] * 60], SamplingParams(max_tokens=10))
    assert_balanced(llm)


def test_an_interruption_inside_a_step_ends_what_runs_and_the_engine_goes_on():
    model = pair("llama")[0]
    llm = engine(model)
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)

    def interrupt(layer, k, v):
        raise KeyboardInterrupt

    llm.core.runner.observer = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9, 9, 9]], SamplingParams(max_tokens=5))
    llm.core.runner.observer = None
    with pytest.raises(EngineError, match="broke off"):
        list(stream)
    assert llm.generate([[9, 9, 9]], SamplingParams(max_tokens=5))[0].error is None
