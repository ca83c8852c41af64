"""What a request asks for is what it gets: stops, lengths, log-probabilities, penalties, several results."""

import math
import random
from array import array
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from kvq.engine import LLM, Priority, SamplingParams
from kvq.engine.params import as_params, param, real
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, EngineError, KVQError, RequestError
from tests.engine.kit import (
    BLOCK,
    EOS,
    assert_balanced,
    drive,
    engine,
    mixed_prompts,
    pair,
    preempt,
    reference_logprobs,
    reference_tokens,
    submit,
    text_of,
    tokens_of,
)
from tests.helpers_models import VOCAB, eager_logits, random_tokens

PROMPT = random_tokens(23, seed=5)


@pytest.fixture(scope="module")
def model():
    return pair("llama")[0]


@pytest.fixture(scope="module")
def reference():
    return pair("llama")[1]


@pytest.fixture(scope="module")
def llm(model):
    return engine(model)


@pytest.fixture(scope="module")
def tiny_llm(tiny):
    with LLM(tiny, num_blocks=128, max_num_seqs=16) as llm:
        yield llm


def run(llm, prompt=PROMPT, **options):
    """One request's output; it must not fail."""
    [output] = llm.generate([prompt], SamplingParams(**options))
    assert output.error is None, output.error
    return output


def only(llm, prompt=PROMPT, **options):
    """Its only result."""
    [result] = run(llm, prompt, **options).outputs
    return result


# When a result ends


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(llm):
    free = only(llm, max_tokens=20)
    stop = free.text[7:10]  # three tokens of one character each
    at = free.text.index(stop)
    ended = only(llm, max_tokens=20, stop=["不在", stop])
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (free.text[:at], "stop", stop)
    assert ended.token_ids == free.token_ids[: at + 3]
    shown = only(llm, max_tokens=20, stop=stop, include_stop=True)
    assert shown.text == free.text[: at + 3]


def test_a_stop_string_that_ends_inside_a_token_cuts_the_text_there(tiny_llm):
    free = only(tiny_llm, "Once upon a time", max_tokens=30, ignore_eos=True)
    stop = free.text[21:27]
    assert len(tiny_llm.model.tokenizer(stop)["input_ids"]) > 1
    ended = only(tiny_llm, "Once upon a time", max_tokens=30, ignore_eos=True, stop=stop)
    assert ended.text == free.text[: free.text.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_result_and_is_named(llm):
    free = only(llm, max_tokens=20)
    token = free.token_ids[6]
    at = free.token_ids.index(token)
    ended = only(llm, max_tokens=20, stop_token_ids=[token])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    assert ended.token_ids == free.token_ids[: at + 1]
    assert ended.text == text_of(free.token_ids[:at])


def ending_prompt(llm) -> list[int]:
    """A prompt whose greedy result ends by the end token, after a few others."""
    prompts = [random_tokens(9, seed=seed) for seed in range(60)]
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=30)), strict=True):
        if output.outputs[0].finish_reason == "stop" and len(output.outputs[0].token_ids) > 2:
            return prompt
    raise AssertionError("no prompt ends by itself")


def test_the_end_token_ends_a_result_unless_it_is_ignored_or_comes_too_early(llm):
    prompt = ending_prompt(llm)
    free = only(llm, prompt, max_tokens=40)
    assert free.token_ids[-1] == EOS
    assert (free.finish_reason, free.stop_reason) == ("stop", None)
    assert free.text == text_of(free.token_ids)
    count = len(free.token_ids)
    ignoring = only(llm, prompt, max_tokens=40, ignore_eos=True)
    assert ignoring.token_ids[:count] == free.token_ids
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (40, "length")
    later = only(llm, prompt, max_tokens=40, min_tokens=count + 3)
    assert later.token_ids[: count - 1] == free.token_ids[:-1]
    assert EOS not in later.token_ids[: count + 3]
    assert len(later.token_ids) >= count + 3


def test_a_stop_string_within_min_tokens_ends_nothing(llm):
    free = only(llm, max_tokens=20)
    stop = free.text[3]
    assert only(llm, max_tokens=20, stop=stop).text == free.text[: free.text.index(stop)]
    assert only(llm, max_tokens=20, stop=stop, min_tokens=19).token_ids[:19] == free.token_ids[:19]


