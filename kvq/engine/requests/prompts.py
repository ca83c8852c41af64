"""Prompts: text or token ids, checked and turned into token arrays."""

from array import array
from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

from kvq.blockmgr.prefix import token_array
from kvq.errors import RequestError
from kvq.models.parts.inputs import check_holds_items, check_token_ids, check_unicode

Prompt = str | Sequence[int]  # text, or token ids
_PROMPT = "a prompt is a text or a list of token ids"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of one or many, given as lists, arrays or tensors.

    Raises:
        RequestError: it contains neither prompts nor token ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):
        prompts = prompts.tolist()  # an array of token ids, or of prompts
    check_holds_items(prompts, _PROMPT)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def prompt_tokens(prompt: Prompt, tokenizer: Any, vocab_size: int) -> "array[int]":
    """Return the token ids of a prompt.

    Raises:
        RequestError: it is neither text nor ids, empty, not Unicode, or beyond the vocabulary.
    """
    if isinstance(prompt, array) and prompt.typecode == "I":  # of the server, which checked every id
        tokens = prompt
    elif isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        tokens = token_array(tokenizer(prompt, return_attention_mask=False)["input_ids"])
    else:
        check_token_ids(prompt, _PROMPT)
        tokens = token_array(prompt)
    check_known(tokens, vocab_size)
    return tokens


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError if a prompt has no tokens, or one outside the vocabulary."""
    if not tokens:
        raise RequestError("the prompt is empty; give some text to go on from")
    if max(tokens) >= vocab_size:
        raise RequestError(
            f"token id {max(tokens)} is outside the vocabulary of 0 to {vocab_size - 1}; "
            f"if a tokenizer made it, it is not this model's"
        )
