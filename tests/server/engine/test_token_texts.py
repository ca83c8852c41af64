"""Single tokens as text and bytes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvq.models.describe.resolve import resolve_model
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.server.engine.token_texts import TokenTexts

TEXT = "Über 1,000 “cities” 😀\t and\n 東京"


def sentencepiece():
    """Like Llama 2's: words, spaces as U+2581, bytes for all else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁", "sea", "é"]
    core = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("make", [lambda: load_tokenizer(resolve_model("tiny").folder), sentencepiece])
def test_the_bytes_of_all_tokens_are_the_texts(make):
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert b"".join(map(texts.raw, ids)).decode() == TEXT
    parts = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert [texts.text(token) for token in parts[-4:]] == [f"bytes:\\x{byte:02x}" for byte in "😀".encode()]


def test_whole_characters_special_tokens_and_spaces_are_text():
    tokenizer = load_tokenizer(resolve_model("tiny").folder)
    texts = TokenTexts(tokenizer)
    assert texts.text(tokenizer.eos_token_id) == "<|endoftext|>"
    assert texts.text(tokenizer(" the", add_special_tokens=False)["input_ids"][0]).startswith(" ")
    sea = sentencepiece()
    assert TokenTexts(sea).text(sea.convert_tokens_to_ids("▁the")) == " the"
    assert TokenTexts(sea).text(sea.convert_tokens_to_ids("<0x41>")) == "A"


def test_every_token_of_a_vocabulary_has_a_text_of_its_own():
    tokenizer = load_tokenizer(resolve_model("tiny").folder)
    texts = TokenTexts(tokenizer)
    assert len({texts.text(token) for token in range(len(tokenizer))}) == len(tokenizer)


def test_what_is_written_in_an_unknown_way_is_decoded():
    class Unknown:
        def convert_ids_to_tokens(self, token):
            return f"##{token}"

        def decode(self, tokens):
            return f"<{tokens[0]}>"

    texts = TokenTexts(Unknown())
    assert (texts.text(3), texts.raw(3)) == ("<3>", b"<3>")


@pytest.mark.parametrize("prompt", ["the sea", " the  sea", "<s>the", "the"])
def test_offsets_of_an_echoed_prompt_are_places_in_the_text_that_was_sent(prompt):
    """Whatever the tokenizer put before it, which has no place there."""
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ids = [tokenizer.bos_token_id, *tokenizer(" " + prompt, add_special_tokens=False)["input_ids"]]
    told = TokenTexts(tokenizer).completion_logprobs(ids, [None] * len(ids), 0, within=prompt)
    assert told["text_offset"][0] == 0
    assert told["text_offset"] == sorted(told["text_offset"])
    assert told["text_offset"][-1] <= len(prompt)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if token.strip() and token != "<s>":
            assert prompt[offset:].lstrip().startswith(token.strip())
