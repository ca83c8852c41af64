"""Text stream: converts the tokens of one branch to text, in complete characters, up to a stop string."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, Self

from kvq.engine.params import SamplingParams

_BACKED = ("TokenizersBackend", "PreTrainedTokenizerFast")  # transformers' class over the tokenizers library
_BROKEN = "\ufffd"  # shown by decoders for bytes that are no character, or not yet
_MAX_OPEN = 3  # a character has at most 4 bytes; byte-fallback decoders show each open byte as one _BROKEN
_NO_MARKS: Mapping[str, str] = MappingProxyType({})
_PROMPT_TAIL = 8  # prompt tokens that are decoded together with the first new ones
_PROMPT_SEARCHED = 128  # how many tokens to go back to find visible text
_MARKS = range(0xD800, 0xE000)  # surrogates, which never occur in decoded text
# A long open run of tokens loses its middle. Its first tokens contain the bytes that broke it; its last
# ones contain the open character and the four before it, where lossy UTF-8 decoding resynchronizes.
_KEPT_FIRST, _KEPT_LAST, _MAX_HELD, _STEP = 8, 12, 32, 4


class _Detokenizer:
    """Converter from tokens to text. It holds back each character until all its bytes have arrived.

    Together, the pieces and the flush form the text that `tokenizer.decode` adds for these tokens after the
    prompt, with one exception: some decoders break all characters in a run of byte tokens if one byte is
    wrong, but characters that were already shown stay unchanged.
    Each token costs two decodes of a few tokens. Spaces are not cleaned up, since that would remove text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_ids: Sequence[int] = (),
    ) -> None:
        """`kept_ids`: special tokens to show even if other special tokens are skipped."""
        self._decode = _decoder(tokenizer, skip_special_tokens, frozenset(kept_ids))
        self._anchor = self._tail(prompt_ids)  # with visible text; otherwise, tokens decode as a text's start
        self._context = self._anchor  # the anchor, and the tokens that were completed last
        self._held: tuple[int, ...] = ()  # tokens since the text was last complete
        self._shown = self._text(self._context)  # already shown text of context and held tokens

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now complete."""
        self._held += (token_id,)
        text = self._text(self._context + self._held)
        if not text.startswith(self._shown):
            text = self._begin_again(text)
        fresh = text[len(self._shown) :]
        if not text.endswith(_BROKEN):
            self._settle()
            return fresh
        num_open = min(_MAX_OPEN, len(fresh) - len(fresh.rstrip(_BROKEN)))
        piece = fresh[: len(fresh) - num_open]
        self._shown += piece
        return piece + self._cut(fresh[len(piece) :]) if len(self._held) > _MAX_HELD else piece

    def flush(self) -> str:
        """Return any text still held back when the stream ends inside a character."""
        text = self._text(self._context + self._held)
        fresh, self._shown = text[len(self._shown) :], text
        return fresh

    def fork(self) -> Self:
        """Return an independent copy without decoding any tokens."""
        return copy.copy(self)

    def _text(self, ids: tuple[int, ...]) -> str:
        return self._decode(list(ids))

    def _tail(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt's last tokens with visible text, starting where the fewest characters break."""
        for end in range(len(prompt_ids), max(0, len(prompt_ids) - _PROMPT_SEARCHED), -_PROMPT_TAIL):
            starts = range(max(0, end - _PROMPT_TAIL), max(1, end - _PROMPT_TAIL + 4))
            tails = [tuple(prompt_ids[start:end]) for start in starts]
            tail = min(tails, key=lambda ids: self._text(ids).count(_BROKEN))
            if self._text(tail).strip():
                return tail + tuple(prompt_ids[end:][-_PROMPT_TAIL:])
        return tuple(prompt_ids[:_PROMPT_TAIL]) + tuple(prompt_ids[_PROMPT_TAIL:][-_PROMPT_TAIL:])

    def _begin_again(self, text: str) -> str:
        """Return the text to continue from if the newest token changed the beginning of the text."""
        whole = self._shown.rstrip(_BROKEN)
        if whole != self._shown and text.startswith(whole):  # such as a character that began in the prompt
            pairs = enumerate(zip(self._shown, text, strict=False))
            self._shown = self._shown[: next((at for at, (old, new) in pairs if old != new), len(text))]
            return text
        # A byte merged complete characters into one broken run; without them, the run is open again.
        self._context, self._shown = (), ""
        return self._text(self._held)

    def _settle(self) -> None:
        """Restart with an empty run after a complete text."""
        self._shown = self._text(self._held)
        if self._shown.strip():
            self._anchor = self._context = self._held
        else:
            self._context = self._anchor + self._held
            self._shown = self._text(self._context)
        self._held = ()

    def _cut(self, open_text: str) -> str:
        """Drop the middle of a long open run; return the text that no later token can change."""
        last = self._held[-_KEPT_LAST:]
        in_step = len(self._text(last)) >= len(open_text) + _STEP
        self._held = self._held[:_KEPT_FIRST] + last
        text = self._text(self._context + self._held)
        if in_step and text.endswith(open_text):
            self._shown = text[: len(text) - len(open_text)]
            return ""
        self._shown = text  # tokens without text follow an open character: it was held long enough
        return open_text


