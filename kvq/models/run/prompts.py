"""Encoding of texts and conversations to token ids, with a model's own tokenizer and chat template."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from kvq.errors import RequestError, first_lines
from kvq.models.loading.control_tokens import ControlTokens
from kvq.models.loading.tokenizer import template_source
from kvq.models.parts.inputs import check_unicode
from kvq.models.templates.arrival import check_arrival
from kvq.models.templates.forms import Forms, Turns, try_out

TRUSTED = ("system", "developer", "assistant")  # roles whose texts may contain control tokens
_ROLES = frozenset((*TRUSTED, "user", "tool", "function"))
_SYSTEM = ("system", "developer")
_OPTIONAL = {"description": "", "parameters": {"type": "object", "properties": {}}}  # fields of a tool
_WORD = r"""(?P<quote>['"])(?P<word>[a-zA-Z0-9_.-]+)(?P=quote)"""
# Words that a template compares values with, or looks for in a list
_COMPARED = [re.compile(pattern) for pattern in (rf"(?:[!=]=|[\[(,])\s*{_WORD}", rf"{_WORD}\s*[!=]=")]


class UnfitPrompt(RequestError):  # D291: only raise_exception refuses; all else is a failure
    """Raised if a text has too many tokens, however it is tokenized, or a chat template fails by accident."""

    def __init__(self, message: str, *, fails: bool = False) -> None:
        """`fails`: the template fails, because of an error in itself or the conversation."""
        super().__init__(message)
        self.fails = fails


class PromptEncoder:
    """Encoder of prompts for one transformers tokenizer.

    Text from users, tools and documents in a conversation is encoded as plain text, whatever it spells.
    Control tokens are recognized only in the template itself and in system and assistant messages.
    """

    def __init__(self, tokenizer: Any, *, trusts_chats: bool = False) -> None:
        """`trusts_chats`: recognize control tokens in all parts of a conversation."""
        self._tokenizer = tokenizer
        self._trusts_chats = trusts_chats

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        plain: bool = False,
        max_tokens: int | None = None,
        second: str | None = None,
    ) -> list[int]:
        """Return a text's token ids. `plain`: encode no control tokens, whatever the text spells.
        `second`: the text that forms a pair with it, as classifiers of pairs read them.

        Raises:
            RequestError: the text is not valid Unicode.
            UnfitPrompt: there are more than `max_tokens` tokens, however the text is tokenized.
        """
        self._check(text, max_tokens)
        if second is not None:
            if plain:
                return self.encode(text, special=special, plain=True) + self.encode(
                    second, special=False, plain=True
                )
            self._check(second, max_tokens)
            pair: list[int] = self._tokenizer(text, second, add_special_tokens=special)["input_ids"]
            return pair
        if plain:
            return self._control.encode_plain(text, special=special)
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def encode_chat(
        self, turns: Turns, options: Mapping[str, Any], *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a conversation in the model's format; see `read_chat`."""
        return self.read_chat(turns, options, max_tokens=max_tokens)[0]

    def read_chat(
        self, turns: Turns, options: Mapping[str, Any], *, max_tokens: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a conversation's token ids in the model's format, and the ranges of its messages' texts.

        `options`: those of the template. There are no ranges if it is not known which characters the tokens
        stand for.

        Raises:
            RequestError: the template rejects the conversation or drops a part of it, or a text is not valid.
            UnfitPrompt: there are more than `max_tokens` tokens, however the text is tokenized.
        """
        text = self._render(self.forms, turns, options)
        self._check(text, max_tokens)
        ends = check_arrival(partial(self._render, self.forms), turns, options, text, self.forms)
        ids, token_at = self._control.encode_placed(text)
        return ids, [] if token_at is None else _ranges(text, turns, ends, token_at)

    def shared_lengths(
        self, tokens: Sequence[int], whole: tuple[Turns, Mapping[str, Any]], others: Sequence[Any]
    ) -> list[int]:
        """Return how many initial tokens a conversation shares with each of the others; 0 if they are equal.

        `tokens`: the result of `encode_chat` for `whole`. Each count is the number of initial tokens that the
        texts' common prefix, tokenized alone, shares with `tokens`.

        Raises:
            RequestError: the template rejects a conversation.
        """
        text, *rest = (self._render(self.forms, turns, options) for turns, options in (whole, *others))
        shared = [self._control.encode(text[: num_common(text, other)]) for other in rest]
        counts = [num_common(ids, tokens) for ids in shared]
        return [0 if other == text else count for other, count in zip(rest, counts, strict=True)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    @cached_property
    def forms(self) -> Forms:
        """Parts of a conversation that the template shows, found by trial; can be set to earlier results."""
        return try_out(self._render, self._source, _variables(self._source))

    @cached_property
    def _source(self) -> str:
        return template_source(self._tokenizer)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    @cached_property
    def _roles(self) -> frozenset[str]:
        """Roles that the template recognizes, which must not be hidden."""
        return _ROLES.union(found["word"] for one in _COMPARED for found in one.finditer(self._source))

    @cached_property
    def _longest_token(self) -> int:
        return longest_token(self._tokenizer)

    def warm_up(self) -> None:
        """Compute cached values now, so that forked processes need not each compute them."""
        _ = self._control, self._roles, self._longest_token

    def _check(self, text: str, max_tokens: int | None) -> None:
        shown = self._control.show(text)
        check_unicode(shown, "the prompt")
        if max_tokens is not None:
            check_length(shown, max_tokens, self._longest_token)

    def _render(self, forms: Forms, turns: Turns, options: Mapping[str, Any]) -> str:
        """Render a conversation in these forms; on failure, retry with tools' optional fields filled in."""
        try:
            return self._render_as_given(forms, turns, options)
        except UnfitPrompt:
            if (filled := _filled(options)) == options:
                raise
            return self._render_as_given(forms, turns, filled)

    def _render_as_given(self, forms: Forms, turns: Turns, options: Mapping[str, Any]) -> str:
        given = forms.messages(turns)
        if not self._trusts_chats:
            options = {name: self._control.hide(value) for name, value in options.items()}
            given = [self._hidden(turn) for turn in given]
        try:
            return _rendered(self._tokenizer, given, options)
        except MemoryError:  # not the conversation's fault
            raise
        except Exception as error:
            from jinja2.exceptions import TemplateError

            told = self._control.show(first_lines(error))
            if type(error) is TemplateError:  # raised by `raise_exception`
                raise RequestError(f"the model's chat template refused this: {told}") from error
            line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
            what = f"{type(error).__name__}{line}: {told}"
            raise UnfitPrompt(f"the model's chat template fails for this: {what}", fails=True) from error

    def _hidden(self, turn: dict[str, Any]) -> dict[str, Any]:
        role, content = str(turn.get("role")), turn.get("content")
        if role in TRUSTED:
            return turn
        hidden = {name: self._control.hide(value, whole=True) for name, value in turn.items()}
        if isinstance(content, list):  # parts, whose type the template checks
            hidden["content"] = [
                {**part, "text": self._control.hide(part["text"], whole=True)} for part in content
            ]
        return hidden | ({"role": role} if role in self._roles else {})


def _ranges(
    text: str, turns: Turns, ends: Mapping[int, int], token_at: Callable[[int], int | None]
) -> list[tuple[int, int]]:
    """Return the first and last token that belong to each turn's text in a rendered conversation.

    The token after a text belongs to it, too, unless it is the system's. Ranges of texts that were not found
    are empty: their last token is before their first.

    `ends`: about where the texts end, by the turn's number from 1.
    """
    found, done, after = [], 0, 0  # characters and tokens up to the end of the last text
    for number, turn in enumerate(turns, 1):
        content = turn.get("content") or ""
        whole = content if isinstance(content, str) else "".join(part["text"] for part in content)
        for part in (whole.strip(), whole.rpartition("</think>")[2].strip()):  # thoughts may be left out
            start = text.rfind(part, done, ends[number]) if number in ends else -1
            start = text.find(part, done) if start < 0 else start
            if part and start >= 0:
                done = start + len(part)
                first, last, following = token_at(start), token_at(done - 1), token_at(done)
                if first is not None and last is not None:
                    # Templates append tools to the system's text; elsewhere, its end shows that it is shorter
                    is_joined, after = following == last, last + 1
                    is_system = turn.get("role") in _SYSTEM
                    found.append((first, after - is_joined - is_system))
                    break
        else:
            found.append((after, after - 1))
    return found


def _filled(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a template's options, with optional fields added to the tools that lack them."""
    tools = []
    for tool in options.get("tools") or ():
        function = tool["function"]
        lacking = {name: value for name, value in _OPTIONAL.items() if function.get(name) is None}
        tools.append({**tool, "function": {**function, **lacking}})
    return {**options, "tools": tools} if tools else options


def _rendered(tokenizer: Any, turns: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Render turns with a tokenizer's template; the tokenizer's own method drops content that is None."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=options.get("tools"))
    given = {**tokenizer.special_tokens_map, **options}
    (text,), _ = render_jinja_template(conversations=[turns], chat_template=template, **given)
    return str(text)


def _variables(source: str) -> frozenset[str] | None:
    """Return the names of the variables that a template reads, or None if the template can't be parsed."""
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return frozenset(
            meta.find_undeclared_variables(_compile_jinja_template("").environment.parse(source))
        )
    except (TemplateError, RecursionError):
        return None


def longest_token(tokenizer: Any) -> int:
    """Return the length of a tokenizer's longest token in characters; a byte counts as one character."""
    return max(map(len, tokenizer.get_vocab()))


def check_length(text: str, max_tokens: int, longest: int) -> None:
    """Raise UnfitPrompt if a text's length in characters alone shows that it has too many tokens."""
    if len(text) > max_tokens * longest:
        raise UnfitPrompt(
            f"the prompt has {len(text)} characters, which are more than the model's {max_tokens} tokens"
        )


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
