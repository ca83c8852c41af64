"""Echoed prompts and thoughts in answers, over an engine whose words are given."""

import asyncio
import json
from dataclasses import fields

import pytest

from kvq.engine import Piece, Receipt
from kvq.server.admission.bodies import ChatBody, CompletionBody
from kvq.server.engine.messages import Ended
from kvq.server.http.guard import Access
from kvq.server.openai.chat import Chat
from kvq.server.openai.completions import Completions
from kvq.server.tools.calling import ToolCalling
from kvq.server.tools.thoughts import Thinking
from tests.server import asgi

BEGIN, END = 1, 2  # what the tokenizer puts before texts; what ends thoughts
THINKS = ToolCalling(thinking=Thinking(begin="<think>", end="</think>", end_id=END))


class Letters:
    """Prompts of a token a letter, behind one of the tokenizer's own; spaces are lost on the way."""

    def __init__(self, chat="ask:"):
        self.texts, self._chat = self, chat

    def text(self, token):
        return chr(token)

    async def tokenize(self, text, *, tenant=""):
        return [BEGIN, *map(ord, text.replace(" ", ""))]

    async def read_chat(self, conversation, *, tenant=""):
        return [*map(ord, self._chat)], []

    async def detokenize(self, tokens, *, tenant=""):
        return "".join(map(chr, tokens))


def served(words, *, prompts=None, tools=None, ending="stop"):
    """A service whose engine says these words to everything, `n` times; and what it was asked."""
    service, asked = asgi.service(), []
    service.prompts = prompts or Letters()
    service.tools = tools or service.tools
    service.check_prompt = lambda tokens, params, where: None

    async def stream(tokens, options, slots):
        asked.append(options.params)
        for at, word in enumerate(words, 1):
            for index in range(options.params.n):
                reason = ending if at == len(words) else None
                ids = [END if word == "</think>" else at + 10]
                yield Piece(request_id="", index=index, text=word, token_ids=ids, finish_reason=reason)
        yield Ended(number=1, receipt=Receipt(**{field.name: 0 for field in fields(Receipt)}))

    service.stream = stream
    return service, asked


def whole(call):
    return asyncio.run(call.answer())


def streamed(call):
    async def read():
        return [chunk async for chunk in call.chunks()]

    return asyncio.run(read())


