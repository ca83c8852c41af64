"""Calls of LiteLLM: run in its own environment by try_clients.py.

    python litellm_calls.py URL MODEL

Prints the package's version; ends with a traceback at the first call that comes out otherwise than it should.
"""

import sys
from importlib.metadata import version

import litellm

ASK = [{"role": "user", "content": "Tell me of the sea."}]
TEXTS = ["the sea", "a city", "the sea"]


def main(url: str, model: str) -> None:
    server = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    limits = {"messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**server, **limits)
    assert whole.usage.completion_tokens == 12
    pieces = litellm.completion(**server, **limits, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    same = litellm.completion(**server | {"model": f"openai/{model}"}, **limits)
    assert same.choices[0].message.content == whole.choices[0].message.content
    claude = litellm.completion(**server | {"model": f"anthropic/{model}", "api_base": url}, **limits)
    assert claude.choices[0].message.content
    data = litellm.embedding(**server, input=TEXTS).data
    vectors = [one["embedding"] for one in data]
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-4
    ranked = litellm.rerank(**server, query=TEXTS[0], documents=TEXTS[1:], top_n=1).results
    assert [one["index"] for one in ranked] == [1]
    try:
        litellm.completion(**server | {"model": "hosted_vllm/other"}, **limits)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("another model was answered")
    print(f"litellm {version('litellm')}")


main(*sys.argv[1:3])
