"""Greedy and seeded results with drafts are those without, whatever happens to a request."""

import pytest

from kvq.engine import SamplingParams, StructuredOutput
from kvq.watermark.detection import detect
from kvq.watermark.key import make_key, read_key
from kvq.watermark.schemes import parse_scheme
from tests.engine.kit import assert_balanced, engine, mixed_prompts, pair, tokens_of
from tests.engine.speculation.kit import counts, speculating, with_oracle
from tests.engine.test_equality import QUANTIZED_GAP, check_near_ties
from tests.helpers_hybrids import OTHERS, QUICK, hybrid

NEW = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
FORMATS = [
    "fp32", "bf16", "fp16", "fp8", "int8", "int6", "int5", "int4", "int4_rot", "int3", "int2",
    "k8v4", "int4_g16_s8_mean_rot", "int3_mean", "int4+sinks=4+recent=5", "int8/int4_mean+sinks=17+recent=33",
]  # fmt: skip
# Prompts in several chunks; preemptions, with host memory and without; steps launched ahead.
WAYS = [
    {"max_num_batched_tokens": 19},
    {"num_blocks": 14, "max_context": 112},
    {"num_blocks": 14, "max_context": 112, "kv_host": "4MiB"},
    {"async_scheduling": True},
]


def check_ways(model, prompts, *, most_ties: int, right: float = 0.8, ways=WAYS) -> None:
    """Every way gives the tokens of an engine without drafts, or parts from them at a near tie."""
    plain = engine(model).generate(prompts, NEW)
    answers, seen, preemptions = tokens_of(plain), 0, 0
    for options in ways:
        llm = with_oracle(speculating(model, **options), prompts, answers, right=right)
        for _ in range(2):
            outputs = llm.generate(prompts, NEW)
            seen += check_near_ties(plain, outputs, gap=QUANTIZED_GAP)
            preemptions += sum(output.receipt.preemptions for output in outputs)
        drafted, accepted = counts(llm)
        assert 0 < accepted < drafted, "some drafts were to be right, others wrong"
        assert_balanced(llm)
    assert len(ways) < 3 or preemptions > 0
    assert seen <= most_ties, f"{seen} results differ from those without drafts"


@pytest.mark.daily(4)
@pytest.mark.parametrize("kv", FORMATS)
def test_tokens_are_those_without_drafts_in_every_format(kv):
    prompts = mixed_prompts(8, seed=5, longest=70)
    check_ways(pair("llama")[0].with_kv(kv), [*prompts, prompts[0]], most_ties=8)


@pytest.mark.long
@pytest.mark.parametrize("kv", FORMATS)
def test_the_tokens_of_100_prompts_are_those_without_drafts(kv):
    check_ways(pair("llama")[0].with_kv(kv), mixed_prompts(100, seed=8, longest=70), most_ties=40)


@pytest.mark.daily(1)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "cohere2"])
def test_tokens_are_those_without_drafts_with_windows_experts_and_latents(family):
    check_ways(pair(family)[0], mixed_prompts(8, seed=6, longest=70), most_ties=4)


@pytest.mark.daily(1)
@pytest.mark.parametrize("family", [*QUICK, *OTHERS])
def test_recurrent_states_go_back_behind_wrong_drafts(family):
    model, prompts = hybrid(family)[0], mixed_prompts(8, seed=7, longest=70)
    check_ways(model, prompts, most_ties=4)


@pytest.mark.parametrize("method", ["ngram", "self"])
def test_real_proposers_change_no_token(tiny, method):
    prompts = ["Once upon a time", "one two three one two three one two", "The king said: no, no, no,"]
    plain = engine(tiny, "int4").generate(prompts, NEW)
    llm = speculating(tiny, "int4", method=method)
    assert check_near_ties(plain, llm.generate(prompts, NEW), gap=QUANTIZED_GAP) <= 1
    assert counts(llm)[1] > 20
    assert_balanced(llm)


def test_a_draft_model_changes_no_token_and_goes_back_behind_wrong_drafts(tiny):
    prompts = mixed_prompts(6, seed=9)
    plain = engine(tiny, "int4").generate(prompts, NEW)
    llm = speculating(
        tiny, "int4", method="draft", speculation={"model": "tiny", "weights": "int4"}, num_blocks=48
    )
    for _ in range(2):
        assert check_near_ties(plain, llm.generate(prompts, NEW), gap=QUANTIZED_GAP) <= 1
    drafted, accepted = counts(llm)
    assert 0.2 * drafted < accepted < drafted
    assert not llm.core.speculator.proposer.session.manager.sequences(), "its sequences were not freed"
    assert_balanced(llm)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}
SEEDED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "min_tokens": 9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "logit_bias": {7: 3.0}, **PENALTIES},
    {"temperature": 0.0, **PENALTIES},
]


@pytest.mark.daily(4)
@pytest.mark.parametrize("options", SEEDED)
@pytest.mark.parametrize("method", ["oracle", "self"])
def test_a_seeded_request_gets_the_tokens_of_its_seed(tiny, options, method):
    """Also with penalties, which count the drafts before a token, and with what depends on their number."""
    params = SamplingParams(max_tokens=24, seed=5, logprobs=3, n=2, **options)
    prompts = mixed_prompts(5, seed=3)
    plain = engine(tiny).generate(prompts, params)
    llm = speculating(tiny, method="self" if method == "self" else "ngram")
    if method == "oracle":
        with_oracle(llm, prompts, tokens_of(plain), vocab=4000)
    outputs = llm.generate(prompts, params)
    for output, other in zip(outputs, plain, strict=True):
        assert [r.token_ids for r in output.outputs] == [r.token_ids for r in other.outputs]
        assert [r.finish_reason for r in output.outputs] == [r.finish_reason for r in other.outputs]
        for result, wanted in zip(output.outputs, other.outputs, strict=True):
            for entry, one in zip(result.logprobs, wanted.logprobs, strict=True):
                assert (entry.token, entry.rank) == (one.token, one.rank)
                assert entry.logprob == pytest.approx(one.logprob, abs=1e-4)
    assert counts(llm)[1] > 10
    assert_balanced(llm)


