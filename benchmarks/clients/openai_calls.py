"""Calls of the `openai` package, any major version: run in its own environment by try_clients.py.

    python openai_calls.py URL MODEL

Prints the package's version; ends with a traceback at the first call that comes out otherwise than it should.
"""

import asyncio
import sys

import openai

PROMPT = "The history of the city"
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}},
    },
}


def completions(client: openai.OpenAI, model: str) -> None:
    """Whole and streamed, of texts and several, with log-probabilities."""
    options = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**options)
    assert whole.usage.completion_tokens == 12
    pieces = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in pieces if c.choices) == whole.choices[0].text
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    two = client.completions.create(**(options | {"prompt": [PROMPT, PROMPT]}), logprobs=2, echo=True, n=1)
    assert [choice.text for choice in two.choices] == [PROMPT + whole.choices[0].text] * 2
    assert two.choices[0].logprobs.token_logprobs[0] is None


def chats(client: openai.OpenAI, model: str) -> None:
    """Whole and streamed, with a schema, and with a tool that has to be called."""
    options = {"model": model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    pieces = list(client.chat.completions.create(**options, stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in pieces)
    assert streamed == whole.choices[0].message.content
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    fixed = client.chat.completions.create(**(options | {"max_tokens": 60}), response_format=form)
    assert '"a"' in fixed.choices[0].message.content
    called = client.chat.completions.create(
        **(options | {"max_tokens": 120}), tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    assert called.choices[0].finish_reason == "tool_calls"


def others(client: openai.OpenAI, model: str) -> None:
    """The list of models, and errors as the package's own exceptions."""
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).id == model
    for wrong, kind in (({"model": "other"}, openai.NotFoundError), ({"n": 1000}, openai.BadRequestError)):
        try:
            client.completions.create(**({"model": model, "prompt": PROMPT} | wrong))
        except kind as error:
            assert error.body["message"]  # noqa: PT017 - no pytest in there
        else:
            raise AssertionError(f"{wrong} was not refused")


async def at_once(url: str, model: str) -> None:
    """Eight of the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        calls = [client.completions.create(model=model, prompt=PROMPT, max_tokens=8) for _ in range(8)]
        assert [answer.usage.completion_tokens for answer in await asyncio.gather(*calls)] == [8] * 8


def main() -> None:
    """All of them."""
    url, model = f"{sys.argv[1]}/v1", sys.argv[2]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    for calls in (completions, chats, others):
        calls(client, model)
    asyncio.run(at_once(url, model))
    print(f"openai {openai.__version__}")


if __name__ == "__main__":
    main()
