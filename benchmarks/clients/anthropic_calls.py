"""Calls of the `anthropic` package, any major version: run in its own environment by try_clients.py.

    python anthropic_calls.py URL MODEL

Prints the package's version; ends with a traceback at the first call that comes out otherwise than it should.
"""

import sys

import anthropic

TOOL = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}},
}


def main() -> None:
    """Whole, streamed, with a tool that has to be called, counted, and refused."""
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=60)
    options = {
        "model": sys.argv[2],
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": 12,
        "extra_body": {"temperature": 0},  # newer majors don't know it any more
    }
    whole = client.messages.create(**options)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 12
    called = client.messages.create(
        **(options | {"max_tokens": 120}), tools=[TOOL], tool_choice={"type": "any"}
    )
    assert [block.name for block in called.content if block.type == "tool_use"][:1] == ["weather"]
    counted = client.messages.count_tokens(**{n: options[n] for n in ("model", "system", "messages")})
    used = whole.usage
    prompt = used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
    assert counted.input_tokens == prompt
    for wrong, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**(options | wrong))
        except kind as error:
            assert error.body["error"]["message"]  # noqa: PT017 - no pytest in there
        else:
            raise AssertionError(f"{wrong} was not refused")
    print(f"anthropic {anthropic.__version__}")


if __name__ == "__main__":
    main()
