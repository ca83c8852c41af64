"""What may be given as a prompt: text or token ids."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral
from typing import Any, cast

from kvq.blockmgr.prefix import token_array
from kvq.errors import RequestError
from kvq.models.unicode import check_unicode

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
    _check_items(prompts)
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)


def prompt_tokens(prompt: Prompt, tokenizer: Any, vocab_size: int) -> "array[int]":
    """The token ids of a prompt that is text or ids.

    Raises:
        RequestError: it is neither, empty, not Unicode, or beyond the vocabulary.
    """
    _check_prompt(prompt)
    if isinstance(prompt, str):
        check_unicode(prompt, "the prompt")
        tokens = token_array(tokenizer(prompt, return_attention_mask=False)["input_ids"])
    else:
        tokens = token_array(prompt)
    if not tokens:
        raise RequestError("the prompt is empty; give some text to go on from")
    if max(tokens) >= vocab_size:
        raise RequestError(
            f"token id {max(tokens)} is outside the vocabulary of 0 to {vocab_size - 1}; "
            f"if a tokenizer made it, it is not this model's"
        )
    return tokens


def _check_prompt(prompt: object) -> None:
    """Raise RequestError if a prompt is neither text nor token ids: what is taken for them runs as others."""
    if isinstance(prompt, str):
        return
    _check_items(prompt)
    if isinstance(prompt, Iterator):
        raise RequestError(f"{_PROMPT}, got {type(prompt).__name__}; make a list of it")
    assert isinstance(prompt, Iterable), "it was checked"
    if isinstance(prompt, array) and prompt.typecode in "bB":
        raise RequestError(f"{_PROMPT}, got an array of bytes")
    kinds = {kind.__name__: hasattr(kind, "__index__") for kind in set(map(type, prompt))}
    if wrong := sorted(name for name, is_whole in kinds.items() if name in ("bool", "bool_") or not is_whole):
        raise RequestError(f"{_PROMPT}, got a list with {', '.join(wrong)} in it")


def _check_items(items: object) -> None:
    """Raise RequestError if something holds no prompts, and no token ids, in order."""
    is_one = getattr(items, "shape", None) == ()  # an array of no dimension
    wrong = isinstance(items, bytes | bytearray | memoryview | Mapping | Set)
    if is_one or wrong or not isinstance(items, Iterable):
        raise RequestError(f"{_PROMPT}, got {type(items).__name__}")
