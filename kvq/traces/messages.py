"""Messages of OpenAI's and Anthropic's protocols, converted to OpenAI's chat form.

Contents become strings, arguments of calls become JSON texts, and thinking is left out. Errors name places
and kinds of values, never their texts.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from kvq.errors import ConfigError
from kvq.strict_json import loads

T = TypeVar("T")
Message = dict[str, Any]
_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_TEXTS = {"refusal": "refusal"} | dict.fromkeys(("text", "input_text", "output_text"), "text")  # their keys
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
# Items of what OpenAI's servers do themselves; a log does not hold the results
_HOSTED = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools")
_MEDIA = {"image": "an image", "audio": "audio", "file": "a file", "document": "a file"}
_JSON = {str: "a text", bool: "a truth value", dict: "an object", list: "a list", type(None): "null"}
_ALLOWED = "sessions may hold texts, and calls of functions with their results"


def checked(value: Any, kind: type[T], where: str) -> T:
    """Return a value of this type; raise ConfigError if it is something else."""
    if not isinstance(value, kind):
        raise ConfigError(f"{where} has to be {_JSON[kind]}, it is {_JSON.get(type(value), 'a number')}")
    return value


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, for null an empty one; raise ConfigError if the value is something else."""
    items = checked([] if value is None else value, list, where)
    return [checked(item, dict, f"{where}[{at}]") for at, item in enumerate(items)]


def chat_messages(items: Any, *, joined: Sequence[str] = ()) -> list[Message]:
    """Convert messages of a chat, turns of Anthropic's protocol, or items of a Responses request.

    Neighbours of a role in `joined` become one message, and calls that are items join the message before.
    Raise ConfigError if there is more than texts and calls of functions, or a value of a wrong type.
    """
    found: list[Message] = []
    names: dict[str, str] = {}  # of called functions, keyed by call id
    for at, item in enumerate(objects(items, "messages")):
        is_call = item.get("type") == "function_call"
        for message in _messages(_turn(item, f"messages[{at}]"), f"messages[{at}]", names):
            last: Message = found[-1] if found else {"role": None}
            if last["role"] != message["role"] or not (is_call or message["role"] in joined):
                found.append(message)
                continue
            last["content"] = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
    return found


def chat_tools(given: Any) -> list[dict[str, Any]]:
    """Convert functions of any of the protocols; tools that its servers run are left out."""
    found = []
    for at, tool in enumerate(objects(given, "tools")):
        where, kind = f"tools[{at}]", tool.get("type", "custom")
        if kind == "function" or (kind == "custom" and "input_schema" in tool):
            own = checked(tool.get("function", tool), dict, f"{where}.function")
            function = _texts({"name": _name(own, where), "description": own.get("description")}, where)
            if (schema := own.get("parameters", own.get("input_schema"))) is not None:
                function["parameters"] = checked(schema, dict, f"{where}.parameters")
            found.append({"type": "function", "function": function})
    return found


def _turn(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an item of a Responses request as a turn of a chat; it is empty for what a log does not hold."""
    kind = item.get("type", "message")
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": item}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind in (*_HOSTED, *_THOUGHTS):
        return {"role": "assistant"}
    if kind != "message":
        raise ConfigError(f"{where} is of a kind that kvq does not read; {_ALLOWED}")
    return item


def _messages(turn: dict[str, Any], where: str, names: dict[str, str]) -> Iterator[Message]:
    """Yield a message of texts and calls, unless it is empty, and one for each result that is a block."""
    if (role := _ROLES.get(str(turn.get("role")))) is None:
        raise ConfigError(f"{where}.role has to be one of {', '.join(_ROLES)}")
    for key, found in (("function_call", "a call in OpenAI's old form"), ("audio", "audio")):
        if turn.get(key) is not None:
            raise ConfigError(f"{where} holds {found}; {_ALLOWED}")
    texts, calls = list[str](), []
    content = turn.get("refusal") if turn.get("content") is None else turn["content"]
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for at, part in enumerate(objects(content, f"{where}.content")):
        kind, place = part.get("type"), f"{where}.content[{at}]"
        if kind == "tool_use" and role == "assistant":
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append(_call({"id": part.get("id"), "function": function}, place))
            names[calls[-1].get("id", "")] = calls[-1]["function"]["name"]
        elif kind == "tool_result" and role == "user":
            if text := "".join(texts):
                yield {"role": role, "content": text}
            texts.clear()
            id = part.get("tool_use_id")
            result = {"role": "tool", "content": part.get("content"), "tool_call_id": id}
            yield from _messages(result | {"name": names.get(str(id or ""))}, place, names)
        else:
            texts.append(_text(part, place))
    for at, call in enumerate(objects(turn.get("tool_calls"), f"{where}.tool_calls")):
        calls.append(_call(call, f"{where}.tool_calls[{at}]"))
    if any(texts) or calls or role == "tool":
        own = _texts({key: turn.get(key) for key in ("name", "tool_call_id")}, where)
        yield {"role": role, "content": "".join(texts)} | own | ({"tool_calls": calls} if calls else {})


def _call(given: dict[str, Any], where: str) -> dict[str, Any]:
    function = checked(given.get("function"), dict, f"{where}.function")
    if (text := function.get("arguments")) in (None, ""):  # servers write "" if there are none
        text = "{}"
    try:
        value = loads(text) if isinstance(text, str) else text
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: arguments of a call have to be JSON of an object")
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    call = {"type": "function", "function": {"name": _name(function, where), "arguments": text}}
    return _texts({"id": given.get("id")}, where) | call


def _name(given: dict[str, Any], where: str) -> str:
    if given.get("name") in (None, ""):
        raise ConfigError(f"{where} has no name; functions need one")
    return checked(given["name"], str, f"{where}: name")


def _texts(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return those of the values that are not null, which have to be texts."""
    found = {key: value for key, value in values.items() if value is not None}
    return {key: checked(value, str, f"{where}: {key}") for key, value in found.items()}


def _text(part: dict[str, Any], where: str) -> str:
    """Return the text of a part of a content; thoughts have none."""
    if (kind := str(part.get("type"))) in _TEXTS:
        return checked(part.get(_TEXTS[kind]), str, f"{where}.{_TEXTS[kind]}")
    if kind in _THOUGHTS:
        return ""
    medium = kind.removeprefix("input_").removesuffix("_url")
    noun = _MEDIA.get(medium, "a part of a kind that kvq does not read")
    raise ConfigError(f"{where} holds {noun}; {_ALLOWED}")
