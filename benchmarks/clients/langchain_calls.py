"""Calls of LangChain's `langchain-openai`: run in its own environment by try_clients.py.

    python langchain_calls.py URL MODEL

Prints the package's version; ends with a traceback at the first call that comes out otherwise than it should.
"""

import sys
from importlib.metadata import version

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

ASK = [SystemMessage("You are brief."), HumanMessage("Tell me of the sea.")]
SCHEMA = {
    "title": "answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def main(url: str, model: str) -> None:
    server = {"base_url": f"{url}/v1", "api_key": "none", "model": model}
    chat = ChatOpenAI(**server, temperature=0, max_tokens=12)
    whole = chat.invoke(ASK)
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(piece.content for piece in chat.stream(ASK)) == whole.content
    assert [one.content for one in chat.batch([ASK, ASK])] == [whole.content] * 2
    form = ChatOpenAI(**server, temperature=0, max_tokens=60).with_structured_output(
        SCHEMA, method="json_schema"
    )
    assert isinstance(form.invoke(ASK)["a"], bool)
    tooled = ChatOpenAI(**server, temperature=0, max_tokens=120).bind_tools([SCHEMA], tool_choice="any")
    [call] = tooled.invoke(ASK).tool_calls[:1]
    assert call["name"] == "answer"
    new = ChatOpenAI(**server, temperature=0, max_tokens=12, use_responses_api=True)
    assert new.invoke(ASK).text == whole.content
    assert OpenAI(**server, temperature=0, max_tokens=5).invoke("The sea")
    embeddings = OpenAIEmbeddings(
        **server, check_embedding_ctx_length=False
    )  # whose tokenizer is not the model's
    vectors = embeddings.embed_documents(["the sea", "a city", "the sea"])
    assert len({len(vector) for vector in vectors}) == 1
    assert max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(vectors[0], embeddings.embed_query("the sea"), strict=True)) < 1e-4
    print(f"langchain-openai {version('langchain-openai')}")


main(*sys.argv[1:3])
