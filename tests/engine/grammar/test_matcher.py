"""Masks, tokens and ends: the mask says what `accept` does."""

import random

import pytest
import torch

from kvq.engine.grammar.compiler import GrammarCompiler
from kvq.engine.grammar.source import GrammarLimits
from kvq.errors import RequestError
from tests.engine.grammar.conftest import VOCAB_SIZE
from tests.engine.grammar.walks import accepts, allowed_tokens, matcher_of

ODD_CHOICES = [
    "",
    "a",
    "ab",
    'q"uo\\te',
    "n\nl\t",
    "é😀",
    "<|endoftext|>",
    "a/b|c",
    "{x}[y]",
    "\x00\x7f",
    "^$.*",
]
SPECS = [
    {"regex": r"[a-c]{2,5}( \d+)?"},
    {"choice": ["yes", "yes please", "no"]},
    {"lark": 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"'},
    {"json_schema": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3}},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: next(iter(s)))
def test_mask_agrees_with_accept(compiler, spec):
    rng = random.Random(5)
    matcher = matcher_of(compiler, **spec)
    for _ in range(12):
        allowed = allowed_tokens(matcher)
        for token in rng.sample(allowed, min(20, len(allowed))):
            matcher.fork().accept(token)
        refused = sorted({*range(VOCAB_SIZE + 5)} - {*allowed}) if len(allowed) > 1 else [VOCAB_SIZE]
        for token in rng.sample(refused, min(20, len(refused))):
            with pytest.raises(RequestError, match=f"token {token} isn't allowed"):
                matcher.accept(token)  # and nothing moves
        matcher.accept(rng.choice(allowed))
        if matcher.is_finished:
            break


def test_mask_is_one_bit_a_logit(compiler):
    mask = matcher_of(compiler, regex="(?s:.*)").mask()
    assert mask.dtype == torch.int32
    assert mask.shape == (VOCAB_SIZE // 32,)


@pytest.mark.parametrize("vocab_size", [4096, 4097, 4127, 4160])
def test_ids_that_pad_the_logits_are_never_allowed(tokenizer, vocab_size):
    compiler = GrammarCompiler(tokenizer, vocab_size, eos_ids=[0])
    matcher = matcher_of(compiler, lark="start: <[*]> /a/")  # "any token" by id
    assert matcher.mask().shape == (-(-vocab_size // 32),)
    assert max(allowed_tokens(matcher)) < len(tokenizer)
    with pytest.raises(RequestError):
        matcher.accept(vocab_size - 1 if vocab_size > 4096 else vocab_size)
    compiler.close()


def test_regex_is_matched_in_full(compiler, tokenizer):
    assert accepts(compiler, tokenizer, "abc", regex="^abc$")
    assert accepts(compiler, tokenizer, "a/b", regex="a/b")
    assert not accepts(compiler, tokenizer, "ab", regex="abc")
    assert not accepts(compiler, tokenizer, "abcd", regex="abc")


@pytest.mark.parametrize("choice", ODD_CHOICES)
def test_choice_is_taken_literally(compiler, tokenizer, choice):
    assert accepts(compiler, tokenizer, choice, choice=ODD_CHOICES)
    assert not accepts(compiler, tokenizer, choice + "x", choice=ODD_CHOICES)


def test_lark_recursion(compiler, tokenizer):
    lark = 'start: start "+" term | term\nterm: /[0-9]+/ | "(" start ")"'
    assert accepts(compiler, tokenizer, "1+(2+(33))", lark=lark)
    assert not accepts(compiler, tokenizer, "1+(2+(33)", lark=lark)


def test_end_is_allowed_only_where_the_grammar_may_end(compiler, tokenizer):
    end = tokenizer.eos_token_id
    matcher = matcher_of(compiler, regex="ab?")
    assert end not in allowed_tokens(matcher)
    with pytest.raises(RequestError):
        matcher.accept(end)
    matcher.accept(tokenizer.encode("a")[0])
    assert end in allowed_tokens(matcher)
    assert not matcher.is_finished
    longer = matcher.fork()
    matcher.accept(end)
    assert matcher.is_finished
    longer.accept(tokenizer.encode("b")[0])
    assert longer.is_finished  # "ab" is all there can be
    assert allowed_tokens(longer) == [end]


def test_a_grammar_cannot_spell_an_end_token_in_its_middle(compiler, tokenizer):
    matcher = matcher_of(compiler, lark='start: "a" <|endoftext|> "b"')
    matcher.accept(tokenizer.encode("a")[0])
    with pytest.raises(RequestError, match="no token"):
        matcher.mask()


def test_several_end_tokens(tokenizer):
    compiler = GrammarCompiler(tokenizer, 4100, eos_ids=[0, 7])
    matcher = matcher_of(compiler, choice=["", "x"])
    assert {0, 7} <= set(allowed_tokens(matcher))
    matcher.accept(7)
    assert matcher.is_finished
    compiler.close()


def test_forks_move_apart(compiler, tokenizer):
    first = matcher_of(compiler, choice=["left", "right"])
    second = first.fork()
    before = second.mask()
    for token in tokenizer.encode("left"):
        first.accept(token)
    assert first.is_finished
    assert not second.is_finished
    assert torch.equal(second.mask(), before)
    for token in tokenizer.encode("right"):
        second.accept(token)
    assert second.is_finished


def wander(matcher, rng) -> None:
    for _ in range(500):
        matcher.accept(rng.choice([t for t in allowed_tokens(matcher) if t != 0]))


def test_a_step_that_takes_too_much_ends_that_request_only(tokenizer):
    limits = GrammarLimits(max_lexer_states=300)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, eos_ids=[0], limits=limits)
    spec = {"regex": "(.*a.{20})+"}  # a lexer of 2**20 states
    greedy, other = matcher_of(compiler, **spec), matcher_of(compiler, **spec)
    rng = random.Random(3)
    with pytest.raises(RequestError, match="too many states"):
        wander(greedy, rng)
    with pytest.raises(RequestError, match="too many states"):
        greedy.mask()
    assert not greedy.is_finished
    other.accept(allowed_tokens(other)[-1])
    assert matcher_of(compiler, **spec).mask().any()
    compiler.close()
