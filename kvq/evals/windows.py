"""Cutting a text into windows of tokens, as every evaluation here sees it."""

from typing import Any

from kvq.errors import RequestError
from kvq.models.parts.inputs import check_unicode


def token_windows(
    tokenizer: Any, text: str, *, context: int, max_windows: int | None = None
) -> list[list[int]]:
    """Return windows of `context` tokens, neighbours in the text; a shorter rest is left out.

    If the tokenizer starts texts with a begin-of-sequence token, every window starts with it.

    Raises:
        RequestError: the text is shorter than one window, or a size makes no sense.
    """
    return cut_windows(
        text_ids(tokenizer, text), begin_ids(tokenizer), context=context, max_windows=max_windows
    )


def cut_windows(
    ids: list[int], prefix: list[int], *, context: int, max_windows: int | None = None
) -> list[list[int]]:
    """Cut a text's tokens into windows as `token_windows` does; `prefix` begins every window."""
    if context < 2:
        raise RequestError(f"context must be at least 2 tokens, got {context}; nothing could be predicted")
    if max_windows is not None and max_windows < 1:
        raise RequestError(f"the number of windows must be at least 1, got {max_windows}")
    step = context - len(prefix)
    count = len(ids) // step
    if not count:
        raise RequestError(
            f"the text has {len(ids)} tokens, one window needs {step}; "
            f"give a longer text or --context {max(2, len(ids) + len(prefix))} or less"
        )
    return [prefix + ids[i * step : (i + 1) * step] for i in range(min(count, max_windows or count))]


def spread(windows: list[list[int]], count: int) -> list[list[int]]:
    """Return at most `count` of the windows, evenly over the text."""
    count = min(count, len(windows))
    return [windows[i * len(windows) // count] for i in range(count)]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, without special ones.

    Raises:
        RequestError: the text is not Unicode that can be encoded.
    """
    check_unicode(text, "the text")
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return ids


def begin_ids(tokenizer: Any) -> list[int]:
    """Return the begin-of-sequence token where the tokenizer starts texts with one, else nothing."""
    begin = tokenizer.bos_token_id
    with_special: list[int] = tokenizer("a", return_attention_mask=False)["input_ids"]
    return [begin] if begin is not None and with_special[:1] == [begin] else []
