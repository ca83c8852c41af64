"""Metadata of a GGUF file that stand for a tokenizer: the reverse of `load_gguf_tokenizer`.

The result is read back, and must make the same ids of texts of many scripts. A normalization to NFC, which
GGUF has no words for, is left out.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from kvq.errors import ModelError
from kvq.models.gguf.splits import SPLITS, WHOLE
from kvq.models.gguf.tokenizer import NAMES, SPACE, load_gguf_tokenizer, splitter
from kvq.models.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_KEY = "tokenizer.ggml."
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_LOWEST = -1e6  # score of tokens that no merge makes
_TEXTS = (  # every set of patterns in SPLITS cuts them in its own way
    "Hello, world's 12345 plain `words`; they'LL cost $3,456.78 (50%)... <b>&amp;</b>",
    "  def f(x):\n\treturn x**2  # f'{x}'\r\n\n\n    if a_b != c->d:   \n",
    "Стро́ка и ЗАГЛАВНАЯ; ελληνικά, العربية, हिन्दी में, 한국어 텍스트, ไทย",
    "日本語のテキスト、中文字符。½ x² €5 🙂👍🏽 camelCaseWord HTTPServer o'Neil WE'RE ver2.0 a/b\\c",
)


def tokenizer_metadata(tokenizer: Any, vocab_size: int, end_ids: Iterable[int]) -> dict[str, Any]:
    """Return the metadata of one of transformers' tokenizers; `vocab_size`: rows of the embedding.

    `end_ids`: all tokens that end a text or a turn.

    Raises:
        ModelError: GGUF, or kvq's reading of it, has no such tokenizer; the message says why.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(tokenizer, "is not made of a tokenizer.json")
    tree = json.loads(backend.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise _refused(tokenizer, f"is {model['type']}, and llama.cpp's BPE is all that kvq writes")
    is_bytes = "ByteLevel" in json.dumps(tree["pre_tokenizer"])
    if is_bytes:
        own: dict[str, Any] = {"model": "gpt2", "pre": _split(tokenizer, backend, model)}
        own["merges"] = [" ".join(pair) for pair in model["merges"]]
    else:
        own = {"model": "llama", "scores": _scores(tokenizer, model, vocab_size)}
        own["add_space_prefix"] = "".join(tokenizer.tokenize("a")).startswith(SPACE)
    whole = tokenizer("a").input_ids
    tokens, kinds = _vocabulary(tokenizer, tree, vocab_size, is_bytes=is_bytes)
    special = {role: getattr(tokenizer, f"{name}_id") for role, name in NAMES.items()}
    more = [i for i in sorted(end_ids) if i != special["eos"]]
    special |= dict(zip(("eos",) if special["eos"] is None else ("eot", "eom"), more, strict=False))
    found = own | {"tokens": tokens, "token_type": kinds}
    found |= {f"{role}_token_id": i for role, i in special.items() if i is not None and i < vocab_size}
    for role, end in (("bos", whole[:1]), ("eos", whole[-1:])):
        found[f"add_{role}_token"] = end == [special[role]]
    given, key = tokenizer.chat_template or {}, "tokenizer.chat_template"
    templates = {"default": given} if isinstance(given, str) else given
    metadata = {f"{_KEY}{name}": value for name, value in found.items()}
    metadata |= {key if name == "default" else f"{key}.{name}": text for name, text in templates.items()}
    _check_reads_back(tokenizer, metadata)
    return metadata


def _refused(tokenizer: Any, why: str) -> ModelError:
    return ModelError(
        f"the tokenizer {type(tokenizer).__name__} of {tokenizer.name_or_path} {why}: kvq can't write it as "
        f"GGUF; write compressed-tensors, or convert the model with llama.cpp's convert_hf_to_gguf.py"
    )


def _vocabulary(
    tokenizer: Any, tree: Mapping[str, Any], vocab_size: int, *, is_bytes: bool
) -> tuple[list[str], list[int]]:
    """Return tokens and their kinds; rows of the embedding without a token get a name that no text has."""
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    for text, i in tree["model"]["vocab"].items():
        if i >= vocab_size:
            raise _refused(tokenizer, f"has token {i}, and the embedding {vocab_size} rows")
        tokens[i], kinds[i] = text, BYTE if not is_bytes and _BYTE.fullmatch(text) else NORMAL
    for one in tree["added_tokens"]:
        if (i := one["id"]) < vocab_size:  # there is nothing for the others to look up
            tokens[i], kinds[i] = one["content"], CONTROL if one["special"] else USER_DEFINED
    unknown = tree["model"].get("unk_token")
    if not is_bytes and unknown in tree["model"]["vocab"]:
        kinds[tree["model"]["vocab"][unknown]] = UNKNOWN
    return tokens, kinds


def _split(tokenizer: Any, backend: Any, model: Mapping[str, Any]) -> str:
    """Return the name in `SPLITS` of what the tokenizer does before merges."""
    cuts = [backend.pre_tokenizer.pre_tokenize_str(text) for text in _TEXTS]
    found = [
        name
        for name, patterns in SPLITS.items()
        if [splitter(patterns).pre_tokenize_str(text) for text in _TEXTS] == cuts
    ]
    if not found:
        raise _refused(tokenizer, "splits texts in none of the ways that kvq knows by GGUF's names")
    is_whole = bool(model.get("ignore_merges"))
    return next((name for name in found if (name in WHOLE) == is_whole), found[0])


def _scores(tokenizer: Any, model: Mapping[str, Any], vocab_size: int) -> list[float]:
    """Return scores that order merges as the tokenizer does: minus the rank of what they make."""
    scores = [_LOWEST] * vocab_size
    made = [text for text, _ in groupby("".join(pair) for pair in model["merges"])]
    if len(set(made)) != len(made) or not model.get("byte_fallback"):
        raise _refused(tokenizer, "has merges in an order that no scores of tokens give")
    for rank, text in enumerate(made):
        scores[model["vocab"][text]] = float(-rank)
    return scores


def _check_reads_back(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    again = load_gguf_tokenizer(metadata, str(tokenizer.name_or_path))
    marked = "".join(f"x{one.content} y" for one in [*tokenizer.added_tokens_decoder.values()][:64])
    for text in (*_TEXTS, *"".join(_TEXTS).split(), marked):
        if again(text).input_ids != tokenizer(text).input_ids:
            raise _refused(tokenizer, f"makes other ids of {text!r:.60} than it would from a GGUF file")
