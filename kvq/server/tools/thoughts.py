"""Thinking of a model: separated from the answer, and permitted before constrained output starts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvq.engine import SamplingParams
from kvq.errors import ConfigError

_MARKERS = {  # vLLM's names are also accepted
    **dict.fromkeys(("think", "deepseek_r1", "qwen3", "glm45", "deepseek_v3"), ("<think>", "</think>")),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_SPACE = r"/[ \n]{0,4}/"  # white space after the thinking


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """Markers around a model's thinking."""

    begin: str
    end: str
    end_id: int | None = None  # if the end marker is one token
    special: tuple[tuple[str, int], ...] = ()  # the markers that are special tokens

    @classmethod
    def of(cls, tokenizer: Any, template: str, name: str) -> "Thinking | None":
        """Return the markers called `name`; "auto": found in the template or vocabulary; "none": None.

        Raises:
            ConfigError: the name is unknown.
        """
        added = {str(token): (i, token.special) for i, token in tokenizer.added_tokens_decoder.items()}
        if name == "auto":
            ends = {end: known for known, (_, end) in reversed(_MARKERS.items())}
            name = next((known for end, known in ends.items() if end in template or end in added), "none")
        if name == "none":
            return None
        check_name(name)
        begin, end = _MARKERS[name]
        special = tuple((marker, added[marker][0]) for marker in (begin, end) if added.get(marker, (0, 0))[1])
        return cls(begin=begin, end=end, end_id=added.get(end, (None,))[0], special=special)

    def is_open(self, before: str, *, is_continued: bool = False) -> bool | None:
        """Return True if thinking follows the text `before`, False if the answer follows, or None if unknown.

        `is_continued`: `before` is the start of an answer that the request continues.
        """
        before = before.rstrip()
        if is_continued:
            return before.rfind(self.begin) > before.rfind(self.end)
        return True if before.endswith(self.begin) else False if before.endswith(self.end) else None

    def params(self, params: SamplingParams, is_open: bool | None) -> SamplingParams:
        """Return `params`, changed to keep the markers in the text and to apply a grammar after thinking."""
        structured = params.structured
        if structured is not None and is_open is not False:
            tokens = {marker: f"<[{token}]>" for marker, token in self.special}
            thought = f"thought {tokens.get(self.end, '')} {_SPACE}"
            stop = "" if self.end in tokens else f"[suffix={json.dumps(self.end)}]"
            before = thought if is_open else f"({tokens.get(self.begin, json.dumps(self.begin))} {thought})?"
            structured = replace(structured, before=f"before: {before}\nthought{stop}: /(.|\\n)*/")
        kept = (*params.kept_special_ids, *(token for _, token in self.special))
        return replace(params, structured=structured, kept_special_ids=kept)


class Thoughts:
    """Splitter that separates thinking from answer text in one result during generation."""

    def __init__(self, thinking: Thinking | None, is_open: bool | None) -> None:
        """If `thinking` is None, everything is answer text. `is_open`: the result of `Thinking.is_open`."""
        self._thinking = thinking
        self._is_inside = is_open if thinking is not None else False
        self._held = ""
        self._has_begun = False  # some thinking was read
        self._is_behind = False  # after the thinking, before any text
        self.num_tokens = 0  # tokens of thinking

    def feed(self, text: str, tokens: Sequence[int] = (), *, is_last: bool = False) -> tuple[str, str]:
        """Parse the next piece of text; return the text added to the thinking and to the answer."""
        thinking = self._thinking
        if thinking is None or (self._is_inside is False and not self._is_behind):
            return "", text
        text, self._held, thought = self._held + text, "", ""
        if self._is_inside is None:
            start = text.lstrip()
            if not start.startswith(thinking.begin):
                if thinking.begin.startswith(start) and not is_last:
                    self._held = text
                    return "", ""
                self._is_inside = False
                return "", text
            self._is_inside, text = True, start.removeprefix(thinking.begin)
        if self._is_inside:
            ids, end_id = [*tokens], thinking.end_id
            self.num_tokens += ids.index(end_id) + 1 if end_id is not None and end_id in ids else len(ids)
            thought, end, text = text.partition(thinking.end)
            self._is_inside, self._is_behind = not end, bool(end)
            if not end and not is_last:
                thought, self._held = self._without_end(thought)
            thought = thought.rstrip() if end or is_last else thought
            thought = thought if self._has_begun else thought.lstrip()
            self._has_begun |= bool(thought)
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return thought, text

    def _without_end(self, thought: str) -> tuple[str, str]:
        """Split off trailing text that may belong to the end marker: white space or a part of the marker."""
        end = self._thinking.end if self._thinking is not None else ""
        sizes = range(len(end) - 1, 0, -1)
        size = next((size for size in sizes if thought.endswith(end[:size])), 0)
        shown = thought[: len(thought) - size].rstrip()
        return shown, thought[len(shown) :]


def check_name(name: str) -> None:
    """Raise ConfigError if no markers have this name."""
    if name not in ("auto", "none", *_MARKERS):
        raise ConfigError(f"no reasoning parser {name!r}; there are auto, none, {', '.join(_MARKERS)}")
