"""Of a conversation everything reaches the model, or is refused by name, whatever a chat template does.

`chat_templates/` holds templates of public families, written by hand after their published behaviour: which
roles, markers and errors there are, and how contents, tools, calls and results are read. The wording is not
the families'.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from kvq.errors import RequestError
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.models.run.prompts import PromptEncoder
from kvq.models.templates.forms import CALLS, TOOLS, try_out

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
MARK = "<\uff5ctool\u2581calls\u2581begin\uff5c>"  # DeepSeek's, by which its way of calling is known
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@cache
def tokenizer():
    return load_tokenizer(EMBEDDED["tiny"])


def encoder_of(template):
    """Of a tokenizer with a template of the test's; good until the next one is asked for."""
    tokenizer().chat_template = template
    return PromptEncoder(tokenizer())


def template_of(family):
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")


def say(text, role="user"):
    return {"role": role, "content": text}


def call(content=None, arguments='{"city": "Oslo"}', number="callnr001"):
    """A turn that calls a tool, as the server passes it on: a content that is null is left out."""
    made = {"id": number, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [made]} | ({} if content is None else {"content": content})


def result(text="rain", number="callnr001"):
    return {"role": "tool", "tool_call_id": number, "content": text}


def parts(*texts, role="user"):
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


ASKED = say("Where is Ada?")
TALKS = {  # turns, tools, and the words that have to arrive
    "user": ([ASKED], None, ["Where is Ada?"]),
    "parts": ([parts("Where is", "Ada?")], None, ["Where is", "Ada?"]),
    "system": ([say("In French.", "system"), ASKED], None, ["In French.", "Ada"]),
    "developer": ([say("In French.", "developer"), ASKED], None, ["In French.", "Ada"]),
    "both": (
        [say("In French.", "system"), say("Be kind.", "developer"), ASKED],
        None,
        ["In French.", "Be kind."],
    ),
    "late system": (
        [ASKED, say("At home.", "assistant"), say("Now in French.", "system"), say("And Bo?")],
        None,
        ["Now in French.", "At home.", "And Bo?"],
    ),
    "turns": ([ASKED, say("At home.", "assistant"), say("And Bo?")], None, ["Ada", "At home.", "And Bo?"]),
    "thought": (
        [ASKED, say("<think>\nHm.\n</think>\n\nAt home.", "assistant"), say("And Bo?")],
        None,
        ["At home.", "And Bo?"],
    ),
    "function": ([ASKED, say("rain", "function"), say("And Bo?")], None, ["rain"]),
    "System": ([say("In French.", "System"), ASKED], None, ["In French."]),
    "tools": ([ASKED], [TOOL], ["weather", "city"]),
    "call": ([ASKED, call(), result()], [TOOL], ["Oslo", "rain"]),
    "empty call": ([ASKED, call(""), result()], None, ["Oslo", "rain"]),
    "call and text": ([ASKED, call("Let me look."), result()], [TOOL], ["Let me look.", "Oslo", "rain"]),
    "two calls": (
        [ASKED, call(), result(), call(None, '{"city": "Rome"}', "callnr002"), result("sun", "callnr002")],
        None,
        ["Oslo", "rain", "Rome", "sun"],
    ),
    "went on": (
        [ASKED, call(), result(), say("It rains.", "assistant"), say("And Bo?")],
        None,
        ["Oslo", "rain", "It rains.", "And Bo?"],
    ),
}
NO_CALLS = {"tools", "call", "empty call", "call and text", "two calls", "went on"}
PLAIN = {"function", "System"}  # roles that nobody knows
REFUSED = {  # what each family has no place for; all else arrives
    "chatml": NO_CALLS,
    "command_r": NO_CALLS | {"both", "late system"} | PLAIN,
    "command_r7b": {"function"},
    "deepseek_r1": {"both"} | PLAIN,
    "deepseek_v3_1": PLAIN,
    "falcon": NO_CALLS | PLAIN,
    "functionary": set(),
    "gemma2": NO_CALLS | {"system", "developer", "both", "late system", "System"},
    "gemma3": NO_CALLS | {"both", "late system", "System"},
    "glm4_5": PLAIN,
    "gpt_oss": {"both", "late system"} | PLAIN,
    "granite3": set(),
    "hermes2_pro": PLAIN,
    "kimi_k2": set(),
    "llama2": NO_CALLS | {"both", "late system"} | PLAIN,
    "llama3_1": set(),
    "llama4": set(),
    "llava": NO_CALLS,
    "mistral_7b": NO_CALLS | {"both", "late system"} | PLAIN,
    "mistral_nemo": {"both", "late system", "call and text"} | PLAIN,
    "mistral_small_3_2": {"both", "late system"} | PLAIN,
    "olmo2": NO_CALLS | PLAIN,
    "phi3": NO_CALLS | PLAIN,
    "phi4": NO_CALLS | PLAIN,
    "phi4_mini": NO_CALLS,
    "qwen2_5": PLAIN,
    "qwen3": PLAIN,
    "qwen3_coder": set(),
    "smollm3": NO_CALLS | {"both", "late system"} | PLAIN,
    "zephyr": NO_CALLS | PLAIN,
}
SAYS = r"template (shows nothing of (message \d+|a call in message \d+|tool \d+)|refused this: \S|fails for)"


