"""Tokens that end a text, as listed in the files of a model folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.models.describe.checkpoint import read_json

GENERATION_FILE = "generation_config.json"
NO_END = (
    "no token is known to end a text: texts go on to max_tokens, and structured output is refused; name one "
    "as eos_token_id in generation_config.json, or as the tokenizer's eos_token"
)
_KEY = "eos_token_id"


def read_end_ids(  # D218: generation_config, else config, and always the tokenizer's
    folder: Path, config: Mapping[str, Any], tokenizers: object, vocab_size: int
) -> frozenset[int]:
    """Return the end tokens in generation_config.json, or else in config.json, plus the tokenizer's.

    The result is empty if no file lists any. transformers falls back to config.json in the same way; vLLM and
    mlx-lm add the tokenizer's end token, which chat templates write at the end of a turn.

    Raises:
        ModelError: generation_config.json is not a JSON object.
    """
    own = folder / GENERATION_FILE
    said = _listed(read_json(own).get(_KEY)) if own.is_file() else []
    named = {*(said or _listed(config.get(_KEY))), *_listed(tokenizers)}
    return frozenset(token for token in named if 0 <= token < vocab_size)


def _listed(given: object) -> list[int]:
    """Return an id or a list of ids as a list, without -1, which some files write for none."""
    ids = given if isinstance(given, list) else [given]
    return [token for token in ids if type(token) is int and token >= 0]
