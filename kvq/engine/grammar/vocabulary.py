"""Grammar vocabulary: a model's tokens in the form that llguidance needs, and which ids are tokens."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llguidance import LLTokenizer
from torch import Tensor

from kvq.errors import RequestError, first_lines
from kvq.models.describe.ends import GENERATION_FILE


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Vocabulary of a model's logits: which ids are tokens, and which tokens end a text."""

    tokenizer_json: str  # without padding or truncation
    tokenizer: LLTokenizer
    vocab_size: int  # width of the logits: the tokenizer's ids and padding
    eos_ids: tuple[int, ...]
    known: Tensor  # int32 [ceil(vocab_size / 32)], one bit for each id that is a token
    inner: Tensor  # `known` without the end tokens

    def is_known(self, token: int) -> bool:
        """Return True if `token` is an id of the tokenizer."""
        return 0 <= token < self.vocab_size and bool(int(self.known[token >> 5]) >> (token & 31) & 1)


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """Read the vocabulary of a transformers tokenizer without downloading anything.

    Raises:
        RequestError: the tokenizer isn't fast, doesn't fit the logits, or has none of the end tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"structured output needs a tokenizer with a tokenizer.json, got {type(tokenizer).__name__}"
        )
    ids = set(backend.get_vocab(with_added_tokens=True).values())
    if not (ends := sorted(ids.intersection(eos_ids))):
        raise RequestError(
            f"structured output ends by the model's end token, and none that the tokenizer has is named (got "
            f"{list(eos_ids)}); name one as eos_token_id in {GENERATION_FILE}"
        )
    text = json.dumps({**json.loads(backend.to_str()), "padding": None, "truncation": None})
    try:
        tokens = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise RequestError(
            f"structured output: llguidance can't read the tokenizer for logits of {vocab_size}: "
            f"{first_lines(error)}"
        ) from error
    return Vocabulary(
        tokenizer_json=text,
        tokenizer=tokens,
        vocab_size=vocab_size,
        eos_ids=tuple(ends),
        known=_packed(ids, vocab_size),
        inner=_packed(ids.difference(ends), vocab_size),
    )


def _packed(ids: Iterable[int], vocab_size: int) -> Tensor:
    """Return one bit per id, the lowest bit of each word first: int32 [ceil(vocab_size / 32)]."""
    packed = bytearray(-(-vocab_size // 32) * 4)
    for token in ids:
        packed[token >> 3] |= 1 << (token & 7)
    return torch.frombuffer(packed, dtype=torch.int32)