PROMPTS = ["Hello world", "  Hello  world", ["yes", " no"], "<s>", [72, 105], [[72], [105, 33]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=json.dumps)
@pytest.mark.parametrize("n", [1, 3])
def test_echo_gives_prompts_back_as_they_were_sent(prompt, n):
    body = CompletionBody.model_validate({"prompt": prompt, "echo": True, "n": n, "max_tokens": 2})
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    sent = [one if isinstance(one, str) else "".join(map(chr, one)) for one in (prompt if many else [prompt])]
    expected = [one + " ok." for one in sent for _ in range(n)]

    choices = whole(Completions(served([" ok", "."])[0], body, ""))["choices"]
    assert [choice["text"] for choice in choices] == expected

    told = dict.fromkeys(range(len(expected)), "")
    for chunk in streamed(Completions(served([" ok", "."])[0], body, "")):
        for choice in chunk["choices"]:
            told[choice["index"]] += choice["text"]
    assert [*told.values()] == expected


def test_max_tokens_0_gives_the_prompt_alone_and_without_echo_nothing_is_given_back():
    body = {"prompt": "  a b", "echo": True, "max_tokens": 0}
    assert whole(Completions(served(["x"])[0], CompletionBody(**body), ""))["choices"][0]["text"] == "  a b"
    body = CompletionBody(prompt="a", max_tokens=1)
    assert whole(Completions(served(["x"])[0], body, ""))["choices"][0]["text"] == "x"


ASK = {"messages": [{"role": "user", "content": "?"}]}
WORDS = ["<think>", "\n", "I see", ".", "</think>", "\n\n", "Hello", "!"]


@pytest.mark.parametrize(
    ("chat", "words", "thought", "count"),
    [
        ("ask:", WORDS, "I see.", 5),
        ("ask:<think>\n", WORDS[2:], "I see.", 3),
        ("ask:<think>\n\n</think>\n\n", WORDS[6:], None, 0),
        ("ask:", WORDS[6:], None, 0),
    ],
    ids=["written", "begun by the template", "ended by the template", "none"],
)
def test_thoughts_are_reasoning_content_whole_and_streamed(chat, words, thought, count):
    service, _ = served(words, prompts=Letters(chat), tools=THINKS)
    answer = whole(Chat(service, ChatBody(**ASK), ""))
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thought, "Hello!")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == count

    body = ChatBody(**ASK, stream_options={"include_usage": True})
    chunks = streamed(Chat(service, body, ""))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (thought or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello!"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == count


def test_a_model_that_marks_no_thoughts_or_is_not_to_be_read_for_them_says_all_as_content():
    service, asked = served(WORDS)
    message = whole(Chat(service, ChatBody(**ASK, guided_regex=".*"), ""))["choices"][0]["message"]
    assert message["content"] == "".join(WORDS)
    assert "reasoning_content" not in message
    assert asked[0].structured.before == ""


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["yes"]},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
    ids=["choice", "format", "forced call"],
)
def test_constraints_and_forced_calls_begin_behind_thoughts(body):
    for chat, starts in (("ask:<think>\n", "before: thought"), ("ask:", "before: (")):
        service, asked = served(WORDS, prompts=Letters(chat), tools=THINKS)
        whole(Chat(service, ChatBody.model_validate(ASK | body), ""))
        assert asked[0].structured.before.startswith(starts)
    service, asked = served(WORDS, prompts=Letters("ask:<think></think>"), tools=THINKS)
    whole(Chat(service, ChatBody.model_validate(ASK | body), ""))
    assert asked[0].structured.before == ""


TWICE = [
    ("/v1/completions", {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}),
    ("/v1/completions", {"prompt": "x", "guided_grammar": "start: ", "guided_json": {}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a", "json_object": True}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {}, "json_object": True}}),
    ("/v1/chat/completions", ASK | {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
    ("/v1/chat/completions", ASK | {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("/v1/completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 2}),
    ("/v1/chat/completions", ASK | {"messages": 3}),
    ("/v1/messages", ASK | {"model": "tiny", "max_tokens": 1, "thinking": {"type": "enabled"}}),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_what_is_refused_before_its_body_is_read_is_counted_once(path):
    """By its key, by the length that its head tells, by an engine that is not there."""
    kept = asgi.service()
    client = asgi.Client(kept, Access(api_keys=("right",)))
    assert client.post(path, ASK, **{"x-api-key": "wrong"})[0] == 401
    assert client.metrics()["kvq_requests_total", "invalid"] == 1
    assert client.post(path, ASK, **{"x-api-key": "right", "content-length": "9" * 9})[0] == 413
    assert client.metrics()["kvq_requests_total", "invalid"] == 2
    del kept.check_arrival  # the client's stand-in: the engine is not there
    assert client.post(path, ASK, **{"x-api-key": "right"})[0] == 503
    assert client.metrics()["kvq_requests_total", "refused"] == 1
    assert client.metrics()["kvq_requests_total", "invalid"] == 2


@pytest.mark.parametrize(("path", "body"), TWICE)
def test_what_excludes_each_other_is_a_400_that_is_counted(path, body):
    client = asgi.Client(asgi.service())
    status, _, answer = client.post(path, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert client.metrics()["kvq_requests_total", "invalid"] == 1


def test_a_500_is_counted_as_an_error():
    client = asgi.Client(asgi.service())

    def fails(*_):
        raise ZeroDivisionError

    client.service.check_model = fails
    with pytest.raises(ZeroDivisionError):  # the server's own log gets it, too
        client.post("/v1/completions", {"prompt": "x"})
    assert client.metrics()["kvq_requests_total", "error"] == 1
