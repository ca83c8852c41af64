"""Requests and prefixes that move to another engine: the same tokens, and nothing left behind."""

import os
import stat
from dataclasses import replace

import pytest

from kvq.engine import SamplingParams, StructuredOutput
from kvq.errors import ConfigError, RequestError
from kvq.models import load
from tests.engine.kit import engine, mixed_prompts, pair, submit, tokens_of
from tests.engine.test_staged import STAGED
from tests.handover.kit import Pair, num_files
from tests.helpers_hybrids import hybrid
from tests.helpers_models import random_tokens
from tests.kernels.kit import CHANNELS, KINDS, MEANS, recipe_of, static_scales

NEW = 30
PARAMS = [
    SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=NEW, temperature=1.0, seed=5, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=NEW, temperature=0.8, seed=6, top_p=0.9, min_tokens=9),
]


@pytest.mark.daily(12)
@pytest.mark.parametrize("kv", [*KINDS, *MEANS, *CHANNELS, *STAGED])
def test_tokens_are_those_of_one_process_in_every_format(kv):
    model = pair("llama")[0]
    if "per_head" in kv:
        scales = replace(static_scales(model.geometry.kv_heads), model_digest=model.prepared.digest)
        kv = recipe_of(kv, model.geometry.head_dims).with_scales(scales)
    check_same(model, kv)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("kv", ["bf16", "int4+sinks=4+recent=5"])
def test_windows_and_latents_move_too(family, kv):
    check_same(pair(family)[0], kv)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_recurrent_states_move_too(family):
    check_same(hybrid(family)[0], "auto")


def check_same(model, kv):
    """Requests that move after some tokens, in their prompts and before them give what they give alone."""
    prompts = [random_tokens(n, seed=n) for n in (50, 37, 150)]
    with engine(model, kv, max_num_batched_tokens=64) as alone:
        whole = alone.generate(prompts, PARAMS)
    both = Pair(model, kv, max_num_batched_tokens=64)
    found = [submit(both.a, *each)[1] for each in zip(prompts, PARAMS, strict=True)]
    both.steps(6)
    moved = [len(one.pieces) for one in found]
    assert 0 < moved[0] < NEW
    both.drain()
    got = [one.output for one in found]
    assert tokens_of(got) == tokens_of(whole)
    assert [one.outputs[0].text for one in got] == [one.outputs[0].text for one in whole]
    entries = [[entry.logprob for entry in one.outputs[0].logprobs] for one in (got[0], whole[0])]
    assert entries[0] == pytest.approx(entries[1], abs=1e-4)
    assert both.b.core.scheduler.counters.added == 3
    assert got[0].receipt.recomputed_tokens == 0
    both.check()
    both.close()


def test_the_blocks_of_a_running_request_arrive_bit_for_bit():
    """Nothing is computed again: the receiver's first step is a decode."""
    both = Pair(pair("llama")[0], "int4_mean")
    _, found = submit(both.a, random_tokens(100, seed=1), PARAMS[0])
    both.steps(5)
    prefilled = []
    both.b.on_step(lambda stats: prefilled.append(stats.prefill_tokens))
    both.drain()
    assert sum(prefilled) == 0
    assert len(found.output.outputs[0].token_ids) == NEW
    both.check()
    both.close()


def test_a_waiting_and_a_preempted_request_move():
    model = pair("llama")[0]
    prompts = mixed_prompts(6, seed=3)
    with engine(model) as alone:
        whole = alone.generate(prompts, PARAMS[0])
    both = Pair(model, there={"max_num_seqs": 3}, max_num_seqs=2)
    jobs, found = zip(*(submit(both.a, prompt, PARAMS[0]) for prompt in prompts), strict=True)
    both.steps(4)
    running = next(job for job in jobs if job in both.a.core.scheduler.running.requests)
    both.a.core.scheduler.preempt(running, 0.0)
    both.drain()
    assert tokens_of([one.output for one in found]) == tokens_of(whole)
    both.check()
    both.close()


