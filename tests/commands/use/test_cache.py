"""kvq cache explain: what two prompts share, and why not more."""

import json
from typing import Any

import pytest

from tests.helpers_hybrids import hybrid_folder

SYSTEM = "You are a helpful person. Today is {day}, and we talk about the sea and the weather."
TURNS = ("Tell me about the old ship that sailed to the north.", "It sailed.", "And then?")
TOOL = {"type": "function", "function": {"name": "go", "description": "goes", "parameters": {}}}


def chat(day: str = "Monday", turns: tuple[str, ...] = TURNS[:1], **more: Any) -> dict[str, Any]:
    """A chat request."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": SYSTEM.format(day=day)}, *said], **more}


@pytest.fixture
def explained(tmp_path, kvq):
    """Explain two prompts; returns what was written as JSON and what was printed."""

    def run(a: Any, b: Any, *options: Any) -> tuple[dict[str, Any], str]:
        for name, prompt in (("a", a), ("b", b)):
            (tmp_path / f"{name}.json").write_text(json.dumps(prompt), encoding="utf-8")
        files = tmp_path / "a.json", tmp_path / "b.json"
        code, out, err = kvq("cache", "explain", *files, "--json", tmp_path / "found.json", *options)
        assert code == 0, err
        return json.loads((tmp_path / "found.json").read_text()), out

    return run


def test_the_same_prompt_has_no_cause(explained):
    found, out = explained(chat(), chat(), "--block-size", 8)
    count = found["tokens"][0]
    assert found["miss"] is None
    assert found["common_tokens"] == count
    assert found["reused_tokens"] == (count - 1 if count % 8 == 0 else count // 8 * 8)
    assert f"the prompts are equal; the last {count - found['reused_tokens']} tokens are computed" in out


def test_equal_prompts_of_less_than_a_block_are_said_to_be_equal(explained):
    _, out = explained({"prompt": [5, 6, 7]}, {"prompt": [5, 6, 7]})
    assert "the prompts are equal; the last 3 tokens are computed again" in out
    assert "longer" not in out


@pytest.mark.parametrize(
    ("b", "cause", "message", "part"),
    [
        (chat("Friday"), "changed_text", 1, "text"),
        (chat(turns=("Tell me of the ship.",)), "changed_text", 2, "text"),
        (chat(turns=(TURNS[0][:-7],)), "changed_text", 2, "text"),
        (chat(tools=[TOOL]), "template", 1, "template"),
        (chat(turns=TURNS), "new_text", 3, "template"),
        (chat(cache_salt="x"), "salt", 1, "template"),
        ({"prompt": "Something else."}, "new_text", None, None),
    ],
    ids=["day", "question", "shorter", "tools", "turns", "salt", "other"],
)
def test_causes_and_places(explained, b, cause, message, part):
    found, out = explained(chat(), b, "--block-size", 4)
    assert found["miss"]["cause"] == cause
    assert (found["miss"].get("message"), found["miss"].get("part")) == (message, part)
    assert f"\n{cause}: token {found['miss']['token']:,}" in out
    assert found["shared_blocks"] == found["reused_tokens"] // 4
    if cause in ("changed_text", "template"):
        assert found["miss"]["token"] == found["common_tokens"] >= found["reused_tokens"]


def test_token_ids(explained):
    found, _ = explained({"prompt": [*range(9, 30)]}, {"prompt": [*range(9, 25), 5, 6]}, "--block-size", 8)
    assert found["tokens"] == [21, 18]
    assert found["miss"] == {"cause": "new_text", "token": 16}
    found, _ = explained({"prompt": [*range(9, 33)]}, {"prompt": [*range(9, 28), 5, 6]}, "--block-size", 8)
    assert found["miss"] == {"cause": "changed_text", "token": 19}
    assert (found["common_tokens"], found["shared_blocks"], found["reused_tokens"]) == (19, 2, 19)


def test_a_hybrid_lacks_a_snapshot(explained):
    ids = list(range(3, 70))
    found, out = explained(
        {"prompt": ids}, {"prompt": ids[:40]}, "--block-size", 16, "--model", hybrid_folder("lfm2")
    )
    assert found["miss"] == {"cause": "no_snapshot", "token": 0, "lost_tokens": 32}
    assert "no recurrent state" in out


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {"prompt": 5},
        {"prompt": [-1]},
        {"messages": 5},
        {"messages": [5]},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5},
        {"prompt": "x", "cache_salt": 5},
        {"prompt": ""},
        "text",
    ],
)
def test_what_has_no_prompt_is_refused_in_a_line(tmp_path, kvq, wrong):
    (tmp_path / "a.json").write_text(json.dumps(wrong), encoding="utf-8")
    code, _, err = kvq("cache", "explain", tmp_path / "a.json", tmp_path / "a.json")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("kvq: error: ")
    assert "a.json" in err
    assert "Error" not in err
