"""Small worlds that worlds.json describes: their tools, requests and words."""

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("worlds.json").read_text(encoding="utf-8"))
RULES: str = _FILE["rules"]
WORLDS: dict[str, dict[str, Any]] = _FILE["worlds"]
NOTES: list[str] = _FILE["notes"]
WORDS = {
    kind: [" ".join(words) for words in product(*map(str.split, lists))]
    for kind, lists in _FILE["words"].items()
}
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form, of its parameters' schemas; those without a default are required."""
    required = [key for key, one in parameters.items() if "default" not in one]
    schema = {"type": "object", "properties": parameters, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def request(at: int, words: str, name: str, arguments: dict[str, Any], result: str) -> list[dict[str, Any]]:
    """Return a user's request, the one right call and its result, as message `at` and the next two."""
    call = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": f"call_{at:04d}", "type": "function", "function": call}
    return [
        {"role": "user", "content": words},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": result},
    ]


def pick(random: Random, kind: str) -> str:
    """Return a word of a kind, such as "people"."""
    return random.choice(WORDS[kind])


def code(random: Random, length: int) -> str:
    """Return letters and digits."""
    return "".join(random.choices(_LETTERS, k=length))
