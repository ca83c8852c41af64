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
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "a file"),
}
_JSON = {str: "a text", bool: "a truth value", dict: "an object", list: "a list", type(None): "null"}
_ALLOWED = "sessions may hold texts, and calls of functions with their results"


def json_kind(value: Any) -> str:
    """Return a phrase that names the JSON type of a decoded value."""
    return _JSON.get(type(value), "a number")


def checked(value: Any, kind: type[T], where: str) -> T:
    """Return a value of this type; raise ConfigError if it is something else."""
    if not isinstance(value, kind):
        raise ConfigError(f"{where} has to be {_JSON[kind]}, it is {json_kind(value)}")
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
        for message in _messages(item, f"messages[{at}]", names):
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


def _messages(item: dict[str, Any], where: str, names: dict[str, str]) -> Iterator[Message]:
    kind = item.get("type", "message")
    if kind == "function_call":
        yield {"role": "assistant", "content": "", "tool_calls": [_call(item, "call_id", "arguments", where)]}
    elif kind == "function_call_output":
        ids = _texts({"tool_call_id": item.get("call_id")}, where)
        yield {"role": "tool", "content": _text(item.get("output"), where)} | ids
    elif kind == "message":
        yield from _turn(item, where, names)
    elif kind not in (*_HOSTED, *_THOUGHTS):
        raise ConfigError(f"{where} is of a kind that kvq does not read; {_ALLOWED}")


def _turn(item: dict[str, Any], where: str, names: dict[str, str]) -> Iterator[Message]:
    """Yield a message of texts and calls, unless it is empty, and one for each result that is a block."""
    if (role := _ROLES.get(str(item.get("role")))) is None:
        raise ConfigError(f"{where}.role has to be one of {', '.join(_ROLES)}")
    for key, found in (("function_call", "a call in OpenAI's old form"), ("audio", "audio")):
        if item.get(key) is not None:
            raise ConfigError(f"{where} holds {found}; {_ALLOWED}")
    texts, calls = list[str](), []
    content = item.get("refusal") if item.get("content") is None else item["content"]
    for at, part in enumerate(_parts(content, where)):
        kind, place = part.get("type"), f"{where}.content[{at}]"
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(part, "id", "input", place))
            names[calls[-1].get("id", "")] = calls[-1]["function"]["name"]
        elif kind == "tool_result" and role == "user":
            if text := "".join(texts):
                yield {"role": role, "content": text}
            texts.clear()
            ids = _texts({"tool_call_id": (id := part.get("tool_use_id"))}, place)
            named = _texts({"name": names.get(id or "")}, place)
            yield {"role": "tool", "content": _text(part.get("content"), place)} | ids | named
        else:
            texts.append(_text([part], place))
    for at, call in enumerate(objects(item.get("tool_calls"), f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{at}]"
        function = checked(call.get("function"), dict, f"{place}.function")
        calls.append(_call({**function, "id": call.get("id")}, "id", "arguments", place))
    own = _texts({"name": item.get("name"), "tool_call_id": item.get("tool_call_id")}, where)
    if any(texts) or calls or role == "tool":
        yield {"role": role, "content": "".join(texts)} | own | ({"tool_calls": calls} if calls else {})


def _call(given: dict[str, Any], id: str, arguments: str, where: str) -> dict[str, Any]:
    """Return a call; `id`, `arguments`: the protocol's names for these fields."""
    text = (
        "{}" if (text := given.get(arguments)) in (None, "") else text
    )  # servers write "" if there are none
    try:
        value = loads(text) if isinstance(text, str) else text
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {arguments} of a call have to be JSON of an object")
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    function = {"name": _name(given, where), "arguments": text}
    return _texts({"id": given.get(id)}, where) | {"type": "function", "function": function}


def _name(given: dict[str, Any], where: str) -> str:
    if given.get("name") in (None, ""):
        raise ConfigError(f"{where} has no name; functions need one")
    return checked(given["name"], str, f"{where}: name")


def _texts(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return those of the values that are not null, which have to be texts."""
    found = {key: value for key, value in values.items() if value is not None}
    return {key: checked(value, str, f"{where}: {key}") for key, value in found.items()}


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return objects(content, f"{where}.content")


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a string, null, or a list of parts."""
    texts = list[str]()
    for part in _parts(content, where):
        if (kind := str(part.get("type"))) in _TEXTS:
            texts.append(checked(part.get(_TEXTS[kind]), str, f"{where}: {_TEXTS[kind]}"))
        elif kind not in _THOUGHTS:
            noun = _MEDIA.get(kind, "a part of a kind that kvq does not read")
            raise ConfigError(f"{where} holds {noun}; {_ALLOWED}")
    return "".join(texts)
