"""Tokenizers: transformers' own, loaded without running code from the folder."""

import logging
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvq.errors import ConfigError, ModelError, first_lines
from kvq.lazy import import_whole, unseen
from kvq.models.describe.checkpoint import is_gguf, read_json
from kvq.models.describe.resolve import tokenizer_folder
from kvq.models.gguf.files import read_gguf

_PLAIN = "Hello, world: 12 plain words."
_OWN_WORDS = 32
_PADDING = 128  # rows that an embedding may always have beyond its tokenizer's vocabulary, however small
_PARTS = ("token", "vocab", "merges", "spiece", "tekken")  # parts of file names
_BESIDE = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}  # not a vocabulary
_NO_FILES = (
    "no file of a vocabulary is there; copy tokenizer_config.json and tokenizer.json, or tokenizer.model, or "
    "vocab.json and merges.txt, from where the model comes from"
)


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Any:  # D216
    """Return the tokenizer of a model; `chat_template` replaces the tokenizer's own template.

    Raises:
        ModelError: the model has no tokenizer that loads without running its code.
    """
    if is_gguf(folder):
        from kvq.models.gguf.tokenizer import load_gguf_tokenizer

        tokenizer = load_gguf_tokenizer(read_gguf(folder).metadata, str(folder))
        tokenizer.chat_template = chat_template or tokenizer.chat_template
        return tokenizer
    import_whole("transformers")
    from transformers import AutoTokenizer

    folder = tokenizer_folder(folder)
    config = folder / "tokenizer_config.json"
    if config.is_file() and read_json(config).get("auto_map"):
        raise ModelError(f"{config} has auto_map, code that would run at load; kvq never runs it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, config=_tokenizers_config(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the parsers may raise anything for a damaged file
        found = _files_of(folder)
        why = first_lines(error) if set(found) - _BESIDE else _NO_FILES
        raise ModelError(f"{folder} has no tokenizer that loads: {why}") from error
    beside = folder / "chat_template.json"  # in models that also read images
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif tokenizer.chat_template is None and beside.is_file():
        tokenizer.chat_template = read_json(beside).get("chat_template")
    return tokenizer


def template_source(tokenizer: Any) -> str:
    """Return a tokenizer's chat template, or all its templates joined by newlines, or "" if it has none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def load_without_torch(folder: Path, chat_template: str | None = None) -> Any:
    """Load a tokenizer like `load_tokenizer`, in a process that runs no model.

    Unless torch or transformers is already imported, transformers treats torch as missing from then on. Its
    tokenizers don't need torch, whose import takes two seconds and 180 MB.
    """
    log, is_silent = logging.getLogger("transformers"), lambda record: False
    log.addFilter(is_silent)  # transformers would warn that torch is missing
    try:
        with unseen("torch"):
            import transformers  # noqa: F401 - it looks for torch once
    finally:
        log.removeFilter(is_silent)
    tokenizer = load_tokenizer(folder, chat_template)
    check_knows_text(tokenizer, folder)
    if chat_template is not None:
        _check_template(chat_template)
    return tokenizer


def _check_template(text: str) -> None:
    """Raise ConfigError if a chat template from the user is not valid Jinja."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template is no Jinja: line {error.lineno}: {error}") from error


def check_vocabulary(tokenizer: Any, folder: Path, vocab_size: int) -> None:
    """Raise ModelError if a tokenizer's vocabulary is too large or far too small for the embedding.

    Tokens that were added later may lie beyond the embedding, as in some fine-tuned models; requests that
    contain such tokens fail. Embeddings are padded, but not to twice the size of a tokenizer's vocabulary.
    """
    size = len(tokenizer)
    if tokenizer.vocab_size > vocab_size or (size < vocab_size / 2 and size < vocab_size - _PADDING):
        says = "its embedding has rows for" if is_gguf(folder) else "its config.json says vocab_size"
        raise ModelError(
            f"{folder}: its tokenizer has {min(size, tokenizer.vocab_size)} tokens, {says} {vocab_size}; "
            f"they belong to different models, so copy the model again: {_files_hint(folder)}"
        )


def check_knows_text(tokenizer: Any, folder: Path) -> None:
    """Raise ModelError if a tokenizer can't encode text, for example because its files were missing."""
    if not _knows_text(tokenizer):
        folder = tokenizer_folder(folder)
        raise ModelError(
            f"{folder} has no tokenizer that knows a text: {type(tokenizer).__name__} of {len(tokenizer)} "
            f"tokens makes nothing of {_PLAIN!r}; {_files_hint(folder)}"
        )


def _knows_text(tokenizer: Any) -> bool:
    """Return True if the tokenizer encodes plain English or, failing that, text of its own vocabulary."""
    nothing = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, tokenizer.unk_token_id}
    own = islice((token for token in tokenizer.get_vocab().values() if token not in nothing), _OWN_WORDS)
    texts = chain((_PLAIN,), (tokenizer.decode([token]) for token in own))
    try:
        return any(set(tokenizer.encode(text, add_special_tokens=False)) - nothing for text in texts)
    except Exception:  # noqa: BLE001 - raised by a vocabulary without an unknown token
        return False


def _files_of(folder: Path) -> list[str]:
    if is_gguf(folder):
        return [folder.name]
    return sorted(path.name for path in folder.iterdir() if any(part in path.name for part in _PARTS))


def _files_hint(folder: Path) -> str:
    found = _files_of(folder)
    return f"the tokenizer's files there are {', '.join(found)}" if found else _NO_FILES


def _tokenizers_config(folder: Path) -> Any:
    """Return a config that selects the tokenizer's class without torch; None if no class is named."""
    own, model = folder / "tokenizer_config.json", folder / "config.json"
    if not own.is_file() or not model.is_file() or not read_json(own).get("tokenizer_class"):
        return None
    from transformers import PreTrainedConfig

    given = read_json(model)
    config = PreTrainedConfig(name_or_path=str(folder))
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(given.get(name), str):
            setattr(config, name, given[name])
    return config
