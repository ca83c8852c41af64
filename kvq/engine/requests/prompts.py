"""What may be given as a prompt: text or token ids."""

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
    """Prompts from one or many, as lists, arrays or tensors.

    Raises:
        RequestError: what holds neither prompts nor token ids.
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
    """The token ids of a prompt that is text or ids.

    Raises:
        RequestError: it is neither, empty, not Unicode, or beyond the vocabulary.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        tokens = token_array(tokenizer(prompt, return_attention_mask=False)["input_ids"])
    else:
        check_token_ids(prompt, _PROMPT)
        tokens = token_array(prompt)
    check_known(tokens, vocab_size)
    return tokens


def check_known(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless a prompt's tokens are some, and all of the vocabulary."""
    if not tokens:
        raise RequestError("the prompt is empty; give some text to go on from")
    if max(tokens) >= vocab_size:
        raise RequestError(
            f"token id {max(tokens)} is outside the vocabulary of 0 to {vocab_size - 1}; "
            f"if a tokenizer made it, it is not this model's"
        )
