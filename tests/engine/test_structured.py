"""Structured output end to end: what ends by itself is what was asked for, and bad grammars end alone."""

import asyncio
import json
import random
import re
from concurrent.futures import wait

import jsonschema
import pytest

from kvq.engine import LLM, AsyncLLM, SamplingParams, StructuredOutput
from kvq.errors import EngineError, RequestError
from tests.engine.grammar.schemas import random_schema
from tests.engine.kit import assert_balanced, drive, submit
from tests.waiting import HANG_S

MOST_TOKENS = 512
SLOW_REGEX = "(a|aa)" * 20 + "b" * 1000  # takes a moment to compile
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4"])  # no dates: RFC 3339 has a year 0, Python has none
PROMPT = "Here is what you asked for:\n"


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, num_blocks=512, max_num_seqs=32, async_scheduling=False) as llm:
        yield llm


def generate(llm, *specs, **options):
    every = [SamplingParams(structured=spec, **({"max_tokens": 64} | options)) for spec in specs]
    return llm.generate([PROMPT] * len(every), every)


def check_schemas(llm, count: int, temperature: float, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    specs = [StructuredOutput(json_schema=schema) for schema in schemas]
    outputs = generate(llm, *specs, temperature=temperature, seed=seed, max_tokens=MOST_TOKENS)
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.error is None, f"{output.error} of {schema}"
        [result] = output.outputs
        if result.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(result.text), schema, format_checker=FORMATS)
    assert ended >= 0.95 * count, f"only {ended} of {count} results ended within {MOST_TOKENS} tokens"
    assert_balanced(llm)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_results_that_end_match_their_schemas(llm, temperature):
    check_schemas(llm, 10, temperature, seed=1 + int(temperature))


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_200_json_results_that_end_match_their_schemas(llm, temperature):
    check_schemas(llm, 200, temperature, seed=3 + int(temperature))


def test_choices_and_regexes_are_kept_to(llm):
    choice = ["yes", "no", "größer"]
    pattern = r"[A-Z]{3}-\d{2}(x|yz)"
    specs = [StructuredOutput(choice=choice), StructuredOutput(regex=pattern)] * 4
    for i, output in enumerate(generate(llm, *specs, temperature=2.0, seed=5, max_tokens=40)):
        assert output.error is None, output.error
        [result] = output.outputs
        assert result.finish_reason == "stop"
        assert result.text in choice if i % 2 == 0 else re.fullmatch(pattern, result.text)


def test_each_of_several_results_keeps_to_the_grammar_by_itself(llm):
    [output] = generate(llm, StructuredOutput(regex=r"\d{3}[ab]{4}"), n=5, temperature=1.5, seed=2)
    texts = [result.text for result in output.outputs]
    assert all(re.fullmatch(r"\d{3}[ab]{4}", text) for text in texts)
    assert len(set(texts)) > 2


def test_a_preempted_request_goes_on_where_its_grammar_stood(llm):
    schema = random_schema(random.Random(8))
    params = SamplingParams(structured=StructuredOutput(json_schema=schema), max_tokens=MOST_TOKENS)
    [wanted] = llm.generate(PROMPT, params)
    job, collector = submit(llm, PROMPT, params)
    for step in range(5000):
        if not llm.core.has_work:
            break
        llm.step()
        if step % 9 == 0 and job in llm.core.scheduler.running.requests:
            llm.core.scheduler.preempt(job, 0.0)
    assert collector.output.receipt.preemptions > 1
    assert collector.output.outputs[0].text == wanted.outputs[0].text


def test_results_without_a_grammar_are_not_touched_by_those_with_one(llm):
    plain = SamplingParams(max_tokens=16, temperature=0.8, seed=7)
    [wanted] = llm.generate("Once", plain)
    bound = SamplingParams(max_tokens=16, structured=StructuredOutput(regex=r"\d{30}"))
    outputs = llm.generate([PROMPT, "Once", PROMPT], [bound, plain, bound])
    assert outputs[1].outputs[0].token_ids == wanted.outputs[0].token_ids
    assert all(re.fullmatch(r"\d*", outputs[i].outputs[0].text) for i in (0, 2))


def test_a_bad_grammar_is_refused_and_ends_its_own_request_alone(llm):
    specs = [
        StructuredOutput(regex="(unclosed"),
        StructuredOutput(choice=["good"]),
        StructuredOutput(json_schema={"type": "no such type"}),
        StructuredOutput(lark="start: missing"),
    ]
    outputs = generate(llm, *specs)
    assert [type(output.error) for output in outputs] == [
        RequestError,
        type(None),
        RequestError,
        RequestError,
    ]
    assert outputs[1].outputs[0].text == "good"
    assert_balanced(llm)


