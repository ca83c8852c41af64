"""Texts of grammars that spell special tokens: written with plain tokens, as any other text."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvq.engine.grammar.compiler import GrammarCompiler
from kvq.errors import RequestError
from tests.engine.grammar.walks import allowed_tokens, matcher_of

NAMES = ["<s>", "</s>", "<unk>", "<|end|>", "[PAD]", "<\uff5cend\u2581of\u2581text\uff5c>"]


def several_specials(alphabet, pairs) -> PreTrainedTokenizerFast:
    """Bytes, pairs of them, and special tokens."""
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *map("".join, pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(NAMES)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="module")
def small():
    pairs = [("<", "|"), ("e", "n"), ("x", "<")]  # which begin or cross special tokens' texts
    tokenizer = several_specials(sorted(pre_tokenizers.ByteLevel.alphabet()), pairs)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), eos_ids=[tokenizer.eos_token_id])
    yield compiler, tokenizer
    compiler.close()


def specs_of(name):
    """What has one text, and that text, in every language."""
    quoted = json.dumps(name, ensure_ascii=False)
    plain = name.replace("|", "\\|").replace("[", "\\[")
    required = {
        "type": "object",
        "properties": {name: {"const": 1}},
        "required": [name],
        "additionalProperties": False,
    }
    return [
        (name, {"choice": [name]}),
        (quoted, {"json_schema": {"const": name}}),
        (f"{{{quoted}:1}}", {"json_schema": required}),
        (f"x{plain}y".replace("\\", ""), {"regex": f"x{plain}y"}),
        (f"a{name}{name}", {"lark": f'start: "a{name}" b\nb: {quoted}'}),
        (f"a{name}b", {"lark": f'root ::= "a{name}b"'}),
    ]


def written(matcher, tokenizer):
    """The text of the first tokens that the mask offers, each of which is taken."""
    tokens = []
    while not matcher.is_finished and len(tokens) < 200:
        tokens.append(allowed_tokens(matcher)[0])
        matcher.accept(tokens[-1])
    assert matcher.is_finished
    assert not {*tokens} & ({*tokenizer.all_special_ids} - {tokenizer.eos_token_id})
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_spelled_with_plain_ones(small, name):
    compiler, tokenizer = small
    for text, spec in specs_of(name):
        assert written(matcher_of(compiler, **spec), tokenizer) == text, spec


def test_the_embedded_models_end_token_is_spelled(compiler, tokenizer):
    for text, spec in specs_of("<|endoftext|>"):
        assert written(matcher_of(compiler, **spec), tokenizer) == text, spec


def test_special_tokens_that_a_grammar_names_are_taken(small):
    compiler, tokenizer = small
    matcher = matcher_of(compiler, lark='start: "a" <|end|> "<|end|>"')
    special = tokenizer.convert_tokens_to_ids("<|end|>")
    for token in (tokenizer.encode("a")[0], special, tokenizer.convert_tokens_to_ids("<|")):
        assert allowed_tokens(matcher) == [token]
        matcher.accept(token)


def test_a_text_that_no_plain_token_begins_is_refused():
    tokenizer = several_specials(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"<"}), [])
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), eos_ids=[end])
    for name in ("</s>", "<|end|>"):
        with pytest.raises(RequestError, match="no token"):
            matcher_of(compiler, choice=[name]).mask()
    compiler.close()
