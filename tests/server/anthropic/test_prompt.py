"""Breakpoints: the tokens that lie before them, whatever a template makes of the turns."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from kvq.models.describe.resolve import EMBEDDED
from kvq.server.anthropic.bodies import MessagesBody
from kvq.server.anthropic.prompt import conversation, prompt_pins
from kvq.server.http.problems import Problem
from tests.server.templates import folder_with, prompts_of

MARK = {"type": "ephemeral"}
TRIMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# One turn a pair, the system's text within the first one; roles must alternate.
JOINS = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ first if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.name %}({{ m.name }}){% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The last turn comes first: nothing before it can be kept.
TURNS_ROUND = "{{ messages[-1].content }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module", params=[None, TRIMS, JOINS], ids=["plain", "trims", "joins"])
def prompts(request):
    yield from make(request.param)


def make(template):
    template = template or (EMBEDDED["tiny"] / "chat_template.jinja").read_text()
    with tempfile.TemporaryDirectory() as folder:
        prompts = prompts_of(folder_with(Path(folder), template))
        yield prompts
        prompts.close()


def marked(text, **control):
    return {"type": "text", "text": text, "cache_control": MARK | control}


def plain(text):
    return {"type": "text", "text": text}


def body(*turns, system=(), **fields):
    """Turns of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(turns)]
    return MessagesBody.model_validate(
        {"model": "tiny", "max_tokens": 1, "messages": messages, "system": list(system)} | fields
    )


def pins_of(prompts, asked):
    """The tokens, and the texts and times that are pinned."""

    async def run():
        tokens = await prompts.chat(conversation(asked))
        pins = await prompt_pins(prompts, asked, tokens, "")
        return tokens, [(await prompts.detokenize(tokens[: pin.length]), pin.seconds) for pin in pins]

    return asyncio.run(run())


def test_a_prefix_ends_with_its_block(prompts):
    asked = body(
        [plain("A story of the sea. "), marked("It begins in spring."), plain("And ends soon.")],
        "Once upon a time.",
        "Go on, please.",
        system=[marked("You tell stories.", ttl="1h"), plain(" Short ones.")],
    )
    _, found = pins_of(prompts, asked)
    (system, an_hour), (story, minutes) = found
    assert (an_hour, minutes) == (3600.0, 300.0)
    # A token may span a block's end, so that its last characters belong to the next one.
    assert system.endswith(("You tell stories", "You tell stories."))
    assert story.endswith(("It begins in spring", "It begins in spring."))


def test_the_prefix_is_the_same_whatever_follows(prompts):
    story = [marked("A story of the sea, and of those who sail it.  \n")]
    texts = set()
    for follows in ([], ["Yes?", "No."], ["Aye, aye!", "What then?", "A storm.", "And then?"]):
        tokens, [(text, _)] = pins_of(prompts, body(story, *follows))
        texts.add(text)
        other, _ = pins_of(prompts, body([plain(story[0]["text"] + "Other text.")], *follows))
        prefix = asyncio.run(prompts.tokenize(text, special=False))
        assert tokens[: len(prefix)] == prefix == other[: len(prefix)]
    assert len(texts) == 1


def test_turns_of_one_role_are_one_and_a_last_turn_of_the_assistant_is_continued(prompts):
    turns = [("user", "Hello."), ("user", "Who are you?"), ("assistant", "I am"), ("assistant", "the cap")]
    asked = MessagesBody(
        model="tiny", max_tokens=1, messages=[{"role": role, "content": text} for role, text in turns]
    )
    text = asyncio.run(prompts.detokenize(asyncio.run(prompts.chat(conversation(asked)))))
    assert "Hello.\n\nWho are you?" in text
    assert text.endswith("I am\n\nthe cap")


def test_nothing_is_pinned_that_changes_with_what_follows():
    for prompts in make(TURNS_ROUND):
        asked = body([marked("A story.")], "Yes?", "No.", system=[marked("Be kind.")])
        _, found = pins_of(prompts, asked)
        assert "A story." in found[1][0]
        assert all(text.startswith("No.<system>Be kind") for text, _ in found)
        [(text, _)] = pins_of(prompts, body([marked("A story.")]))[1]
        assert text in ("A story", "A story.")


def test_the_last_block_is_marked_by_a_mark_of_the_whole(prompts):
    asked = body("One.", "Two.", "Three.", cache_control=MARK)
    [(text, _)] = pins_of(prompts, asked)[1]
    assert text.endswith(("Three", "Three."))


def test_five_breakpoints_are_refused(prompts):
    asked = body([marked(f"Part {i}. ") for i in range(5)])
    with pytest.raises(Problem, match="may stand 4 times, it stands 5 times"):
        pins_of(prompts, asked)


@pytest.mark.parametrize("content", ["Then ", [], ""])
def test_a_last_turn_that_cannot_be_continued_is_refused(prompts, content):
    with pytest.raises(Problem, match="has to end in text, and not in white space"):
        pins_of(prompts, body("Hello.", content))


def test_tools_calls_and_results_are_marked_too():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first, last = ({"name": name, "description": "x", "input_schema": schema} for name in ("one", "two"))
    call = {"type": "tool_use", "id": "c1", "name": "one", "input": {"a": 1}, "cache_control": MARK}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "Done.", "cache_control": MARK}
    asked = body(
        [plain("Do it.")],
        [plain("Yes. "), call],
        [result, plain("Thanks.")],
        tools=[first | {"cache_control": MARK}, last],
    )
    for prompts in make(TOOLS):
        tokens, found = pins_of(prompts, asked)
        whole = asyncio.run(prompts.detokenize(tokens))
        assert whole.endswith('<assistant>Yes. one{"a": 1}<tool>Done.(one)<user>Thanks.<assistant>')
        (tool, _), (calls, _), (results, _) = found
        assert '"one"' in tool
        assert '"two"' not in tool
        assert tool.count("properties") == 1
        assert calls.endswith(("{", '"a": 1', '"a": '))
        assert results.endswith(("Done", "Done."))
        none = asked.model_copy(update={"tool_choice": asked.tool_choice.model_copy(update={"type": "none"})})
        tokens, [(nothing, _), _, _] = pins_of(prompts, none)
        assert nothing == "", "the model is not told of a tool that is marked"
        assert "two" not in asyncio.run(prompts.detokenize(tokens))
