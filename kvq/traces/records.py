"""Records of logs: a request and its answer, as they are or as tools wrap them."""

from typing import Any

from kvq.errors import ConfigError
from kvq.server.recording import RECORDING, VERSION
from kvq.traces.messages import chat_messages, chat_tools, checked, objects
from kvq.traces.sessions import RecordedSession

_REQUESTS = ("request", "request_body", "body", "input")
_ANSWERS = ("response", "response_body", "completion", "output")
_SESSIONS = [of + end for of in ("session", "conversation", "thread", "trace") for end in ("_id", "Id", "")]
_MAX_NAME = 200  # characters
_FORMS = "kvq reads OpenAI chat, OpenAI Responses, Anthropic messages, and its own recordings"


def read_record(record: Any) -> RecordedSession:
    """Return a record's conversation and answer; the name is the log's id of the session, or "".

    Raise ConfigError if there is no conversation, or one that kvq can't show to a model.
    """
    version = checked(record, dict, "a record").get(RECORDING, VERSION)
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"{RECORDING} has to be {VERSION}; another version of kvq wrote this")
    request = _request(record)
    given = request.get("input") if request.get("messages") is None else request["messages"]
    if given is None:
        found = "a prompt, as text completions have" if "prompt" in request else "neither"
        raise ConfigError(f"a record has to have messages or input, it has {found}; {_FORMS}")
    for key, remedy in (("functions", "use tools"), ("previous_response_id", "record whole conversations")):
        if request.get(key):
            raise ConfigError(f"the request has {key}, which kvq does not read; {remedy}")
    is_text = isinstance(given, str) and request.get("messages") is None
    items = [{"role": "user", "content": given}] if is_text else objects(given, "messages")
    tools = objects(request.get("tools"), "tools")
    is_anthropic = "system" in request or any("input_schema" in tool for tool in tools)
    joined = ("user", "assistant") if is_anthropic else ()
    messages = chat_messages(items + _items(_answer(record)), joined=joined)
    if system := request.get("system") or request.get("instructions"):
        messages = chat_messages([{"role": "system", "content": system}]) + messages
    if not messages:
        raise ConfigError("it has no message")
    return RecordedSession(name=_session(record, request), messages=messages, tools=chat_tools(tools))


def _request(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a record that holds the conversation: itself, or the request in it."""
    inner = [_inner(record[key]) for key in _REQUESTS if isinstance(record.get(key), dict)]
    return inner[0] if inner and record.get("messages") is None else record


def _answer(record: dict[str, Any]) -> Any:
    found = [_inner(record[key]) for key in _ANSWERS if record.get(key) is not None]
    return found[0] if found else record if "choices" in record or "content" in record else None


def _inner(value: Any) -> Any:
    """Return the body, if the value is an envelope of HTTP."""
    body = value.get("body") if isinstance(value, dict) else None
    return body if isinstance(body, dict) else value


def _items(answer: Any) -> list[dict[str, Any]]:
    """Return an answer's messages or items; of several answers, the first."""
    if answer is None or isinstance(answer, list):
        return objects(answer, "the response")
    if isinstance(answer, str):
        if answer.lstrip().startswith(("data:", "event:")):
            raise ConfigError("the response is a raw stream of events; kvq reads answers that are whole")
        return [{"role": "assistant", "content": answer}]
    if "choices" in checked(answer, dict, "the response"):
        answer = next(iter(objects(answer["choices"], "the response's choices")), {})
        if "message" not in answer:
            raise ConfigError("the response has no choices[0].message; kvq reads answers that are whole")
    if "message" in answer:
        return [{"role": "assistant"} | checked(answer["message"], dict, "the response's message")]
    if "content" in answer or "tool_calls" in answer:
        return [{"role": "assistant"} | {key: answer.get(key) for key in ("content", "tool_calls")}]
    if isinstance(answer.get("output"), list):
        return objects(answer["output"], "the response's output")
    found = "an error" if answer.get("error") else "of a form that kvq does not read"
    raise ConfigError(f"the response is {found}; {_FORMS}")


def _session(record: dict[str, Any], request: dict[str, Any]) -> str:
    for key in _SESSIONS:
        for place in (record, request, record.get("metadata"), request.get("metadata")):
            value = place.get(key) if isinstance(place, dict) else None
            value = value.get("id") if isinstance(value, dict) else value
            is_id = isinstance(value, str | int) and not isinstance(value, bool)
            if is_id and 0 < len(str(value)) <= _MAX_NAME:
                return str(value)
    return ""