def test_each_family_says_what_it_has_no_place_for():
    assert set(REFUSED) == set(FAMILIES)
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_arrives_or_is_refused_by_name(family):
    encoder, refused = encoder_of(template_of(family)), {}
    for name, (turns, tools, words) in TALKS.items():
        try:
            tokens = encoder.encode_chat(turns, {"tools": tools, "add_generation_prompt": True})
        except RequestError as error:
            refused[name] = str(error)
            continue
        text = encoder.decode(tokens)
        if tools and encoder.forms.only_calls:  # which a header names
            words = [word for word in words if word not in ("weather", "city")]
        assert all(word in text for word in words), f"{name}: {text}"
        assert "None" not in text, f"{name}: {text}"
        assert not any(ill in text for ill in ('\\"city', "'city'")), f"{name}: {text}"
    assert set(refused) == REFUSED[family], refused
    assert all(re.search(SAYS, words) for words in refused.values()), refused


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_every_text_are_known(family):
    encoder, found = encoder_of(template_of(family)), 0
    for turns, tools, _ in TALKS.values():
        try:
            tokens, texts = encoder.read_chat(turns, {"tools": tools, "add_generation_prompt": True})
        except RequestError:
            continue
        assert len(texts) == len(turns)
        for turn, (first, last), following in zip(turns, texts, [*texts, (len(tokens), 0)][1:], strict=False):
            content = turn.get("content") or ""
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            if first <= last:
                found += 1
                is_joined = turn["role"] in ("system", "developer")  # and the last token the template's
                text = text.rpartition("</think>")[2]
                shown = encoder.decode(tokens[first : last + 1 + is_joined])
                assert text.strip() in shown or (is_joined and shown.strip() in text), (text, shown)
                assert last <= following[0] or following[0] > following[1]
            else:
                is_late = (
                    turn["role"] == "system" and turn is not turns[0]
                )  # some templates move it to the front
                assert is_late or not text.strip() or text.strip() not in encoder.decode(tokens)
    assert found >= len(TALKS) // 2