def test_a_full_receiver_computes_the_tokens_itself():
    model, prompt = pair("llama")[0], random_tokens(100, seed=1)
    both = Pair(model, there={"num_blocks": 9, "max_context": 140}, max_context=140)
    _, other = submit(both.b, random_tokens(70, seed=2), PARAMS[0])
    both.steps(3)
    _, found = submit(both.a, prompt, PARAMS[0])
    both.steps(3)
    both.drain()
    both.until(lambda: not both.b.core.has_work)
    with engine(model) as alone:
        assert tokens_of([found.output]) == tokens_of(alone.generate([prompt], PARAMS[0]))
    assert other.output.error is None
    both.check()
    both.close()


def test_requests_that_wait_with_their_blocks_give_them_up_to_one_that_runs():
    model = pair("llama")[0]
    both = Pair(model, there={"num_blocks": 12, "max_num_seqs": 1, "max_context": 160}, max_context=160)
    _, other = submit(both.b, random_tokens(60, seed=2), SamplingParams(max_tokens=90, ignore_eos=True))
    both.steps(3)
    _, found = submit(both.a, random_tokens(100, seed=1), PARAMS[0])
    both.steps(3)
    both.drain()
    both.until(lambda: not both.b.core.has_work)
    assert [len(one.output.outputs[0].token_ids) for one in (other, found)] == [90, NEW]
    both.check()
    both.close()


def test_a_request_with_more_results_stays_and_ends_here():
    both = Pair(pair("llama")[0])
    _, many = submit(both.a, random_tokens(20, seed=1), SamplingParams(max_tokens=9, n=2))
    _, beams = submit(both.a, random_tokens(20, seed=2), SamplingParams(max_tokens=9, beam_width=2))
    both.steps(2)
    both.drain()
    assert [many.output.error, beams.output.error] == [None, None]
    assert both.b.core.scheduler.counters.added == 0
    both.check()
    both.close()


def test_what_the_other_engine_can_never_hold_stays():
    both = Pair(pair("llama")[0], there={"num_blocks": 4, "max_context": 64})
    _, found = submit(both.a, random_tokens(100, seed=1), PARAMS[0])
    both.steps(3)
    both.drain()
    assert len(found.output.outputs[0].token_ids) == NEW
    assert found.output.error is None
    both.check()
    both.close()


def test_stop_strings_and_grammars_go_on_where_they_were():
    model = load("tiny", "int4")
    stop = SamplingParams(max_tokens=40, stop=[" the"], temperature=1.0, seed=2)
    grammar = SamplingParams(max_tokens=40, structured=StructuredOutput(regex="[a-z ]{30}"))
    with engine(model, num_blocks=64) as alone:
        whole = alone.generate(["Once upon a time", "In the"], [stop, grammar])
    both = Pair(model, num_blocks=64)
    found = [submit(both.a, "Once upon a time", stop)[1], submit(both.a, "In the", grammar)[1]]
    both.until(lambda: len(found[1].pieces) > 3)
    both.drain()
    assert [one.output.outputs[0].text for one in found] == [one.outputs[0].text for one in whole]
    assert [one.output.outputs[0].finish_reason for one in found] == ["stop", "stop"]
    both.check()
    both.close()


def test_exact_engines_give_the_receipts_of_one_process():
    model = load("tiny", "int4", block_size=16, exact=True)
    params = SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True, temperature=1.0, seed=3)
    prompt = random_tokens(50, seed=1)
    with engine(model, num_blocks=64) as alone:
        whole = alone.generate([prompt], params)[0]
    both = Pair(model, num_blocks=64)
    _, found = submit(both.a, prompt, params)
    both.steps(6)
    both.drain()
    assert found.output.receipt.exact == whole.receipt.exact
    both.check()
    both.close()


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4_mean", "int4+sinks=4+recent=5"])
def test_a_prefix_is_found_by_the_other_engine(kv):
    model, prompt = pair("llama")[0], random_tokens(200, seed=1)
    both = Pair(model, kv)
    whole = both.a.generate([prompt], PARAMS[0])
    again = both.a.generate([prompt], PARAMS[0])[0].receipt.cached_tokens
    sent = both.a.hand_over.send_prefix(prompt, tenant="")
    both.until(sent.done)
    there = both.b.generate([prompt], PARAMS[0])
    assert there[0].receipt.cached_tokens >= again - model.layout.block_size > 0
    assert tokens_of(there) == tokens_of(whole)
    twice = both.a.hand_over.send_prefix(prompt)
    both.until(twice.done)
    assert twice.result() == sent.result()
    other = both.a.hand_over.send_prefix(prompt, tenant="other")
    both.until(other.done)
    with pytest.raises(RequestError, match="no whole block of this prompt is cached"):
        other.result()
    both.check()
    both.close()


