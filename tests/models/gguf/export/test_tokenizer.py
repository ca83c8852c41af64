"""Tokenizers in GGUF metadata: what comes back makes the same ids, and the others are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvq.errors import ModelError
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.gguf.export.tokenizer import _TEXTS, tokenizer_metadata
from kvq.models.gguf.splits import SPLITS, WHOLE
from kvq.models.gguf.tokenizer import load_gguf_tokenizer, splitter
from kvq.models.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TRAINED = [text * 4 for text in _TEXTS]


def wrapped(backend: Tokenizer, **given: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="model", **given)


def byte_level(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that splits as GGUF files call it."""
    backend = Tokenizer(models.BPE(ignore_merges=name in WHOLE))
    backend.pre_tokenizer, backend.decoder = splitter(SPLITS[name]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<eos>", "<bos>", "<eot>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(TRAINED, trainer)
    return wrapped(backend, eos_token="<eos>", bos_token="<bos>")


def scored(change: Callable[[dict[str, Any]], object] = lambda tree: None) -> PreTrainedTokenizerFast:
    """A small tokenizer as those made from SentencePiece are; `change`: of its tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), SPACE, *"helowrd"]
    made = [("h", "e"), ("l", "o"), ("l", "lo"), ("he", "llo"), (SPACE, "w"), ("o", "r"), (f"{SPACE}w", "or")]
    pieces += ["".join(pair) for pair in made]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=made, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    tree = json.loads(backend.to_str())
    change(tree)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return wrapped(Tokenizer.from_str(json.dumps(tree)), **special)


def test_texts_tell_all_ways_to_split_apart():
    cuts = {
        patterns: [splitter(patterns).pre_tokenize_str(text) for text in _TEXTS]
        for patterns in SPLITS.values()
    }
    assert len(cuts) > 8
    assert all(list(cuts.values()).count(cut) == 1 for cut in cuts.values())


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "deepseek-v3"])
def test_byte_level_tokenizers_come_back(name):
    tokenizer = byte_level(name)
    size = len(tokenizer) + 3
    metadata = tokenizer_metadata(tokenizer, size, [0, 2])
    assert SPLITS[metadata["tokenizer.ggml.pre"]] == SPLITS[name]
    assert (metadata["tokenizer.ggml.pre"] in WHOLE) == (name in WHOLE)
    kinds = metadata["tokenizer.ggml.token_type"]
    assert [*kinds[:4], *kinds[-3:]] == [CONTROL] * 3 + [NORMAL] + [UNUSED] * 3
    found = {role: metadata[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "eot")}
    assert found == {"bos": 1, "eos": 0, "eot": 2}


def test_tokens_with_scores_come_back():
    metadata = tokenizer_metadata(tokenizer := scored(), 300, [2])
    kinds, tokens = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.tokens"]
    assert (kinds[0], kinds[1], kinds[3], kinds[-1]) == (UNKNOWN, CONTROL, BYTE, UNUSED)
    assert kinds[tokens.index("<tool>")] == USER_DEFINED
    scores = metadata["tokenizer.ggml.scores"]
    assert scores[tokens.index("he")] > scores[tokens.index("lo")] > scores[tokens.index("hello")]
    assert metadata["tokenizer.ggml.add_space_prefix"] is True
    again = load_gguf_tokenizer(metadata, "model")
    for text in ("hello world", " hello<tool>world", "wörld\n"):
        assert again(text).input_ids == tokenizer(text).input_ids
        assert again.decode(again(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)


def test_the_embedded_models_tokenizer_and_templates():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["tiny"])
    tokenizer.chat_template = {"default": "{{ a }}", "tool_use": "{{ b }}"}
    metadata = tokenizer_metadata(tokenizer, 4096, [0])
    assert metadata["tokenizer.chat_template"] == "{{ a }}"
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ b }}"
    assert load_gguf_tokenizer(metadata, "x").chat_template == tokenizer.chat_template
    with pytest.raises(ModelError, match=r"has token \d+, and the embedding 100 rows"):
        tokenizer_metadata(tokenizer, 100, [0])


def unordered(tree: dict[str, Any]) -> None:
    """Merges of which two make one token, and not one after the other."""
    tree["model"]["vocab"]["el"] = 400
    tree["model"]["merges"] += [["e", "l"], ["hel", "lo"], ["l", "lo"]]
    tree["model"]["vocab"]["hel"] = 401


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrapped(Tokenizer(models.Unigram([("a", 0.0)]))), "is Unigram"),
        (lambda: wrapped(Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))), "is WordPiece"),
        (lambda: scored(unordered), "in an order that no scores"),
        (lambda: scored(lambda tree: tree.update(normalizer={"type": "Lowercase"})), "makes other ids"),
        (lambda: oddly_split(), "splits texts in none of the ways"),
    ],
)
def test_what_gguf_has_no_words_for_is_refused(make, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_metadata(make(), 500, [])


def oddly_split() -> PreTrainedTokenizerFast:
    tokenizer = byte_level("gpt-2")
    odd = pre_tokenizers.Split(Regex("o"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([odd, splitter(SPLITS["gpt-2"])])
    return tokenizer


def test_slow_tokenizers_are_refused(tmp_path: Path) -> None:
    class Slow:
        name_or_path = "model"

    with pytest.raises(ModelError, match=r"Slow of model is not made of a tokenizer\.json"):
        tokenizer_metadata(Slow(), 100, [])
