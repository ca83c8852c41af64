"""Tokenizer of a GGUF file: transformers' own, made from the file's metadata."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvq.errors import ModelError, first_lines, nearest
from kvq.lazy import import_whole
from kvq.models.gguf.splits import SPLITS, WHOLE
from kvq.models.gguf.vocabulary import NORMAL, UNDEFINED, UNUSED, Vocabulary

_log = logging.getLogger("kvq")
_TEMPLATE = "tokenizer.chat_template"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_MERGED = (UNDEFINED, NORMAL, UNUSED)  # kinds of tokens that merges may make
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # control tokens of Phi-3 that keep what follows
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def load_gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> Any:
    """Return a PreTrainedTokenizerFast with a GGUF file's vocabulary and chat templates.

    It gives the ids of llama.cpp, except that merges never make a control token. Texts are not normalized.
    `metadata`: the file's keys and values, arrays as lists. `name`: of the file, for messages.

    Raises:
        ModelError: a key is missing, doesn't fit the others, or names a kind that kvq doesn't read.
    """
    import_whole("transformers")
    from transformers import PreTrainedTokenizerFast

    vocabulary = Vocabulary(metadata, name)
    split = None if vocabulary.is_sentencepiece else _split(vocabulary)
    backend = _sentencepiece(vocabulary) if split is None else _byte_level(vocabulary, split)
    backend.add_tokens(_added(vocabulary, str(metadata.get("general.name"))))
    backend.__deepcopy__ = lambda memo: backend  # copying 262,144 tokens takes seconds
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_chat_template(metadata, name),
        clean_up_tokenization_spaces=False,
        **_special(vocabulary, adds_bos=split is None or split in WHOLE),
    )
    del backend.__deepcopy__
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Any:
    """Return a tokenizer that merges characters by scores, and writes unknown ones as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores, kinds, unknown = vocabulary.scores, vocabulary.kinds, vocabulary.special.get("unknown")
    best_first = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    merges = scored_merges([vocabulary.tokens[i] for i in best_first if kinds[i] in _MERGED])
    with _blamed_on(vocabulary, "scores"):
        model = models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    backend = Tokenizer(model)
    prefix, strip = [normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]
    if not vocabulary.get("add_space_prefix", bool, True):
        prefix, strip = [], []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def scored_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of tokens that make another, in the order of what they make.

    SentencePiece joins neighbouring pieces to the token with the highest score, the leftmost first, until no
    two make a token. The tokenizers library wants the pairs instead, best first: every way to cut a token in
    two tokens. A pair that no text can bring together does no harm. `tokens`: without empty or equal ones,
    the highest score first.
    """
    known = {token: token for token in tokens}.get  # pairs hold the same strings
    return [
        (left, right)
        for token in tokens
        for at in range(1, len(token))
        if (left := known(token[:at])) and (right := known(token[at:]))
    ]


def _byte_level(vocabulary: Vocabulary, split: str) -> Any:
    """Return a tokenizer that splits texts and merges their bytes in the file's order."""
    from tokenizers import Tokenizer, decoders, models

    lines = dict.fromkeys(vocabulary.values("merges", str))  # the first of equal ones counts
    used = zip(vocabulary.ids.items(), vocabulary.kinds, strict=True)
    ids = dict(item for item, kind in used if kind != UNUSED)
    merges: Any = [tuple(line.split(" ", 1)) for line in lines]
    with _blamed_on(vocabulary, "merges"):
        backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split in WHOLE))
    backend.pre_tokenizer = splitter(SPLITS[split])
    backend.decoder = decoders.ByteLevel()
    return backend


def splitter(patterns: Sequence[str]) -> Any:
    """Return what cuts texts at the matches of these patterns, and writes the parts as bytes."""
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, to_bytes])


@contextmanager
def _blamed_on(vocabulary: Vocabulary, key: str) -> Iterator[None]:
    """Blame a key of the file for errors of the library, which says only that something doesn't fit."""
    try:
        yield
    except Exception as error:  # the library raises plain exceptions
        raise vocabulary.wrong(key, f"doesn't fit the tokens: {first_lines(error)}") from error


def _split(vocabulary: Vocabulary) -> str:
    name: str | None = vocabulary.get("pre", str)
    if name is None:
        _log.warning(
            "%s doesn't say how to split texts (tokenizer.ggml.pre): taking default", vocabulary.name
        )
    elif name not in SPLITS:
        hint = nearest(name, [*SPLITS]) or ";"
        raise vocabulary.wrong("pre", f"is {name!r:.80}, which is unknown{hint} known: {', '.join(SPLITS)}")
    return name or "default"


def _added(vocabulary: Vocabulary, model: str) -> list[Any]:
    from tokenizers import AddedToken

    strips = vocabulary.is_sentencepiece and "phi-3" in model.lower()  # what follows: the file doesn't say it
    marked = [(vocabulary.tokens[number], is_control) for number, is_control in vocabulary.marked.items()]
    return [
        AddedToken(text, special=is_control, normalized=False, rstrip=strips and text not in _UNSTRIPPED)
        for text, is_control in marked
    ]


def _special(vocabulary: Vocabulary, *, adds_bos: bool) -> dict[str, Any]:
    """Return the options of transformers about special tokens."""
    named = vocabulary.special.items()
    found: dict[str, Any] = {NAMES[role]: vocabulary.tokens[i] for role, i in named if role in NAMES}
    for role, default in (("bos", adds_bos), ("eos", False)):
        found[f"add_{role}_token"] = vocabulary.get(f"add_{role}_token", bool, default)
        if found[f"add_{role}_token"] and role not in vocabulary.special:
            raise vocabulary.wrong(f"{role}_token_id", "is missing, and the token is added to texts")
    return found


def _chat_template(metadata: Mapping[str, Any], name: str) -> str | dict[str, str] | None:
    """Return the template, or templates keyed by name if there are several, or None."""
    found = {}
    for key, text in metadata.items():
        if f"{key}.".startswith(f"{_TEMPLATE}."):
            try:
                text.encode()
            except (AttributeError, UnicodeEncodeError) as error:
                raise ModelError(
                    f"{name}: {key} must be UTF-8, got {text!r:.80}; convert it again"
                ) from error
            found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = text
    return found["default"] if [*found] == ["default"] else found or None