def test_a_text_is_not_taken_for_the_role_before_it():
    encoder = encoder_of(template_of("qwen2_5"))
    turns = [say("user", "system"), say("user"), say("assistant", "assistant"), say("user"), say("assistant")]
    tokens, texts = encoder.read_chat(turns, {"add_generation_prompt": True})
    marks = [at for at, token in enumerate(tokens) if encoder.decode([token]).startswith("<|im_start|")]
    assert len(texts) == len(turns)
    for turn, (first, last) in zip(turns, texts, strict=True):
        before = encoder.decode(tokens[max(0, first - 12) : first])
        assert before.endswith(f"{turn['role']}\n"), (before, marks)
        assert turn["content"] in encoder.decode(tokens[first : last + 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_renders_a_few_times(family):
    encoder = encoder_of(template_of(family))
    rendered = []

    def render(*given):
        rendered.append(given)
        return encoder._render(*given)

    forms = try_out(render, template_of(family), None)
    assert forms.shown == encoder.forms.shown
    assert len(rendered) <= (17 if CALLS in forms.shown else 26)


def text_of(template, *turns, **options):
    """What reaches the model."""
    encoder = encoder_of(template)
    return encoder.decode(encoder.encode_chat(list(turns), options))


EACH = "{% for m in messages %}"
OF_PARTS = (
    EACH
    + "{{ m.role }}={% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %};"
    "{% endfor %}"
)
OF_TEXTS = EACH + "{{ m.role }}={{ m.content }};{% endfor %}"
FOUR = (
    EACH + "{% if m.role in ['system', 'user', 'assistant', 'tool'] %}{{ m.role }}={{ m.content }};"
    "{% endif %}{% endfor %}"
)


def test_contents_are_given_as_parts_where_a_template_takes_no_texts():
    for template in (OF_PARTS, OF_TEXTS):
        assert text_of(template, ASKED, parts("a ", "b", role="tool")) == "user=Where is Ada?;tool=a b;"
    mixed = (
        EACH + "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}"
    )
    assert text_of(mixed, say("Be kind", "system"), ASKED) == "Be kind.Where is Ada?"


def test_parts_are_known_as_such_though_a_control_token_has_their_type_in_its_name():
    """`text` is a part of <|endoftext|>: hidden, no template would know it."""
    assert "a<|endoftext|>" in text_of(OF_PARTS, say("a<|endoftext|>"))
    end = tokenizer().convert_tokens_to_ids("<|endoftext|>")
    assert end not in encoder_of(OF_PARTS).encode_chat([say("a<|endoftext|>")], {})


OF_NONE = (
    EACH
    + "{% if m['content'] is none %}"
    + MARK
    + "{% for c in m['tool_calls'] %}{{ c['function']['name'] }}"
    "({{ c['function']['arguments'] }}){% endfor %}{% else %}{{ m['role'] }}={{ m['content'].strip() }}"
    "{% endif %};{% endfor %}"
)


@pytest.mark.parametrize("content", [None, "", "Let me look."])
def test_a_call_reaches_a_template_that_asks_whether_there_is_content(content):
    said = "assistant=Let me look.;" if content else ""
    shown = f'user=Where is Ada?;{said}{MARK}weather({{"city": "Oslo"}});tool=rain;'
    assert text_of(OF_NONE, ASKED, call(content), result()) == shown
    undefined = OF_NONE.replace("m['content'] is none", "m['content'] is not defined")
    assert text_of(undefined, ASKED, call(content), result()) == shown
    missing = OF_NONE.replace("m['content'] is none", "'content' not in m")
    assert text_of(missing, ASKED, call(content), result()) == shown


def test_no_content_is_not_the_word_none():
    shows = (
        EACH
        + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %};{% endfor %}"
    )
    wanted = 'Where is Ada?;{"name": "weather", "arguments": {"city": "Oslo"}};rain;'
    assert text_of(shows, ASKED, call(), result()) == wanted
    assert text_of(shows, ASKED, call(""), result()) == wanted
    with_none = "If None fits, ask.{% if tools %}{{ tools }}{% endif %}" + shows
    assert text_of(with_none, ASKED, call(), result()) == "If None fits, ask." + wanted


@pytest.mark.parametrize(
    ("shows", "wanted"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Oslo"}'),
        (MARK + "{{ c.function.arguments | tojson }}", MARK + '{"city": "Oslo"}'),
        ("{{ 'call ' + c.function.name + c.function.arguments }}", 'call weather{"city": "Oslo"}'),
        ("{{ c.function.arguments }}", '{"city": "Oslo"}'),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "city=Oslo"),
        ("{{ c.function.name }}({{ c.function.arguments.city }})", None),
    ],
)
def test_arguments_are_objects_or_texts_by_what_the_template_does(shows, wanted):
    template = (
        EACH + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + shows + "{% endfor %};{% endfor %}"
    )
    if wanted is None:  # it would show no others
        with pytest.raises(RequestError, match="nothing of a call in message 2"):
            text_of(template, ASKED, call(), result())
    else:
        assert text_of(template, ASKED, call(), result()) == f"Where is Ada?;{wanted};rain;"


def test_a_developer_is_the_system_unless_the_template_knows_developers():
    told = say("In French.", "developer")
    assert text_of(FOUR, told, ASKED) == "system=In French.;user=Where is Ada?;"
    assert text_of(OF_TEXTS, told, ASKED).startswith("system=In French.")
    assert text_of(FOUR.replace("'system'", "'developer'"), told, ASKED).startswith("developer=In French.")


@pytest.mark.parametrize(
    ("turns", "tools", "says"),
    [
        (
            [say("a", "function")],
            None,
            "message 1, whose role is 'function'; it knows system, user, assistant, tool",
        ),
        ([say("a", "System"), ASKED], None, "it knows .*; did you mean 'system'?"),
        (
            [ASKED, call()],
            None,
            "nothing of a call in message 2; say in the message's content what was called",
        ),
        ([ASKED], [TOOL, TOOL], "nothing of tool 1, so the model would not know of it; leave it out"),
    ],
)
def test_what_a_template_has_no_place_for_is_refused(turns, tools, says):
    with pytest.raises(RequestError, match=says):
        text_of(FOUR, *turns, tools=tools)
    assert encoder_of(FOUR).forms.lacking == "tools, calls"