def test_without_max_tokens_a_result_goes_on_to_the_end_of_the_context(model):
    llm = engine(model, max_context=90)
    found = only(llm, max_tokens=None, ignore_eos=True)
    assert (len(found.token_ids), found.finish_reason) == (90 - len(PROMPT), "length")
    assert_balanced(llm)


# What comes with the text


def test_echo_puts_the_prompt_before_the_text_in_results_and_in_streams(llm):
    plain, echoed = only(llm, max_tokens=8), run(llm, max_tokens=8, echo=True)
    assert echoed.outputs[0].text == text_of(PROMPT) + plain.text
    assert echoed.prompt == text_of(PROMPT)
    pieces = list(llm.stream(PROMPT, SamplingParams(max_tokens=8, echo=True)))
    assert "".join(piece.text for piece in pieces) == echoed.outputs[0].text


def test_a_prompt_as_text_and_as_token_ids_gives_the_same_result(llm):
    by_text, by_ids = run(llm, text_of(PROMPT), max_tokens=8), run(llm, PROMPT, max_tokens=8)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == PROMPT
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert (by_text.prompt, by_ids.prompt) == (text_of(PROMPT), None)


@pytest.mark.parametrize("chunk", [16, 2048])
def test_logprobs_are_those_of_a_plain_forward_pass_in_any_chunks(model, reference, chunk):
    llm = engine(model, max_num_batched_tokens=chunk)
    prompt = random_tokens(70, seed=8)
    others = [submit(llm, random_tokens(9, seed=i), SamplingParams(max_tokens=20)) for i in range(4)]
    _, collector = submit(llm, prompt, SamplingParams(max_tokens=10, logprobs=5, prompt_logprobs=3))
    drive(llm, others)
    output = collector.output
    found = output.outputs[0]
    ids = prompt + found.token_ids
    truth = reference_logprobs(reference, ids)
    entries = [*output.prompt_logprobs, *found.logprobs]
    assert entries[0] is None
    assert len(entries) == len(ids)
    for i, entry in enumerate(entries[1:], 1):
        row = truth[i - 1]
        assert entry.token == ids[i]
        assert entry.logprob == pytest.approx(float(row[ids[i]]), abs=2e-4)
        tops = row.topk(len(entry.top))
        assert [value for _, value in entry.top] == pytest.approx(tops.values.tolist(), abs=2e-4)
        assert entry.rank >= 1
        assert sum(math.exp(value) for _, value in entry.top) <= 1 + 1e-9
    assert len(output.prompt_logprobs[1].top) == 3
    assert len(found.logprobs[0].top) == 5
    assert found.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in found.logprobs))
    assert_balanced(llm)


def test_all_logprobs_of_a_token_add_up_to_one(tiny_llm):
    found = only(tiny_llm, "A", max_tokens=3, logprobs=64, temperature=1.0, logit_bias={5: 50.0})
    for entry in found.logprobs:
        total = sum(math.exp(value) for _, value in entry.top)
        assert 0 < total <= 1 + 1e-9
        assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prefill(model, reference):
    llm = engine(model, max_num_batched_tokens=16)
    prompt = random_tokens(75, seed=9)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    for steps in (1, 3, 5):
        job, collector = submit(llm, prompt, params)
        for _ in range(steps):
            llm.step()
        llm.core.scheduler.preempt(job, 0.0)
        drive(llm, [job])
        truth = reference_logprobs(reference, prompt)
        found = [entry.logprob for entry in collector.output.prompt_logprobs[1:]]
        wanted = [float(truth[i, token]) for i, token in enumerate(prompt[1:])]
        assert found == pytest.approx(wanted, abs=2e-4)


def test_a_cached_prompt_still_gets_all_its_prompt_logprobs(llm):
    first = run(llm, max_tokens=2, prompt_logprobs=1)
    second = run(llm, max_tokens=2, prompt_logprobs=1)
    assert [e and e.token for e in second.prompt_logprobs] == [None, *PROMPT[1:]]
    assert second.receipt.cached_tokens == 0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("chunk", [16, 2048])
