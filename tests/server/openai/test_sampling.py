"""Every sampling parameter of a body reaches the engine, a new one too."""

from dataclasses import dataclass
from functools import partial

import pytest

from kvq.engine.params import SamplingParams, param, real
from kvq.engine.requests.defaults import SamplingDefaults
from kvq.server.admission.bodies import ChatBody, CompletionBody
from kvq.server.anthropic.bodies import MessagesBody
from kvq.server.anthropic.message import _params
from kvq.server.http.problems import Problem
from kvq.server.openai import sampling
from kvq.server.openai.sampling import chat_params, completion_params

NO_DEFAULTS = SamplingDefaults()
message_params = partial(_params, offer=None)

# How a request is served and what comes back, not how tokens are chosen.
_OF_THE_REQUEST = {
    *(
        "model",
        "stream",
        "stream_options",
        "service_tier",
        "priority",
        "cache_salt",
        "session_id",
        "kv_retain",
        "kv_format",
    ),
    *("prompt", "suffix", "echo"),
    *("messages", "tools", "tool_choice", "parallel_tool_calls"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"),
}
_SCHEMA = {"type": "object"}
_UNUSUAL = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "n": 2,
    "best_of": 2,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.0},
    "seed": 1,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 2,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "response_format": {"type": "json_object"},
    "guided_json": _SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: A",
    "structured_outputs": {"json": _SCHEMA},
    "watermark": True,
}
_KINDS = {
    CompletionBody: (partial(completion_params, defaults=NO_DEFAULTS), {"prompt": "a"}, {"logprobs": 2}),
    ChatBody: (
        partial(chat_params, defaults=NO_DEFAULTS),
        {"messages": [{"role": "user", "content": "a"}]},
        {"logprobs": True, "top_logprobs": 2},
    ),
}


@pytest.mark.parametrize("body", _KINDS)
def test_every_field_of_a_body_is_the_requests_own_or_reaches_the_engine(body):
    build, least, own = _KINDS[body]
    without = build(body(**least))
    for name in body.model_fields.keys() - _OF_THE_REQUEST:
        given = {"logprobs": own["logprobs"]} if name == "top_logprobs" else {}
        before = build(body(**least, **given))
        after = build(body(**least, **given, **{name: (_UNUSUAL | own)[name]}))
        assert after != before, f"{name} is lost on its way"
    assert build(body(**least)) == without


@pytest.mark.parametrize("body", _KINDS)
def test_a_new_parameter_is_one_field_of_the_engine_and_one_of_the_body(monkeypatch, body):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class OneMore(SamplingParams):
        top_a: float = param(0.0, real(0, 1))

    class Body(body):
        top_a: float = 0.0

    monkeypatch.setattr(sampling, "SamplingParams", OneMore)
    build, least, _ = _KINDS[body]
    assert build(Body(**least, top_a=0.5)).top_a == 0.5
    with pytest.raises(Problem, match="top_a must be a number of 0 to 1, got 2"):
        build(Body(**least, top_a=2.0))


def test_all_tokens_are_kept_by_either_spelling_of_no_top_k():
    for top_k in (-1, 0, None):
        assert completion_params(CompletionBody(prompt="a", top_k=top_k), NO_DEFAULTS).top_k is None


@pytest.mark.parametrize("body", [*_KINDS, MessagesBody])
def test_the_models_defaults_fill_what_a_body_leaves_out_or_says_null_to(body):
    told = {"temperature": 0.3, "top_k": 7, "top_p": 0.8, "most_tokens": 9, "logit_bias": {3: -100.0}}
    defaults = SamplingDefaults(fields=told)
    if body is MessagesBody:
        least = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        build = message_params
    else:
        least, build = _KINDS[body][1], _KINDS[body][0].func

    def built(**given):
        return build(body(**least, **given), defaults=defaults)

    left = built()
    assert (left.temperature, left.top_k, left.top_p, left.logit_bias) == (0.3, 7, 0.8, {3: -100.0})
    lengths = (5, None) if body is MessagesBody else (None, 9)
    assert (left.max_tokens, left.most_tokens) == lengths
    said = built(temperature=1.0, top_k=0, top_p=1.0)
    assert (said.temperature, said.top_k, said.top_p) == (1.0, None, 1.0)
    if body is not MessagesBody:
        assert built(temperature=None, max_tokens=None) == left
        assert (built(max_tokens=4).max_tokens, built(max_tokens=4).most_tokens) == (4, None)
    if body is ChatBody:
        assert built(max_completion_tokens=4).max_tokens == 4