def _decoder(tokenizer: Any, is_skipping: bool, kept: frozenset[int]) -> Callable[[list[int]], str]:
    skips = is_skipping and not kept
    if _decodes_by_backend(tokenizer):
        # This takes a quarter of the wrapper's time.
        decode = partial(tokenizer._tokenizer.decode, skip_special_tokens=skips)
    else:
        decode = partial(tokenizer.decode, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    if not is_skipping or not kept:
        return decode
    skipped = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - kept
    return lambda ids: decode([i for i in ids if i not in skipped])


def _decodes_by_backend(tokenizer: Any) -> bool:
    """Return True if a tokenizer decodes only with its backend."""
    kind: Any = type(tokenizer)
    # By name: importing the class would import torch, which the HTTP process avoids.
    own = next((one for one in kind.__mro__ if one.__name__ in _BACKED), None)
    if own is None or not hasattr(getattr(tokenizer, "_tokenizer", None), "decode"):
        return False
    is_plain = kind.decode is own.decode and getattr(kind, "_decode", None) is getattr(own, "_decode", 0)
    return is_plain and not {"decode", "_decode"} & vars(tokenizer).keys()


def _hidden_in(stops: Sequence[str], tokenizer: Any, kept: Sequence[int]) -> dict[int, str]:
    """Return the texts of special tokens that occur in stop strings, keyed by token id."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if stops else {}
    special = {i: token.content for i, token in added.items() if token.special and i not in kept}
    return {i: text for i, text in special.items() if text and any(text in stop for stop in stops)}


class _Stops:
    """Stop strings as one automaton (Aho and Corasick 1975): constant work per character.

    A state is the longest suffix of the text that is a prefix of a stop string; state 0 is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]  # length of the state in characters
        self.found: list[str | None] = [None]  # the longest stop string that ends here
        self._edges: dict[tuple[int, str], int] = {}
        self._fallback = [0]  # longest proper suffix that is also a state
        parents: list[tuple[int, str]] = [(0, "")]
        for stop in stops:
            state = 0
            for char in stop:
                if (state, char) not in self._edges:
                    self._edges[state, char] = len(parents)
                    parents.append((state, char))
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(None)
                    self._fallback.append(0)
                state = self._edges[state, char]
            self.found[state] = stop
        self._has_next = {state for state, _ in self._edges}
        for state in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            parent, char = parents[state]
            if parent:
                self._fallback[state] = self.step(self._fallback[parent], char)
            self.found[state] = self.found[state] or self.found[self._fallback[state]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while (state, char) not in self._edges and state:
            state = self._fallback[state]
        return self._edges.get((state, char), 0)

    def unfinished(self, state: int) -> int:
        """Return the state of the longest suffix that a stop string can still continue."""
        while state and state not in self._has_next:
            state = self._fallback[state]
        return state


class _StopFinder:
    """Filter that passes text through up to a stop string, and holds back possible beginnings of one.

    The stop string that is completed first wins; if the same character completes several, the longest wins.
    The result therefore does not depend on how the text is split into pieces. With `include_stop`, the text
    ends after the stop string, and nothing needs to be held back.

    `marks`: maps hidden texts to placeholder characters. A hidden text is shown only as part of a
    stop string that is shown.
    """

    def __init__(
        self, stops: Sequence[str], include_stop: bool, marks: Mapping[str, str] = _NO_MARKS
    ) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        marked = {reduce(lambda s, text: s.replace(text, marks[text]), longest_first, s): s for s in stops}
        self._spelled = marked | {stop: stop for stop in stops}
        self._stops = _Stops([*self._spelled])
        self._hide = str.maketrans("", "", "".join(marks.values()))
        self._unhide = str.maketrans({mark: text for text, mark in marks.items()})
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the part that is safe to show, and the stop string if one was completed."""
        if self._stop is not None:
            return "", self._stop
        for end, char in enumerate(text, 1):
            self._state = self._stops.step(self._state, char)
            if stop := self._stops.found[self._state]:
                upto = self._held + text[:end]
                begin = max(0, len(upto) - len(stop))
                shown = upto[begin:].translate(self._unhide) if self._include_stop else ""
                self._stop, self._held = self._spelled[stop], ""
                return upto[:begin].translate(self._hide) + shown, self._stop
        return self._release(text), None

    def pass_over(self, text: str) -> str:
        """Add text in which a stop string may begin but not end. Return the part that is safe to show."""
        for char in text:
            self._state = self._stops.step(self._state, char)
        self._state = self._stops.unfinished(self._state)
        return self._release(text)

    def flush(self) -> str:
        """Return any text still held back at the end."""
        held, self._held, self._state = self._held, "", 0
        return held.translate(self._hide)

    def fork(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)

    def _release(self, text: str) -> str:
        text = self._held + text
        num_safe = len(text) - self._stops.depth[self._state]
        if self._include_stop:  # hidden texts are shown only with their stop string
            num_safe = next(
                (at for at in range(max(0, num_safe), len(text)) if ord(text[at]) in self._unhide), len(text)
            )
        self._held = text[num_safe:]
        return text[:num_safe].translate(self._hide)


class TextStream:
    """Text of one branch of a request, token by token, up to its stop string.

    The search for stop strings starts after the first `min_tokens` tokens. A stop string that is already
    complete by then does not end the text; one that begins earlier but is completed later does. Stop strings
    that contain the text of a special token are found although that text is hidden.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._shown_ends = tuple(params.stop_token_ids) if params.include_stop else ()
        kept = (*params.kept_special_ids, *self._shown_ends)
        self._detokenizer = _Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens, kept_ids=kept
        )
        hidden = _hidden_in(params.stop_strings, tokenizer, kept) if params.skip_special_tokens else {}
        marks = {text: chr(mark) for text, mark in zip(hidden.values(), _MARKS, strict=False)}
        self._marks = {token: marks[text] for token, text in hidden.items() if text in marks}
        self._finder = _StopFinder(params.stop_strings, params.include_stop, marks)
        self._num_unsearched = params.min_tokens  # upcoming tokens that can't complete a stop string
        self._pieces: list[str] = []
        self.stop: str | None = None  # the stop string that was found; no text follows it

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._pieces)

    def push(self, token_id: int, *, ends: bool = False) -> str:
        """Add a token and return the text to show now.

        A token that ends the text is hidden, unless it is a stop token and `include_stop` is set.
        """
        text = "" if ends and token_id not in self._shown_ends else self._detokenizer.push(token_id)
        piece = self._show(text + self._marks.get(token_id, ""))
        self._num_unsearched -= 1
        return piece

    def finish(self) -> str:
        """Return any text still held back after the last token."""
        piece = self._show(self._detokenizer.flush())
        held = self._finder.flush()
        self._pieces.append(held)
        return piece + held

    def fork(self) -> Self:
        """Return an independent copy."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other._finder = self._finder.fork()
        self._pieces = [self.text]  # joined once, regardless of the number of forks
        other._pieces = self._pieces.copy()
        return other

    def _show(self, text: str) -> str:
        if self._num_unsearched > 0:
            piece = self._finder.pass_over(text)
        else:
            piece, self.stop = self._finder.push(text)
        if piece:
            self._pieces.append(piece)
        return piece
