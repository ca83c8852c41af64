"""`LLM.chat`: conversations in the model's own chat format."""

import pytest

from kvq import LLM, SamplingParams
from kvq.errors import RequestError
from kvq.models.run.prompts import PromptEncoder

HI = [{"role": "user", "content": "Tell of the sea."}]
LONG = [*HI, {"role": "assistant", "content": "It is wide."}, {"role": "user", "content": "And of ships."}]
FEW = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, num_blocks=64) as llm:
        yield llm


def test_answers_are_those_of_the_rendered_prompts(llm):
    encoder = PromptEncoder(llm.model.tokenizer)
    prompts = [encoder.encode_chat(turns, {"add_generation_prompt": True}) for turns in (HI, LONG)]
    wanted = [one.outputs[0].token_ids for one in llm.generate(prompts, FEW)]
    assert [one.outputs[0].token_ids for one in llm.chat([HI, LONG], FEW)] == wanted
    [alone] = llm.chat(LONG, FEW)
    assert alone.prompt_token_ids == prompts[1]
    assert alone.outputs[0].token_ids == wanted[1]


def test_texts_of_users_hold_no_control_tokens(llm):
    own = llm.model.tokenizer
    [spelled] = llm.chat([{"role": "user", "content": own.eos_token}], FEW)
    [plain] = llm.chat([{"role": "user", "content": "x"}], FEW)
    ends = [one.prompt_token_ids.count(own.eos_token_id) for one in (spelled, plain)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("given", [[], "hi", None, [["hi"]], [{"role": "user"}, "hi"]])
def test_what_is_no_conversation_is_refused(llm, given):
    with pytest.raises(RequestError):
        llm.chat(given, FEW)
    assert not llm.core.has_work


def test_tools_and_options_reach_the_template(llm, monkeypatch):
    seen = []
    monkeypatch.setattr(
        PromptEncoder, "encode_chat", lambda self, turns, options, max_tokens: seen.append(options) or [5, 6]
    )
    tool = {"type": "function", "function": {"name": "f"}}
    llm.chat(HI, FEW, tools=[tool], template_options={"enable_thinking": False})
    assert seen == [{"add_generation_prompt": True, "tools": [tool], "enable_thinking": False}]


def test_a_base_model_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.model.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat(HI, FEW)