@pytest.mark.parametrize("start", [1, 2, 33, 49, 69])
def test_prompt_logprobs_from_a_start_are_those_of_the_whole_prompt(model, reference, chunk, start):
    llm = engine(model, max_num_batched_tokens=chunk)
    prompt = random_tokens(70, seed=8)
    truth = reference_logprobs(reference, prompt)
    wanted = [float(truth[i - 1, prompt[i]]) for i in range(start, 70)]
    for cached in (0, max(0, start - 1) // 16 * 16):
        found = run(llm, prompt, max_tokens=2, prompt_logprobs=0, prompt_logprobs_start=start)
        assert found.prompt_logprobs[:start] == [None] * start
        assert [entry.token for entry in found.prompt_logprobs[start:]] == prompt[start:]
        assert [entry.logprob for entry in found.prompt_logprobs[start:]] == pytest.approx(wanted, abs=2e-4)
        assert cached <= found.receipt.cached_tokens < max(1, start)
    assert_balanced(llm)


def test_continuations_of_one_context_compute_it_once(model, reference):
    llm = engine(model)
    context = random_tokens(100, seed=3)
    ends = [random_tokens(1 + i % 7, seed=i) for i in range(20)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=100)
    outputs = llm.generate([context + end for end in ends], params)
    for end, output in zip(ends, outputs, strict=True):
        truth = reference_logprobs(reference, context + end)
        wanted = [float(truth[99 + i, token]) for i, token in enumerate(end)]
        assert [e.logprob for e in output.prompt_logprobs[100:]] == pytest.approx(wanted, abs=2e-4)
    assert sum(output.receipt.cached_tokens >= 96 for output in outputs) == 19
    assert_balanced(llm)


def test_a_start_of_prompt_logprobs_survives_a_preemption(model, reference):
    llm = engine(model, max_num_batched_tokens=16)
    prompt = random_tokens(75, seed=9)
    truth = reference_logprobs(reference, prompt)
    wanted = [float(truth[i - 1, prompt[i]]) for i in range(40, 75)]
    for steps in (1, 3, 4):
        params = SamplingParams(max_tokens=4, prompt_logprobs=0, prompt_logprobs_start=40)
        job, collector = submit(llm, prompt, params)
        for _ in range(steps):
            llm.step()
        if not job.live[0].is_done:
            llm.core.scheduler.preempt(job, 0.0)
        drive(llm, [job])
        found = [entry.logprob for entry in collector.output.prompt_logprobs[40:]]
        assert found == pytest.approx(wanted, abs=2e-4)


def test_the_pieces_of_a_stream_join_to_the_result(tiny_llm):
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, n=3, logprobs=1, stop=["the", "."])
    pieces = list(tiny_llm.stream("Once upon a time there was", params))
    output = pieces[-1].output
    assert [piece.output for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    for result in output.outputs:
        mine = [piece for piece in pieces[:-1] if piece.index == result.index]
        assert "".join(piece.text for piece in mine) == result.text
        assert [t for piece in mine for t in piece.token_ids] == result.token_ids
        assert [e for piece in mine for e in piece.logprobs] == result.logprobs
        reasons = [(piece.finish_reason, piece.stop_reason) for piece in mine]
        assert reasons[:-1] == [(None, None)] * (len(mine) - 1)
        assert reasons[-1] == (result.finish_reason, result.stop_reason)


def test_leaving_a_stream_early_cancels_its_request(model):
    llm = engine(model)
    for piece in llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True)):
        if len(piece.text) > 0:
            break
    assert_balanced(llm)


# How tokens are chosen


def penalized(logits, prompt, generated, *, repetition, presence, frequency):
    """Penalties as they are documented, in plain words."""
    scores = logits.double().clone()
    for token in set(prompt) | set(generated):
        value = scores[token]
        scores[token] = value / repetition if value > 0 else value * repetition
    for token in set(generated):
        scores[token] -= presence + frequency * generated.count(token)
    return scores


STRENGTHS = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.8}


def check_penalties(reference, prompt, tokens):
    for i, token in enumerate(tokens):
        scores = penalized(
            eager_logits(reference, prompt + tokens[:i])[-1],
            prompt,
            tokens[:i],
            repetition=1.3,
            presence=0.6,
            frequency=0.8,
        )
        best = scores.topk(2).values
        assert token == int(scores.argmax()) or float(best[0] - best[1]) < 1e-4, f"token {i}"