@pytest.mark.parametrize("error", [RequestError("too much work"), RuntimeError("a bug in a library")])
@pytest.mark.parametrize("method", ["mask", "accept", "fork"])
def test_a_grammar_that_fails_while_it_runs_ends_its_own_request_alone(
    llm, monkeypatch, error, method, caplog
):
    def fail(*_args):
        raise error

    spec = StructuredOutput(regex=r"\d{20}")
    jobs = [submit(llm, PROMPT, SamplingParams(structured=spec, max_tokens=12)) for _ in range(3)]
    wait(
        list(llm.core._grammars._futures.values())
    )  # one that is ready much earlier would end before the others begin
    llm.step()
    assert len(llm.core.jobs) == 3
    jobs.append(submit(llm, "Once", SamplingParams(max_tokens=12)))
    llm.step()
    assert len(llm.core.jobs) == 4
    matcher = jobs[1][0].results[0].matcher
    if method == "fork":  # of a request that begins
        from kvq.engine.grammar.matcher import Matcher

        monkeypatch.setattr(Matcher, "fork", fail)
        failing = submit(llm, PROMPT, SamplingParams(structured=spec, max_tokens=12))[1]
        while len(llm.core._grammars):
            llm.step()
        monkeypatch.undo()
    else:
        failing = jobs.pop(1)[1]
        monkeypatch.setattr(matcher, method, fail)
    drive(llm, jobs)
    assert isinstance(failing.output.error, RequestError if isinstance(error, RequestError) else EngineError)
    assert str(error) in str(failing.output.error)
    assert [collector.output.error for _, collector in jobs] == [None] * len(jobs)
    assert_balanced(llm)


def test_more_structured_prompts_than_may_wait_for_the_compiler_are_all_served(llm):
    limit = 64
    specs = [StructuredOutput(choice=[f"answer {i}"]) for i in range(limit + 6)]
    outputs = generate(llm, *specs)
    assert [output.outputs[0].text for output in outputs] == [f"answer {i}" for i in range(limit + 6)]


def test_cancelling_while_a_grammar_is_compiled_ends_the_request(llm):
    params = SamplingParams(structured=StructuredOutput(regex=SLOW_REGEX))
    jobs = [submit(llm, PROMPT, params) for _ in range(3)]
    for job, collector in jobs:
        llm.core.cancel(job)
        llm.core.cancel(job)
        assert collector.output.error is None
        assert collector.output.receipt.generated_tokens == 0
    assert_balanced(llm)
    assert generate(llm, StructuredOutput(choice=["fine"]))[0].outputs[0].text == "fine"


def test_a_stream_waits_for_its_grammar_while_others_run(tiny):
    async def main():
        async with AsyncLLM(tiny, num_blocks=64) as engine:
            bound = SamplingParams(structured=StructuredOutput(regex=r"[a-f]{8}"))
            plain = SamplingParams(max_tokens=8, ignore_eos=True)
            structured, other = await asyncio.gather(
                engine.generate(PROMPT, bound), engine.generate("Once", plain)
            )
            with pytest.raises(RequestError, match="structured output"):
                await engine.generate(PROMPT, SamplingParams(structured=StructuredOutput(regex="(")))
            doomed = asyncio.create_task(
                engine.generate(PROMPT, SamplingParams(structured=StructuredOutput(regex=SLOW_REGEX)))
            )
            await asyncio.sleep(0.01)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            while engine.core.has_work:
                await asyncio.sleep(0.001)
        return structured, other

    structured, other = asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert re.fullmatch("[a-f]{8}", structured.outputs[0].text)
    assert len(other.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "exactly one of json_schema, regex, choice and lark, got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"choice": []}, "choice must be a list of at least one string"),
        ({"choice": "a"}, "choice must be a list"),
    ],
)
def test_structured_output_takes_exactly_one_kind(options, names):
    with pytest.raises(RequestError, match=names):
        StructuredOutput(**options)


def test_structured_output_cannot_go_on_past_its_end(llm):
    with pytest.raises(RequestError, match="leave ignore_eos out"):
        generate(llm, StructuredOutput(choice=["a"]), ignore_eos=True)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutput(regex=""),
        StructuredOutput(lark="start: "),
        StructuredOutput(choice=["yes", "no"]),
        StructuredOutput(regex="[0-9]{3}"),
        StructuredOutput(json_schema={"const": 7}),
    ],
    ids=["empty regex", "empty grammar", "choice", "regex", "schema"],
)
def test_a_text_that_ends_before_min_tokens_is_refused_in_words(llm, spec):
    [output] = generate(llm, spec, min_tokens=30)
    assert isinstance(output.error, RequestError)
    assert "min_tokens 30 is more than the structured output lets through" in str(output.error)
    assert_balanced(llm)


def test_min_tokens_that_a_grammar_can_keep_is_kept(llm):
    [output] = generate(llm, StructuredOutput(regex="[a-z ]*"), min_tokens=12, max_tokens=12)
    assert len(output.outputs[0].token_ids) == 12
    [output] = generate(llm, StructuredOutput(choice=["yes"]), min_tokens=1)
    assert output.outputs[0].text == "yes"
