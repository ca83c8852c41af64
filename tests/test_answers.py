"""Whatever a server answers is read, or refused with the field's name."""

import json

import pytest

from kvq.answers import read_address, read_event, read_model, read_refusal
from kvq.errors import ConfigError, EngineError


def event(**fields):
    return read_event(json.dumps(fields).encode())


def test_events_of_either_kind_are_read():
    assert event(choices=[{"delta": {"content": "a"}}, {"text": "b"}])[0] == ("a", "b")
    assert event(choices=[{"delta": None}, {"delta": {"content": None}}, {}], usage=None)[0] == (
        "",
        "",
        "",
    )
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    used = {"prompt_tokens": 3, "cached_tokens": 1, "generated_tokens": 2}
    assert event(choices=[], usage=usage, error=None) == ((), used)
    assert event(usage={"prompt_tokens": None, "prompt_tokens_details": None})[1] == dict.fromkeys(used, 0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"choices": {}}, "choices must be a list"),
        ({"choices": None}, "choices must be a list"),
        ({"choices": [3]}, r"choices\[0\] must be an object"),
        ({"choices": [{"delta": "a"}]}, r"choices\[0\]\.delta must be an object"),
        ({"choices": [{"delta": {"content": {}}}]}, r"choices\[0\]\.delta\.content must be a text"),
        ({"choices": [{"text": 3}]}, r"choices\[0\]\.text must be a text"),
        ({"usage": "9"}, "usage must be an object"),
        ({"usage": {"prompt_tokens": -1}}, "usage: prompt_tokens must be"),
        ({"usage": {"completion_tokens": 1 << 60}}, "usage: completion_tokens must be"),
        ({"usage": {"completion_tokens": 10**400}}, r"usage\.completion_tokens: integers may have 64 bits"),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": True}}}, "cached_tokens must be"),
        ({"error": "no room"}, "^no room$"),
        ({"error": {"message": "m" * 900}}, r"^m{297}\.\.\.$"),
        ({"error": {"message": 3}}, "gives no reason"),
        ({"error": 3}, "gives no reason"),
    ],
)
def test_other_types_are_refused_by_their_names(fields, said):
    with pytest.raises(EngineError, match=said):
        event(**fields)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 9000, b'{"choices": NaN}', b'{"a": "\\ud800"}'])
def test_what_is_no_json_is_refused(data):
    with pytest.raises(EngineError, match="the server's answer is no JSON"):
        read_event(data)
    assert read_refusal(data, 503) == "HTTP status 503"


@pytest.mark.parametrize(
    "models", [None, {}, [], ["m"], [{}], [{"id": 3}], [{"id": ""}], [{"id": "m" * 2000}]]
)
def test_a_list_without_a_model_is_refused(models):
    with pytest.raises(EngineError, match=r"data(\[0\]\.id)? must be"):
        read_model(json.dumps({"data": models}).encode())


@pytest.mark.parametrize(
    "url", ["", "a", "ftp://a", "http://", "http://[::1", "http://a:b", "http://a:99999"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="URL must be an address"):
        read_address(url, ("http", "https"))
