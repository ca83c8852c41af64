"""What a model thinks is told from what it says, and grammars begin behind it."""

from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvq.engine import SamplingParams, StructuredOutput
from kvq.engine.grammar.source import GrammarLimits, grammar_text
from kvq.engine.grammar.worker import as_lark
from kvq.errors import ConfigError
from kvq.server.tools.thoughts import Thinking, Thoughts

THINK = Thinking(begin="<think>", end="</think>", end_id=9)
R1 = "{{ bos_token }}<Assistant><think>\n"
QWEN3 = "{% set content = content.split('</think>')[-1] %}"


def tokenizer(**added):
    """With added tokens: names by their ids, and whether they are special."""
    tokens = [type("Token", (str,), {"special": special})(text) for text, special in added.items()]
    return SimpleNamespace(added_tokens_decoder=dict(enumerate(tokens, 7)))


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "said"),
    [
        ("<think>\nI see.\n</think>\n\nHello", None, "I see.", "Hello"),
        ("\n<think>a</think>b", None, "a", "b"),
        ("I see. </thi no\n\n</think>\nHello\n", True, "I see. </thi no", "Hello\n"),
        ("no thought", None, "", "no thought"),
        ("<thin", None, "", "<thin"),
        ("<thing>", None, "", "<thing>"),
        ("cut off </th", True, "cut off </th", ""),
        ("<think></think>\n\nhi <think>", None, "", "hi <think>"),
        ("</think>x", True, "", "x"),
        ("said <think>x</think>", False, "", "said <think>x</think>"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_thoughts_are_told_apart_however_the_text_is_cut(text, is_open, thought, said, size):
    thoughts = Thoughts(THINK, is_open)
    ends = range(0, len(text), size)
    found = [thoughts.feed(text[at : at + size], is_last=at + size >= len(text)) for at in ends]
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == (thought, said)


def test_tokens_of_thoughts_are_counted_up_to_their_end():
    whole, streamed = Thoughts(THINK, True), Thoughts(THINK, True)
    whole.feed("ab</think>c", [1, 2, 9, 3], is_last=True)
    for text, token in (("a", 1), ("b", 2), ("</think>", 9), ("c", 3)):
        streamed.feed(text, [token])
    assert whole.num_tokens == streamed.num_tokens == 3


@pytest.mark.parametrize(
    ("before", "is_continued", "is_open"),
    [
        ("<Assistant><think>\n", False, True),
        ("<think>\n\n</think>\n\n", False, False),
        ("<Assistant></think>", False, False),
        ("<|im_start|>assistant\n", False, None),
        ("<think> I beg", True, True),
        ("<think>a</think> so", True, False),
        ("so", True, False),
    ],
)
def test_the_prompt_tells_where_a_text_begins(before, is_continued, is_open):
    assert THINK.is_open(before, is_continued=is_continued) is is_open


@pytest.mark.parametrize(
    ("added", "template", "name", "begin"),
    [
        ({}, R1 + "</think>", "auto", "<think>"),
        ({}, QWEN3, "auto", "<think>"),
        ({"<think>": False, "</think>": False}, "", "auto", "<think>"),
        ({"[THINK]": True, "[/THINK]": True}, "", "auto", "[THINK]"),
        ({}, "", "seed_oss", "<seed:think>"),
        ({}, "", "deepseek_r1", "<think>"),
        ({}, "plain", "auto", None),
        ({}, QWEN3, "none", None),
    ],
)
def test_markers_are_found_by_template_and_tokens_or_named(added, template, name, begin):
    found = Thinking.of(tokenizer(**added), template, name)
    assert (found.begin if found else None) == begin


def test_a_name_that_nobody_knows_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no reasoning parser 'thnk'; there are auto, none, think"):
        Thinking.of(tokenizer(), "", "thnk")


SPECS = [
    ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, '{"a":1}'),
    ({"regex": "[0-9]+"}, "42"),
    ({"choice": ["yes", "no"]}, "yes"),
    ({"lark": 'start: "yes" | "no"'}, "no"),
    ({"lark": 'root ::= "yes" | "no"'}, "no"),
]


@pytest.mark.parametrize(("spec", "answer"), SPECS, ids=lambda given: str(given)[:20])
@pytest.mark.parametrize("is_open", [True, None, False])
def test_grammars_begin_behind_thoughts(spec, answer, is_open):
    params = THINK.params(SamplingParams(structured=StructuredOutput(**spec)), is_open)
    text = as_lark(grammar_text(params.structured, GrammarLimits()))
    tokens = LLTokenizer("byte")

    def fits(words):
        matcher = LLMatcher(tokens, text, log_level=0)
        ids = tokens.tokenize_str(words)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    thought = "I {think} so.\n</think>\n\n" + answer
    assert fits(thought) is (is_open is True)
    assert fits("<think>" + thought) is (is_open is not False)
    assert fits(answer) is (is_open is not True)
    assert not fits(thought + " not this")


def test_markers_that_are_special_tokens_are_kept_and_stand_for_themselves():
    thinking = Thinking.of(tokenizer(**{"[THINK]": True, "[/THINK]": True}), "", "auto")
    params = thinking.params(
        SamplingParams(structured=StructuredOutput(regex="a"), kept_special_ids=(3,)), None
    )
    assert params.kept_special_ids == (3, 7, 8)
    assert "(<[7]> thought <[8]>" in params.structured.before