def test_penalties_count_the_prompt_and_every_generated_token(llm, reference):
    found = only(llm, max_tokens=30, ignore_eos=True, **STRENGTHS)
    check_penalties(reference, PROMPT, found.token_ids)
    assert found.token_ids != only(llm, max_tokens=30, ignore_eos=True).token_ids


@pytest.mark.parametrize("to_host", [True, False])
def test_penalties_count_right_after_moves_between_rows(model, reference, to_host):
    llm = engine(model, max_num_seqs=3, kv_host="4MiB")
    params = SamplingParams(max_tokens=40, ignore_eos=True, **STRENGTHS)
    prompts = mixed_prompts(3, seed=21, longest=20)
    jobs = [submit(llm, prompt, params) for prompt in prompts]
    rng, scheduler = random.Random(1), llm.core.scheduler
    for now in range(300):
        if not llm.core.has_work:
            break
        llm.step()
        settled = [r for r in scheduler.running.requests if r.branches[0] in scheduler.running.active]
        if now % 3 == 1:
            for request in rng.sample(settled, min(len(settled), 2)):
                preempt(llm, request, float(now), to_host=to_host)
    for prompt, (_, collector) in zip(prompts, jobs, strict=True):
        check_penalties(reference, prompt, collector.output.outputs[0].token_ids)
    assert_balanced(llm)


def test_penalties_count_right_when_a_request_comes_back_to_a_row_it_left(model, reference):
    llm = engine(model, max_num_seqs=2)
    scheduler = llm.core.scheduler
    params = SamplingParams(max_tokens=40, ignore_eos=True, **STRENGTHS)
    job, collector = submit(llm, PROMPT, params, priority=Priority.BATCH)
    rows = [_row_after_steps(llm, job, 4)]
    other, _ = submit(llm, [3, 4], SamplingParams(max_tokens=100, ignore_eos=True))
    llm.step()
    scheduler.preempt(job, 0.0)
    llm.core.cancel(other)
    rows.append(_row_after_steps(llm, job, 12))
    scheduler.preempt(job, llm.core._clock())
    submit(llm, [3, 4], SamplingParams(max_tokens=100, ignore_eos=True))
    rows.append(_row_after_steps(llm, job, 4))
    assert rows == [0, 1, 0], "it came back to the row it had first"
    drive(llm, [job])
    check_penalties(reference, PROMPT, collector.output.outputs[0].token_ids)


def _row_after_steps(llm, job, steps):
    for _ in range(steps):
        llm.step()
    return job.branches[0].row


def test_logit_bias_decides_what_may_come(llm):
    assert set(only(llm, max_tokens=6, logit_bias={77: 100.0}).token_ids) == {77}
    free = only(llm, max_tokens=1).token_ids[0]
    assert free not in only(llm, max_tokens=1, logit_bias={free: -100.0}).token_ids


def test_top_k_of_one_and_a_narrow_nucleus_are_greedy(llm):
    greedy = only(llm, max_tokens=10).token_ids
    assert only(llm, max_tokens=10, temperature=1.5, top_k=1).token_ids == greedy
    assert only(llm, max_tokens=10, temperature=1.0, top_p=1e-6).token_ids == greedy
    assert only(llm, max_tokens=10, temperature=1.0, min_p=1.0).token_ids == greedy


# Several results


