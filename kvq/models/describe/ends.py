"""The tokens that end a text, as the files of a model's folder name them."""

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
    """Return the end tokens of generation_config.json, or else of config.json, and the tokenizer's.

    Empty: none names any. transformers falls back on config.json like this; vLLM and mlx-lm take the
    tokenizer's besides, which is what a chat template ends turns by.

    Raises:
        ModelError: generation_config.json is no JSON object.
    """
    own = folder / GENERATION_FILE
    said = _listed(read_json(own).get(_KEY)) if own.is_file() else []
    named = {*(said or _listed(config.get(_KEY))), *_listed(tokenizers)}
    return frozenset(token for token in named if 0 <= token < vocab_size)


def _listed(given: object) -> list[int]:
    """Ids, from one or a list; -1 is none, to some."""
    ids = given if isinstance(given, list) else [given]
    return [token for token in ids if type(token) is int and token >= 0]
