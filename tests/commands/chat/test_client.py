"""A server may answer anything: `kvq chat --url` tells what is wrong with it, and never breaks itself."""

import random

import pytest

from benchmarks.fuzz import streams
from kvq.commands.chat import client
from kvq.commands.chat.client import ServerPartner
from kvq.commands.chat.partner import ChatSampling
from kvq.errors import ConfigError, EngineError, RequestError

SAMPLING = ChatSampling(temperature=0.0, top_p=1.0, max_tokens=None, seed=None)
EVENT = b'data: {"choices": [{"delta": {"content": "sea"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CHUNKED = ["Transfer-Encoding: chunked"]


def ask(body, *, status="200 OK", head=()):
    answer = "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *head, "", ""]).encode() + body
    said = []
    with streams.served(answer) as port:
        partner = ServerPartner(f"http://127.0.0.1:{port}", None, "m", SAMPLING)
        return partner.answer([{"role": "user", "content": "hi"}], said.append), "".join(said)


def test_nothing_behind_the_end_is_read():
    done, said = ask(EVENT + b": note\n\nevent: x\n" + EVENT + DONE + EVENT + b"data: {\n")
    assert (said, done.generated_tokens) == ("seasea", 0)


@pytest.mark.parametrize(
    ("body", "head", "said"),
    [
        (EVENT, (), "ended the stream before"),
        (EVENT + b"data: \xff\n\n", (), "no JSON"),
        (b"data: {\n\n", (), "no JSON"),
        (EVENT + b'data: {"choices": 3}\n\n', (), "choices must be a list"),
        (b'data: {"error": "out of order"}\n\n', (), "out of order"),
        (b"data: " + b"a" * 2_000_000, (), "the server's stream is too long"),
        (b"x\r\nab", CHUNKED, "ended the stream"),
        (b"%x\r\n%s\r\n" % (len(EVENT) + 9, EVENT), CHUNKED, "the server's stream broke|ended the stream"),
    ],
)
def test_streams_that_are_none_end_in_words(body, head, said):
    with pytest.raises(EngineError, match=said):
        ask(body, head=head)


def test_a_stream_without_end_is_left(monkeypatch):
    monkeypatch.setattr(client, "_MAX_STREAM", 1000)
    with pytest.raises(EngineError, match="all 1000"):
        ask(EVENT * 100)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("302 Found", EngineError, "redirects"),
        ("400 Bad Request", RequestError, "the server refused: no such model"),
        ("503 Busy", EngineError, "the server failed: no such model"),
        ("abc", EngineError, "can't be reached"),
    ],
)
def test_refusals_are_told_in_the_servers_words(status, kind, said):
    with pytest.raises(kind, match=said):
        ask(b'{"error": "no such model"}', status=status, head=["Location: http://127.0.0.1:9/"])


def test_a_list_that_names_no_model_is_refused():
    with (
        streams.served(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": 3}]}') as port,
        pytest.raises(ConfigError, match=r"lists no models: .*data\[0\]\.id must be a text"),
    ):
        ServerPartner(f"http://127.0.0.1:{port}", None, None, SAMPLING)


def test_answers_that_are_nearly_right_are_refused_or_read():
    assert [found for seed in range(60) if (found := streams.case(random.Random(seed)))] == []