SPECS = [
    StructuredOutput(json_schema={"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type":
    "boolean"}},
                                  "required": ["a", "b"]}),
    StructuredOutput(regex="(ab|cd){3,9}!"),
    StructuredOutput(choice=["the same words, the same words", "other"]),
]  # fmt: skip


@pytest.mark.daily(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ngram", "self", "oracle"])
def test_structured_output_is_that_without_drafts(tiny, method, temperature):
    params = [SamplingParams(structured=s, max_tokens=60, temperature=temperature, seed=4) for s in SPECS]
    prompts = [[10 + i, 11, 12, 13] for i in range(len(SPECS))]
    plain = engine(tiny).generate(prompts, params)
    llm = speculating(tiny, method="self" if method == "self" else "ngram")
    if method == "oracle":
        with_oracle(llm, prompts, tokens_of(plain), vocab=4000)
    for _ in range(2):  # the second time n-grams know the first answers
        assert tokens_of(llm.generate(prompts, params)) == tokens_of(plain)
    assert counts(llm)[1] > 0
    assert_balanced(llm)


@pytest.mark.parametrize("stop", ["e", " the", "nd"])
def test_a_stop_string_within_accepted_drafts_ends_the_text_there(tiny, stop):
    params = SamplingParams(max_tokens=40, stop=stop, ignore_eos=True)
    prompts = [[50 + i, 60, 70] for i in range(6)]
    plain = engine(tiny).generate(prompts, params)
    endless = tokens_of(engine(tiny).generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True)))
    llm = with_oracle(speculating(tiny, k=8), prompts, endless, right=1.0)
    outputs = llm.generate(prompts, params)
    for output, other in zip(outputs, plain, strict=True):
        assert output.outputs[0] == other.outputs[0]
        assert output.receipt.generated_tokens == other.receipt.generated_tokens
        assert output.receipt.accepted_tokens <= output.receipt.generated_tokens, "unsaid drafts were counted"
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert_balanced(llm)


def test_an_end_token_within_drafts_ends_the_result_and_nothing_behind_it_is_kept(tiny):
    prompts = [[50, 60, 70]]
    [endless] = tokens_of(engine(tiny).generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True)))
    end = endless[11]
    params = SamplingParams(max_tokens=30, stop_token_ids=[end], min_tokens=3, ignore_eos=True)
    [plain] = engine(tiny).generate(prompts, params)
    llm = with_oracle(speculating(tiny, k=16), prompts, [endless], right=1.0)
    [output] = llm.generate(prompts, params)
    assert output.outputs == plain.outputs
    assert output.outputs[0].stop_reason == end
    assert output.receipt.accepted_tokens < output.receipt.generated_tokens
    assert_balanced(llm)


def test_beams_and_prompt_logprobs_work_beside_drafts(tiny):
    prompts = [[10, 20, 30, 10, 20, 30, 10, 20], [40, 50, 60]]
    each = [SamplingParams(beam_width=3, max_tokens=12), SamplingParams(max_tokens=20, prompt_logprobs=1)]
    plain = engine(tiny).generate(prompts, each)
    llm = speculating(tiny, method="self")
    outputs = llm.generate(prompts, each)
    assert [[r.token_ids for r in o.outputs] for o in outputs] == [
        [r.token_ids for r in o.outputs] for o in plain
    ]
    assert outputs[1].prompt_logprobs[1:] == plain[1].prompt_logprobs[1:]
    assert outputs[0].receipt.drafted_tokens == 0 < outputs[1].receipt.drafted_tokens
    assert_balanced(llm)


@pytest.mark.daily(2)
@pytest.mark.parametrize("scheme", ["green", "tournament"])
@pytest.mark.parametrize("method", ["oracle", "self"])
def test_a_marked_text_is_the_one_without_drafts(tiny, tmp_path, scheme, method):
    make_key(tmp_path / "key")
    marks = {"watermark": "always", "watermark_key_file": tmp_path / "key", "watermark_scheme": scheme}
    params = SamplingParams(max_tokens=40, temperature=1.0, top_k=200, seed=9, ignore_eos=True)
    prompts = mixed_prompts(3, seed=4)
    plain = tokens_of(engine(tiny, **marks).generate(prompts, params))
    assert plain != tokens_of(engine(tiny).generate(prompts, params))
    llm = speculating(tiny, method="self" if method == "self" else "ngram", **marks)
    if method == "oracle":
        with_oracle(llm, prompts, plain, vocab=4000)
    assert tokens_of(llm.generate(prompts, params)) == plain
    assert counts(llm)[1] > 10


@pytest.mark.parametrize("scheme", ["green", "tournament"])
def test_texts_of_kept_and_replaced_drafts_are_marked_as_well(tiny, tmp_path, scheme):
    """Without a seed, by min(1, p / q): both models' distributions are marked."""
    make_key(tmp_path / "key")
    key, how = read_key(tmp_path / "key"), parse_scheme(scheme)
    llm = speculating(
        tiny, method="self", watermark="always", watermark_key_file=tmp_path / "key", watermark_scheme=scheme
    )
    params = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True)
    texts = tokens_of(llm.generate([[i, 5, 6, 7] for i in range(20, 30)], params))
    assert counts(llm)[1] > 500
    assert sum(detect(text, how, key).p < 1e-4 for text in texts) >= 9