def test_prefixes_of_recurrent_states_move():
    model, prompt = hybrid("qwen3_next")[0], random_tokens(80, seed=1)
    both = Pair(model)
    whole = both.a.generate([prompt], PARAMS[0])
    sent = both.a.hand_over.send_prefix(prompt)
    both.until(sent.done)
    there = both.b.generate([prompt], PARAMS[0])
    assert there[0].receipt.cached_tokens == sent.result() > 0
    assert tokens_of(there) == tokens_of(whole)
    both.check()
    both.close()


def test_requests_leave_once_their_prompt_is_computed():
    both = Pair(pair("llama")[0], hand_over_prefilled=True, max_num_batched_tokens=32)
    _, found = submit(both.a, random_tokens(100, seed=1), PARAMS[0])
    both.until(lambda: not both.a.core.has_work)
    assert len(found.output.outputs[0].token_ids) == NEW
    assert both.b.core.scheduler.counters.added == 1
    assert both.b.core.scheduler.counters.prompt_tokens == 0
    both.check()
    both.close()


def test_a_request_that_is_cancelled_ends_in_both_engines():
    both = Pair(pair("llama")[0])
    job, found = submit(both.a, random_tokens(50, seed=1), SamplingParams(max_tokens=190, ignore_eos=True))
    both.steps(3)
    both.a.hand_over.move_requests()
    both.until(lambda: both.b.core.has_work and len(found.pieces) > 10)
    assert both.b.core.has_work
    both.a.core.cancel(job)
    assert found.output.outputs[0].finish_reason == "cancelled"
    both.until(lambda: not both.b.core.has_work)
    both.check()
    both.close()


def test_a_request_goes_on_here_if_the_other_engine_ends():
    model, prompt = pair("llama")[0], random_tokens(50, seed=1)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    with engine(model) as alone:
        whole = alone.generate([prompt], params)
    both = Pair(model)
    _, found = submit(both.a, prompt, params)
    both.steps(3)
    both.a.hand_over.move_requests()
    both.until(lambda: both.b.core.has_work and len(found.pieces) > 10)
    assert both.b.core.has_work
    both.b.close()
    while both.a.core.has_work:
        both.a.step()
    assert tokens_of([found.output]) == tokens_of(whole)


def test_closing_the_sender_ends_its_requests():
    both = Pair(pair("llama")[0])
    _, found = submit(both.a, random_tokens(50, seed=1), SamplingParams(max_tokens=190, ignore_eos=True))
    both.steps(3)
    both.a.hand_over.move_requests()
    both.until(lambda: both.b.core.has_work and len(found.pieces) > 10)
    both.a.close()
    assert found.output.outputs[0].finish_reason == "cancelled"
    while both.b.core.has_work:
        both.b.step()


def test_files_are_closed(tmp_path):
    before = num_files()
    both = Pair(pair("llama")[0], hand_over_listen=f"unix:{tmp_path}/socket")
    assert both.b.hand_over.address == f"unix:{tmp_path}/socket"
    assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o600
    for seed in range(3):
        submit(both.a, random_tokens(50, seed=seed), PARAMS[0])
    both.steps(2)
    both.drain()
    both.check()
    both.close()
    assert num_files() <= before


def test_an_engine_without_an_address_says_so():
    llm = engine(pair("llama")[0])
    with pytest.raises(ConfigError, match="hand_over_to or hand_over_listen"):
        _ = llm.hand_over
    listener = engine(pair("llama")[0], hand_over_listen="0")
    with pytest.raises(ConfigError, match="hand_over_to"):
        listener.hand_over.send_prefix([1, 2, 3])
    with pytest.raises(ConfigError, match="can't listen"):
        engine(pair("llama")[0], hand_over_listen=listener.hand_over.address)
