"""Needle prompts: a text with a key and its value at some position, and the key again at the end."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import RequestError
from kvq.evals.text import begin_ids, text_ids

SENTENCE = "\nThe secret number of {key} is {value}.\n"
TOKENS = "tokens"
KEYS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket",
    "kitten", "ladder", "mirror", "needle", "orange", "pencil", "quartz", "rabbit", "saddle", "tunnel",
    "umbrella", "valley", "window", "yellow", "zebra",
)  # fmt: skip
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIGITS = 7
_KEY_TOKENS, _VALUE_TOKENS = 3, 6
_NEARBY = 64  # tokens around a random-token needle that must not contain its tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedlePlan:
    """Grid of lengths and depths, with `trials` prompts each."""

    lengths: Sequence[int] | None = None  # tokens, including the answer; None: all LENGTHS that fit
    depths: Sequence[float] = DEPTHS  # shares of the haystack before the needle
    trials: int = 10
    needle: str = SENTENCE  # with {key} and {value}; or "tokens": random ids, for models without words
    distractors: int = 0  # needles with other keys and values, at random positions
    chunk: int = 512  # tokens per prefill step
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.lengths is not None and not len(self.lengths)) or not len(self.depths):
            raise RequestError("a needle grid needs at least one length and one depth")
        for depth in self.depths:
            if not 0 <= depth <= 1:  # NaN too
                raise RequestError(f"a depth must be a share of the haystack, 0 to 1, got {depth}")
        for name in ("trials", "chunk"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.needle != TOKENS and not (
            self.needle.count("{key}") == self.needle.count("{value}") == 1
            and self.needle.index("{key}") < self.needle.index("{value}")
        ):
            raise RequestError(
                f"a needle is {TOKENS!r} or a sentence with {{key}} and then {{value}}, each once, "
                f"got {self.needle!r}; for example {SENTENCE.strip()!r}"
            )
        most = len(KEYS) - 1
        if not 0 <= self.distractors <= most:
            raise RequestError(f"distractors must be 0 to {most}, got {self.distractors}")


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedlePrompt:
    """A prompt and its expected answer."""

    ids: list[int]
    answer: list[int]
    needle_at: int  # index of the needle's first token
    needle_size: int  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Needle:
    """Token ids of one needle: its key, its value, and the text after the value."""

    cue: list[int]
    value: list[int]
    tail: list[int]

    @property
    def ids(self) -> list[int]:
        return self.cue + self.value + self.tail


class NeedlePrompts:
    """Generator of prompts from one text, for one tokenizer and kind of needle, deterministic for a seed."""

    def __init__(self, tokenizer: Any, text: str, plan: NeedlePlan, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._begin = begin_ids(tokenizer)
        self._text = text_ids(tokenizer, text)
        special = set(tokenizer.all_special_ids)
        self._plain = [i for i in range(min(len(tokenizer), vocab_size)) if i not in special]

    def make(self, *, length: int, depth: float, trial: int) -> NeedlePrompt:
        """Return the prompt of one trial, with `length` tokens including the answer.

        The needle is inserted after the fraction `depth` of the haystack's tokens, and distractors (needles
        with other keys and values) are inserted at random positions.

        Raises:
            RequestError: the needles don't fit in the length, or the text is too short.
        """
        rng = random.Random(f"{self._plan.seed}/{length}/{depth}/{trial}")
        needles = self._draw(rng, avoid=frozenset())
        asked = needles[0]
        rest = len(self._begin) + sum(len(n.ids) for n in needles) + len(asked.cue) + len(asked.value)
        size = length - rest
        if size < 1:
            raise RequestError(
                f"a length of {length} tokens has no room for a haystack: needles and question take {rest}; "
                f"ask for {rest + 1} or more, or for fewer distractors than {self._plan.distractors}"
            )
        if size > len(self._text):
            raise RequestError(
                f"the text has {len(self._text)} tokens, a length of {length} needs {size} of them; "
                f"give a longer text, or lengths up to {len(self._text) + rest}"
            )
        start = rng.randrange(len(self._text) - size + 1)
        haystack = self._text[start : start + size]
        at = round(depth * size)
        if self._plan.needle == TOKENS:  # draw again without the tokens nearby; sizes stay the same
            near = haystack[max(0, at - _NEARBY) : at + _NEARBY] + haystack[-_NEARBY:]
            needles = self._draw(rng, avoid=frozenset(near))
        return self._assemble(haystack, needles, [at] + [rng.randrange(size + 1) for _ in needles[1:]])

    @property
    def text_tokens(self) -> int:
        """Number of tokens in the text, which suffices for prompts up to this length."""
        return len(self._text)

    def _assemble(self, haystack: list[int], needles: list[_Needle], places: list[int]) -> NeedlePrompt:
        """Insert every needle at its position in the haystack, and append the question."""
        ids, done, needle_at = list(self._begin), 0, 0
        for index in sorted(range(len(needles)), key=lambda i: places[i]):
            ids += haystack[done : places[index]]
            done = places[index]
            if index == 0:
                needle_at = len(ids)
            ids += needles[index].ids
        ids += haystack[done:] + needles[0].cue
        return NeedlePrompt(
            ids=ids, answer=needles[0].value, needle_at=needle_at, needle_size=len(needles[0].ids)
        )

    def _draw(self, rng: random.Random, avoid: frozenset[int]) -> list[_Needle]:
        """Sample the needle to retrieve, followed by its distractors."""
        if self._plan.needle != TOKENS:
            keys = rng.sample(KEYS, 1 + self._plan.distractors)
            return [self._sentence(key, "".join(rng.choices(string.digits, k=_DIGITS))) for key in keys]
        ids = [i for i in self._plain if i not in avoid]
        if len(ids) < 2 * (_KEY_TOKENS + _VALUE_TOKENS):
            raise RequestError(
                f"needle={TOKENS!r} needs token ids that don't occur near the needle, and only {len(ids)} of "
                f"this vocabulary are left; give a sentence as the needle"
            )
        first = rng.sample(ids, _KEY_TOKENS + _VALUE_TOKENS)
        key, value = first[:_KEY_TOKENS], first[_KEY_TOKENS:]
        needles = [_Needle(cue=key, value=value, tail=[])]
        others = [i for i in ids if i not in first]
        for _ in range(self._plan.distractors):
            similar = list(key)
            similar[rng.randrange(_KEY_TOKENS)] = rng.choice(others)
            needles.append(_Needle(cue=similar, value=rng.sample(others, _VALUE_TOKENS), tail=[]))
        return needles

    def _sentence(self, key: str, value: str) -> _Needle:
        """Return the needle's token ids, split such that the cue on its own has the same tokens."""
        before, after = self._plan.needle.split("{value}")
        cue_text = before.rstrip().replace("{key}", key)
        answered = before.replace("{key}", key) + value
        cue = text_ids(self._tokenizer, cue_text)
        value_ids = text_ids(self._tokenizer, answered)
        if value_ids[: len(cue)] == cue:
            value_ids = value_ids[len(cue) :]
        else:
            value_ids = text_ids(self._tokenizer, answered[len(cue_text) :])
        return _Needle(cue=cue, value=value_ids, tail=text_ids(self._tokenizer, after) if after else [])