def test_four_results_of_one_prompt_take_a_third_of_the_blocks_of_four_requests(model):
    prompt = random_tokens(150, seed=12)
    params = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    together = run(engine(model), prompt, n=4, seed=1, **params)
    llm = engine(model, prefix_caching=False)
    apart = [run(llm, prompt, seed=i, **params).receipt.blocks for i in range(4)]
    assert len({tuple(result.token_ids) for result in together.outputs}) == 4
    assert 3 * together.receipt.blocks <= sum(apart)
    assert together.receipt.shared_blocks >= 3 * (150 // BLOCK)
    assert together.receipt.generated_tokens == 32


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("length", [1, 16, 33])
def test_each_of_several_results_follows_from_its_own_tokens(model, reference, length, preempt):
    """Copy-on-write: a block that another result wrote to would show in the log-probabilities."""
    llm = engine(model, max_num_batched_tokens=17)
    prompt = random_tokens(length, seed=length)
    params = SamplingParams(n=5, temperature=1.2, seed=4, max_tokens=30, logprobs=0)
    job, collector = submit(llm, prompt, params)
    submit(llm, prompt, params)  # beside it
    for step in range(400):
        if not llm.core.has_work:
            break
        llm.step()
        if preempt and step in (4, 9, 30) and job in llm.core.scheduler.running.requests:
            llm.core.scheduler.preempt(job, 0.0)
    output = collector.output
    assert len(output.outputs) == 5
    for result in output.outputs:
        truth = reference_logprobs(reference, prompt + result.token_ids)
        wanted = [float(truth[length - 1 + i, token]) for i, token in enumerate(result.token_ids)]
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(wanted, abs=5e-4)
    assert (output.receipt.preemptions > 0) == preempt
    assert_balanced(llm)


def test_preempted_results_of_one_prompt_draw_the_same_tokens(model):
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=25)
    wanted = [
        result.token_ids for result in run(engine(model), n=4, temperature=1.0, seed=9, max_tokens=25).outputs
    ]
    llm = engine(model)
    job, collector = submit(llm, PROMPT, params)
    for _ in range(12):
        llm.step()
    llm.core.scheduler.preempt(job, 0.0)
    drive(llm, [job])
    assert [result.token_ids for result in collector.output.outputs] == wanted
    assert collector.output.receipt.recomputed_tokens > 0


def test_best_of_returns_the_likeliest_in_order(model):
    options = {"temperature": 1.0, "seed": 6, "max_tokens": 12, "ignore_eos": True}
    llm = engine(model)
    everything = run(llm, n=6, logprobs=0, **options).outputs
    best = run(llm, n=2, best_of=6, **options).outputs
    ranked = sorted(everything, key=lambda r: -r.cumulative_logprob / len(r.token_ids))
    assert [r.token_ids for r in best] == [r.token_ids for r in ranked[:2]]
    assert [r.index for r in best] == [0, 1]
    pieces = list(llm.stream(PROMPT, SamplingParams(n=2, best_of=6, **options)))
    assert [piece.token_ids for piece in pieces[:-1]] == [r.token_ids for r in best]


# Beam search