def test_one_that_is_lost_among_others_is_found():
    """The same words elsewhere in the conversation don't hide it, nor does a later one that is shown."""
    last = (
        "{% set ns = namespace(s='') %}"
        + EACH
        + "{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    )
    with pytest.raises(RequestError, match="message 1 of role 'system', there"):
        text_of(
            last + EACH + "{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
            say("a", "system"),
            say("a"),
            say("a", "system"),
        )
    one = (
        EACH
        + "{{ m.content }}{% for c in (m.tool_calls or [])[:1] %}{{ c.function }}{% endfor %}{% endfor %}"
    )
    twice = call("") | {"tool_calls": [*call()["tool_calls"], *call(None, "{}", "callnr002")["tool_calls"]]}
    with pytest.raises(RequestError, match="nothing of a call in message 2"):
        text_of(one, ASKED, twice)


def test_templates_that_change_texts_lose_nothing():
    for change in ("trim", "upper", "lower", "title", "tojson", "replace('Ada', 'Bo')", "truncate(9, True)"):
        assert text_of(
            EACH + "{{ m.content | " + change + " }}{% endfor %}", say(" Where is Ada? "), say("x")
        )
    merged = "{{ messages | map(attribute='content') | join(' ') }}"
    assert text_of(merged, say("b", "system"), ASKED, say("c")) == "b Where is Ada? c"


def test_empty_texts_and_broken_arguments_are_taken_as_they_are():
    assert text_of(FOUR, say(""), {"role": "assistant"}, say(" \n")) == "user=;assistant=;user= \n;"
    objects = (
        EACH + "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name ~ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    for arguments, shown in (("", "{}"), ("{}", "{}"), ("[1]", "[1]"), ("{no", '"{no"'), ("no}", '"no}"')):
        assert text_of(objects, ASKED, call("", arguments)) == f"Where is Ada?;weather{shown};"


def test_a_template_that_fails_for_all_is_tried_and_says_so():
    for template in ("{{ raise_exception('no') }}", "{% if %}", "{{ none + 1 }}"):
        encoder = encoder_of(template)
        assert encoder.forms.shown == frozenset()
        with pytest.raises(RequestError, match=r"chat template (refused this: no|fails for this)"):
            encoder.encode_chat([ASKED], {})


@pytest.mark.parametrize("family", [name for name in FAMILIES if "tools" not in REFUSED[name]])
def test_tools_may_leave_out_what_openai_lets_them(family):
    for given in ({}, {"description": "of a city"}, {"parameters": TOOL["function"]["parameters"]}):
        tool = {"type": "function", "function": {"name": "weather", **given}}
        shown = text_of(template_of(family), ASKED, tools=[tool, TOOL], add_generation_prompt=True)
        assert encoder_of(template_of(family)).forms.only_calls or "weather" in shown


def test_tools_are_given_as_they_are_unless_the_template_fails():
    bare = {"type": "function", "function": {"name": "weather"}}
    assert '{"name": "weather"}' in text_of(OF_TEXTS + "{{ tools | tojson }}", ASKED, tools=[bare])
    reads = OF_TEXTS + "{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
    schema = "{{ t.function.parameters | tojson }}{% endfor %}"
    ended = 'weather{"type": "object", "properties": {}}'
    assert text_of(reads + schema, ASKED, tools=[bare]).endswith(ended)
    told = {"type": "function", "function": {"name": "weather", "description": "!"}}
    assert text_of(reads + schema, ASKED, tools=[told]).endswith(ended.replace("r{", "r!{"))
    unread = "{{ t.function.title.lower() }}{% endfor %}"
    with pytest.raises(RequestError, match=r"tool 1|no attribute 'title'"):
        text_of(reads + unread, ASKED, tools=[bare])


@pytest.mark.parametrize(
    ("shows", "wanted"),
    [
        ("<|{{ m.role }}|>{{ m.name }}: {{ m.content }}", "<|tool|>weather: rain"),
        ("<|{{ m.role }}|>{{ m.content }}", "<|tool|>rain"),
        ("{% if not m.name %}<|{{ m.role }}|>{{ m.content }}{% endif %}", "<|tool|>rain"),
        ("<|{{ m.role }}|>{{ m.name or m.content }}", "<|tool|>rain"),  # a name alone is no result
    ],
)
def test_a_function_is_named_beside_its_result_where_that_can_be_seen(shows, wanted):
    calls = "{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}"
    assert text_of(EACH + shows + calls + "{% endfor %}", ASKED, call(), result()).endswith(wanted)


def test_names_that_a_template_reads_are_known():
    read = (
        "{% set x = x | default(1) %}{% macro a() %}{{ y }}{% endmacro %}"
        "{% generation %}{{ a() }}{% endgeneration %}{% break %}"
    )
    assert encoder_of(
        "{% for m in messages %}" + read + "{% endfor %}{% set z = 1 %}{{ z }}"
    ).forms.variables >= {"x", "y"}
    assert "z" not in encoder_of("{% set z = 1 %}{{ z }}").forms.variables
    assert encoder_of("{% if %}").forms.variables is None
    both = encoder_of({"default": "{{ messages[0].content }}{{ a }}", "tool_use": "{{ tools }}{{ b }}"})
    assert both.forms.variables >= {"a", "b"}
    assert both.forms.shown >= {"user", TOOLS}
