"""Between the ingress and the replicas: what is passed on, sent elsewhere, broken off."""

import asyncio
import json
from contextlib import aclosing

import pytest

from kvq.errors import ConfigError, EngineError
from kvq.integrations.ray import Fleet
from kvq.integrations.ray.relay import Lost, RelayedRequest, forward, prompt_of, relay

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = HEAD | {"headers": [(b"content-type", b"application/json")]}


def body(text: bytes, *, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": more}


def asked(**fields) -> RelayedRequest:
    given = {"method": "POST", "path": "/v1/completions", "query": b"", "headers": (), "client": None}
    return RelayedRequest(**given | {"body": b"{}"} | fields)


def answer(*attempts, path="/v1/completions"):
    """(messages that the client got, attempts made) where attempts bring messages or exceptions in turn."""
    sent, made = [], []

    async def send(asked):
        made.append(asked)
        for message in attempts[len(made) - 1]:
            if isinstance(message, Exception):
                raise message
            yield message

    async def note(message):
        sent.append(message)

    async def run():
        response = await forward(asked(path=path), send, pause_s=0.0)
        await response({"type": "http", "method": "POST"}, None, note)

    asyncio.run(run())
    return sent, len(made)


def test_what_a_replica_sends_is_passed_on():
    messages = [HEAD, body(b"a"), body(b"b", more=False)]
    assert answer(messages) == (messages, 1)


def test_a_replica_that_is_lost_before_it_answered_is_replaced():
    messages = [HEAD, body(b"a", more=False)]
    assert answer([Lost("ended")], [Lost("ended")], messages) == (messages, 3)


def test_where_all_are_lost_the_client_is_told():
    sent, made = answer(*[[Lost("they all ended")]] * 9)
    assert sent[0]["status"] == 503
    assert made < 9
    error = json.loads(sent[1]["body"])["error"]
    assert (error["message"], error["code"]) == ("they all ended", "unavailable")
    sent, _ = answer(*[[Lost("they all ended")]] * 9, path="/v1/messages")
    assert json.loads(sent[1]["body"])["type"] == "error"


def test_a_stream_whose_replica_is_lost_ends_with_an_error_object():
    sent, made = answer([HEAD, body(b"data: 1\n\n"), Lost("ended")], [HEAD])
    assert made == 1  # its beginning can't be taken back
    assert sent[:2] == [HEAD, body(b"data: 1\n\n")]
    assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["message"] == "ended"
    assert sent[2]["more_body"] is False


def test_an_answer_that_is_no_stream_breaks_off():
    with pytest.raises(Lost):
        answer([WHOLE, body(b'{"a": '), Lost("ended")])


def test_texts_begin_alike_where_prompts_do():
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    one, two = (json.dumps({"model": "m", "messages": talk[:n]}).encode() for n in (1, 2))
    assert prompt_of(two).startswith(prompt_of(one)[:-2])
    system = json.dumps({"temperature": 1, "messages": talk, "system": "Be brief", "tools": [{"name": "f"}]})
    assert prompt_of(system.encode()).startswith('[[{"name":"f"}],"Be brief",[{"role"')
    assert prompt_of(b'{"prompt": "Once"}') == "Once"
    assert prompt_of(b'{"prompt": [1, 2]}') == "[1,2]"
    for nothing in (b"", b"no json", b"[1]", b'{"prompt": ""}', b'{"messages": []}', b"\xff", b"[" * 100_000):
        assert prompt_of(nothing) == ""


def collected(app, leave_after: int = 100) -> list:
    async def run():
        found = []
        async with aclosing(relay(app, asked(body=b"abc", headers=((b"host", b"h"),)))) as messages:
            async for message in messages:
                found.append(message)
                if len(found) == leave_after:
                    break
        return found

    return asyncio.run(run())


def test_an_application_gets_the_request_and_its_messages_come_back():
    async def app(scope, receive, send):
        given = await receive()
        assert dict(scope["headers"]) == {b"host": b"h", b"content-length": b"3"}
        await send(HEAD)
        await send(body(given["body"], more=given["more_body"]))

    assert collected(app) == [HEAD, body(b"abc", more=False)]


def test_who_leaves_early_cancels_the_application():
    ended = []

    async def app(scope, receive, send):
        try:
            await receive()
            await send(HEAD)
            await receive()  # a client who goes
        finally:
            ended.append(True)

    assert collected(app, leave_after=1) == [HEAD]
    assert ended == [True]


def test_an_application_that_fails_is_an_error_without_its_text(caplog):
    async def app(scope, receive, send):
        await send(HEAD)
        raise ValueError("what somebody wrote")

    with pytest.raises(EngineError) as caught:
        collected(app)
    assert "somebody" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "afinity"}, "did you mean 'affinity'"),
        ({"num_replicas": 0}, "at least 1"),
        ({"num_replicas": 3, "max_replicas": 2}, "below num_replicas 3"),
    ],
)
def test_a_fleet_that_can_not_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Fleet(**options)


def test_options_of_a_router_go_over_those_that_are_set():
    kwargs = Fleet(router_options={"imbalanced_threshold": 3}).router_kwargs
    assert kwargs["imbalanced_threshold"] == 3
    assert kwargs["match_rate_threshold"] == 0.1
    assert Fleet(router="round-robin").router_kwargs == {}


def test_without_ray_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("kvq.extras.is_installed", lambda module: module != "ray")
    monkeypatch.delitem(__import__("sys").modules, "kvq.integrations.ray.app", raising=False)
    import kvq.integrations.ray

    with pytest.raises(ConfigError, match=r"needs ray, which is not .*; pip install '\.\[ray\]'"):
        kvq.integrations.ray.application  # noqa: B018