def reference_beams(reference, prompt, width, *, end=EOS, **options):
    """The beams of transformers' own `generate`, without what pads them behind the end token."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            **options,
        )
    beams = [row[len(prompt) :].tolist() for row in found]
    return [beam[: beam.index(end) + 1] if end in beam else beam for beam in beams]


def beams_of(output):
    assert output.error is None, output.error
    return [result.token_ids for result in output.outputs]


@pytest.fixture(scope="module")
def beam_cases(reference):
    prompts = mixed_prompts(20, seed=31, longest=60)
    return prompts, [reference_beams(reference, p, 3, max_new_tokens=10) for p in prompts]


BEAMS = SamplingParams(beam_width=3, n=3, max_tokens=10)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 9}])
def test_beam_search_returns_the_beams_of_generate_beside_other_requests(model, beam_cases, options):
    prompts, wanted = beam_cases
    llm = engine(model, **options)
    others = [submit(llm, p, SamplingParams(max_tokens=30, temperature=1.0)) for p in prompts[:5]]
    assert [beams_of(output) for output in llm.generate(prompts, BEAMS)] == wanted
    drive(llm, others)
    assert_balanced(llm)


def test_beam_search_returns_the_beams_of_generate_however_often_it_is_preempted(model, beam_cases):
    prompts, wanted = beam_cases
    llm = engine(model, max_num_batched_tokens=16)
    collectors = [submit(llm, prompt, BEAMS)[1] for prompt in prompts]
    rng, scheduler = random.Random(5), llm.core.scheduler
    for now in range(3000):
        if not llm.core.has_work:
            break
        llm.step()
        if now < 120 and now % 2 and scheduler.running.requests:
            scheduler.preempt(rng.choice(list(scheduler.running.requests)), float(now))
    assert [beams_of(collector.output) for collector in collectors] == wanted
    assert scheduler.counters.preemptions > 30
    assert_balanced(llm)


def test_beams_name_the_stop_token_that_ended_them_and_the_receipt_counts_their_tokens(llm):
    free = run(llm, beam_width=3, n=3, max_tokens=10, ignore_eos=True)
    assert free.receipt.generated_tokens == sum(len(beam) for beam in beams_of(free)) == 30
    token = free.outputs[0].token_ids[4]
    output = run(llm, beam_width=3, n=3, max_tokens=10, ignore_eos=True, stop_token_ids=[token])
    ended = [beam for beam in output.outputs if beam.finish_reason == "stop"]
    assert ended
    for beam in output.outputs:
        assert (beam.token_ids[-1] == token) == (beam in ended)
        assert beam.stop_reason == (token if beam in ended else None)
        assert token not in beam.token_ids[:-1]
        assert beam.text == text_of([t for t in beam.token_ids if t != token])


def test_beam_search_of_the_embedded_model_returns_the_beams_of_generate(tiny):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        tiny.prepared.folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    llm = LLM(tiny.with_kv("fp32"), num_blocks=128, max_num_seqs=16)
    params = SamplingParams(beam_width=4, n=4, max_tokens=12)
    for text in ("Once upon a time", "The king of", "In 1914 the"):
        ids = tiny.tokenizer(text)["input_ids"]
        wanted = reference_beams(reference, ids, 4, end=0, max_new_tokens=12)
        [output] = llm.generate(text, params)
        assert beams_of(output) == wanted


# What is refused


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"n": 0}, "n must be a whole number of 1 to 128"),
        ({"n": 2.0}, "n must be a whole number"),
        ({"n": 3, "best_of": 2}, "best_of must be a whole number of 3"),
        ({"n": 3, "beam_width": 2}, "beam_width must be a whole number of 3"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 65}, "min_tokens must be a whole number of 0 to 64"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p must be a number above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": 0}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": -101}, "frequency_penalty"),
        ({"logprobs": 65}, "logprobs must be a whole number of 0 to 64"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs_start": -1}, "prompt_logprobs_start"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": True}, "seed"),
        ({"stop": [""]}, "stop must be strings of 1 to 1024"),
        ({"stop": ["a"] * 65}, "at most 64 stop strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {3: 101}}, "logit_bias maps token ids to numbers of -100 to 100"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"beam_width": 2, "temperature": 1.0}, "temperature can't be combined with beam_width=2"),
        ({"beam_width": 2, "stop": ["x"]}, "stop can't be combined with beam_width=2"),
    ],
)
def test_parameters_out_of_range_are_refused_with_what_is_allowed(options, names):
    with pytest.raises(RequestError, match=names):
        SamplingParams(**options)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OneMore(SamplingParams):
    top_a: float = param(0.0, real(0, 1), with_beams=False)


def test_a_new_parameter_is_one_field_that_brings_its_bound_and_whether_beams_have_it():
    assert _OneMore(top_a=0.5).top_a == 0.5
    with pytest.raises(RequestError, match=r"top_a must be a number of 0 to 1, got 1\.5"):
        _OneMore(top_a=1.5)
    with pytest.raises(RequestError, match="top_a can't be combined with beam_width=2"):
        _OneMore(top_a=0.5, beam_width=2)


def test_the_defaults_are_what_the_bounds_allow():
    plain = SamplingParams()
    for one in fields(plain):
        if one.default is not None:
            one.metadata["check"](plain, one.name)


def test_an_unknown_sampling_option_names_the_nearest():
    with pytest.raises(RequestError, match=r"unknown sampling option 'max_token'; did you mean 'max_tokens'"):
        as_params({"max_token": 3})


@pytest.mark.parametrize(
    ("prompt", "options", "names"),
    [
        ([], {}, "the prompt is empty"),
        ("", {}, "the prompt is empty"),
        ([VOCAB], {}, f"outside the vocabulary of 0 to {VOCAB - 1}"),
        ([-1], {}, "token"),
        ([1.5], {}, "token"),
        ("a\ud800", {}, "not valid Unicode at character 1"),
        ("a" * 100_000, {}, "has 100000 characters, which are more than the model's 256 tokens"),
        (PROMPT, {"max_tokens": 5000}, "more than the context of 256"),
        (PROMPT, {"n": 17}, "at most 16"),
        (PROMPT, {"stop_token_ids": [VOCAB]}, f"0 to {VOCAB - 1}"),
        (PROMPT, {"logit_bias": {VOCAB: 1.0}}, f"0 to {VOCAB - 1}"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(llm, prompt, options, names):
    with pytest.raises(KVQError, match=names):
        llm.generate([PROMPT, prompt], [SamplingParams(), SamplingParams(**options)])
    with pytest.raises(KVQError, match=names):
        llm.stream(prompt, SamplingParams(**options))
    assert_balanced(llm)


def test_wrong_numbers_of_parameters_and_unknown_priorities_are_refused(llm):
    with pytest.raises(RequestError, match="2 prompts need one SamplingParams, or 2, got 3"):
        llm.generate([PROMPT, PROMPT], [SamplingParams()] * 3)
    with pytest.raises(RequestError, match="priority must be one of interactive, batch, got 'urgent'"):
        llm.generate([PROMPT], priority="urgent")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_num_seq": 3}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of 1"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens"),
        ({"num_blocks": 4, "kv_memory": "1GiB"}, "give one of them"),
        ({"kv_memory": "much"}, "kv_memory must be a size such as '2GiB'"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"reserve_fraction": 1.0}, "reserve_fraction"),
        ({"step_deadline_s": 0}, "step_deadline_s"),
        ({"max_step_stretch": 1.0}, "max_step_stretch"),
        ({"aging_s": -1.0}, "aging_s"),
        ({"aging_s": "5"}, "aging_s must be a finite number, got '5'"),
        ({"ttft_slo_s": True}, "ttft_slo_s must be a finite number"),
        ({"itl_slo_s": float("inf")}, "itl_slo_s must be a finite number"),
        ({"max_step_stretch": float("nan")}, "max_step_stretch must be a finite number"),
        ({"async_scheduling": "no"}, "async_scheduling must be True or False, got 'no'"),
        ({"swap_memory": "1GiB"}, "unknown option 'swap_memory'; give kv_host, such as '8GiB'; "),
        ({"swap_folder": "/tmp"}, "unknown option 'swap_folder'; give kv_disk, such as '100GiB', and kv_dir"),
    ],
)
def test_engine_options_out_of_range_are_refused_with_what_is_allowed(model, options, names):
    with pytest.raises(ConfigError, match=names):
        LLM(model, **options)
    if "unknown" in names:
        with pytest.raises(ConfigError, match=names):
            LLM("tiny", **options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"stop": None}, "stop must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"logit_bias": [1]}, "logit_bias maps token ids to numbers"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"early_stopping": "never"}, "early_stopping must be True or False"),
        ({"temperature": 10**400}, "temperature must be a number of 0 to 10"),
        ({"logit_bias": {1: 10**400}}, "logit_bias maps token ids to numbers"),
        ({"seed": torch.tensor([1])}, "seed must be a whole number"),
        ({"structured": {"regex": "a"}}, "structured must be a kvq.StructuredOutput"),
    ],
)
def test_sampling_parameters_of_wrong_types_are_refused(options, names):
    with pytest.raises(RequestError, match=names):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"tenant": 5}, {"tenant": []}, {"request_id": [1]}, {"shared_salt": 7}])
def test_names_that_are_no_text_are_refused_before_anything_is_queued(model, options):
    llm = engine(model)
    with pytest.raises(RequestError, match="must be a text"):
        llm.core.intake.new_job(PROMPT, RequestOptions(**options))
    assert not llm.core.has_work


@pytest.mark.parametrize("salt", ["", "a" * 1025, 7, b"a", []])
def test_a_cache_salt_is_a_short_text(model, salt):
    llm = engine(model)
    with pytest.raises(RequestError, match="cache_salt must be a text of 1 to 1024 characters"):
        llm.generate(PROMPT, cache_salt=salt)


def test_requests_of_other_salts_share_no_prefix(model):
    llm = engine(model)

    def cached(**options):
        return llm.generate([PROMPT], SamplingParams(max_tokens=2), **options)[0].receipt.cached_tokens

    first = {"a": cached(cache_salt="a"), "b": cached(cache_salt="b"), "none": cached()}
    assert set(first.values()) == {0}
    assert cached(cache_salt="a") == cached(cache_salt="b") == cached() > 0
    pieces = list(llm.stream(PROMPT, SamplingParams(max_tokens=2), cache_salt="c"))
    assert pieces[-1].output.receipt.cached_tokens == 0


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "a"},
        {1, 2},
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        [array("B", b"abc")],
        torch.tensor(1),
        [True, True],
        [1, False],
        [1, 2.0],
        [1, "a"],
        [[1, None]],
        [{"prompt": "a"}],
        [b"abc"],
        ["a", b"abc"],
        ["a", {"prompt": "a"}],
        [iter([1, 2])],
        torch.tensor([True, False]),
        42,
        None,
    ],
)
def test_what_is_no_prompt_is_refused_in_words(model, prompt):
    llm = engine(model)
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, got"):
        llm.generate(prompt)
    if not isinstance(prompt, list) or not isinstance(prompt[0], list | str):
        with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, got"):
            llm.stream(prompt)
    assert not llm.core.has_work


def test_seeds_are_whole_numbers_of_any_library(model):
    llm = engine(model)

    def tokens(seed):
        params = SamplingParams(max_tokens=6, temperature=1.0, seed=seed)
        return llm.generate(PROMPT, params)[0].outputs[0].token_ids

    tensor = torch.tensor(2)
    assert tokens(2) == tokens(np.int64(2)) == tokens(tensor) != tokens(3)
    assert tensor.item() == 2


def test_arrays_are_prompts(model):
    llm = engine(model)
    params = SamplingParams(max_tokens=3, temperature=0)
    one, two = (llm.generate(PROMPT, params)[0].outputs[0].token_ids for _ in range(2))
    for made in (np.array, torch.tensor):
        assert [out.outputs[0].token_ids for out in llm.generate(made(PROMPT), params)] == [one]
        assert [out.outputs[0].token_ids for out in llm.generate(made([PROMPT] * 2), params)] == [one, two]
    with pytest.raises(RequestError, match="got a list with float"):
        llm.generate([torch.tensor([1.5, 2.0]).tolist()])


@pytest.mark.parametrize("params", [5, "greedy", 1.5])
def test_what_are_no_parameters_is_refused_in_words(model, params):
    llm = engine(model)
    with pytest.raises(RequestError, match=r"params must be SamplingParams|one SamplingParams"):
        llm.generate(PROMPT, params)


def test_token_ids_may_be_any_whole_numbers(model):
    llm = engine(model)
    given = [list(PROMPT), tuple(PROMPT), np.array(PROMPT), array("I", PROMPT), torch.tensor(PROMPT)]
    outputs = [llm.generate([prompt], SamplingParams(max_tokens=3))[0] for prompt in given]
    outputs += llm.generate((prompt for prompt in given), SamplingParams(max_tokens=3))
    assert len({output.outputs[0].text for output in outputs}) == 1


def test_who_listens_to_a_step_cannot_step_the_engine(model):
    llm = engine(model)
    job, collector = submit(llm, PROMPT, SamplingParams(max_tokens=4))
    other, _ = submit(llm, PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    job.listener = lambda piece: (collector(piece), llm.step())
    drive(llm, [other])
    assert "inside a step" in str(collector.output.error)
    assert_balanced(llm)


def test_a_closed_engine_refuses_requests_and_may_be_closed_again(model):
    llm = engine(model)
    _, collector = submit(llm, PROMPT, SamplingParams(max_tokens=50))
    llm.step()
    llm.close()
    llm.close()
    assert collector.output.outputs[0].finish_reason == "cancelled"
    assert_balanced(llm)
    with pytest.raises(EngineError, match="the engine was closed; make a new one"):
        llm.generate([PROMPT])


def test_prompts_in_any_form_are_understood(llm):
    wanted = tokens_of(llm.generate([PROMPT], SamplingParams(max_tokens=4)))
    for prompts in (PROMPT, text_of(PROMPT), [text_of(PROMPT)]):
        assert tokens_of(llm.generate(prompts, SamplingParams(max_tokens=4))) == wanted
    assert llm.generate([]) == []


def test_progress_counts_to_the_total(llm):
    seen = []
    llm.generate(
        [PROMPT] * 5, SamplingParams(max_tokens=3), progress=lambda done, all_: seen.append((done, all_))
    )
    assert seen == [(i, 5) for i in range(1, 6)]


def test_the_first_tokens_of_a_prompt_of_one_token_are_right(llm, reference):
    for token in (3, 77, 150):
        assert only(llm, [token], max_tokens=6).token_ids == reference_tokens(reference, [token], 6)
