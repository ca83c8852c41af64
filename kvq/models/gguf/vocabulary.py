"""Vocabulary of a GGUF file: its tokens, their kinds and the special ones among them, checked."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isnan
from typing import Any

from kvq.errors import ModelError

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)  # kinds of tokens
_PREFIX = "tokenizer.ggml."
_MARKED = (CONTROL, UNKNOWN, USER_DEFINED)  # kinds that are found in a text before it is split
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of SentencePiece, for files that don't say
_TURNS = ("bos", "eos", "eot", "eom")
ENDS = (  # control tokens that end a text or a turn, whatever a file takes them for
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>",
    "<|END_OF_TURN_TOKEN|>", "[|endofturn|]",
)  # fmt: skip


class Vocabulary:
    """Tokens of a GGUF file by id, and what its metadata say about them below tokenizer.ggml."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        """ModelError if the tokens or their kinds are missing, damaged, or don't fit each other."""
        self._metadata, self.name = metadata, name
        model = self.get("model", str)
        if model not in ("llama", "gpt2"):
            raise self.wrong("model", f"is {model!r:.80}; kvq reads llama (SentencePiece) and gpt2 (bytes)")
        self.is_sentencepiece = model == "llama"  # False: bytes with a list of merges
        self.tokens: Sequence[str] = _with_texts(self.values("tokens", str))
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            first, text = next((i, token) for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise self.wrong("tokens", f"has {text!r:.80} at {first} and at {self.ids[text]}")
        self.kinds = self.values("token_type", int, len(self.tokens))
        if not set(self.kinds) <= set(range(BYTE + 1)):
            raise self.wrong("token_type", f"must be 0 to {BYTE}, got {max(self.kinds, key=abs)}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a key; ModelError if it is not of this type."""
        value = self._metadata.get(_PREFIX + key)
        if value is not None and type(value) is not kind:
            raise self.wrong(key, f"must be of type {kind.__name__}, got {value!r:.80}")
        return default if value is None else value

    def wrong(self, key: str, why: str) -> ModelError:
        """Return the error of a key."""
        return ModelError(f"{self.name}: {_PREFIX}{key} {why}; download or convert the model again")

    def values(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        """Return the list of a key; ModelError if it is missing, empty, or of another type or count."""
        values: list[Any] = self.get(key, list)
        if not values:
            raise self.wrong(key, "is missing" if values is None else "is empty")
        if others := set(map(type, values)) - {kind}:
            raise self.wrong(key, f"must be a list of {kind.__name__}, got {others.pop().__name__} in it")
        if count not in (None, len(values)):
            raise self.wrong(key, f"has {len(values)} values for {count} tokens")
        return values

    @cached_property
    def scores(self) -> list[float]:
        """Scores by token: of two possible merges, the one that makes the higher score comes first."""
        scores = self.values("scores", float, len(self.tokens))
        if any(map(isnan, scores)):
            raise self.wrong("scores", "must be numbers, got NaN")
        return scores

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids that the file names for bos, eos, eot, eom, unknown and padding.

        For unknown and padding, an ordinary token is a stand-in and left out.
        """
        found = {}
        for role in (*_TURNS, "unknown", "padding"):
            number: int = self.get(f"{role}_token_id", int, -1)
            is_said = number != -1
            if not is_said and self.is_sentencepiece:
                number = _DEFAULT_IDS.get(role, -1)
            if 0 <= number < len(self.tokens):
                if self.kinds[number] in _MARKED or (is_said and role in _TURNS):
                    found[role] = number
            elif is_said and role != "padding":  # some have a padding beyond the tokens; nothing is padded
                raise self.wrong(f"{role}_token_id", f"is {number}, and there are {len(self.tokens)} tokens")
        return found

    @cached_property
    def marked(self) -> dict[int, bool]:
        """Ids of tokens that are found in a text before it is split; True for control tokens."""
        marked = {i: kind != USER_DEFINED for i, kind in enumerate(self.kinds) if kind in _MARKED}
        control = [self.special[role] for role in _TURNS if role in self.special]
        control += [self.ids[text] for text in ENDS if text in self.ids]
        return dict(sorted((marked | dict.fromkeys(control, True)).items()))


def _with_texts(tokens: list[str]) -> list[str]:
    """Return tokens with stand-ins for empty ones and for bytes that are no UTF-8, which no text has."""
    try:
        if all(tokens) and "".join(tokens).encode():
            return tokens
    except UnicodeEncodeError:
        pass
    broken = [not token or any("\ud800" <= one <= "\udfff" for one in token) for token in tokens]
    return [f"[NO TEXT {i}]" if broken[i] else token for i, token in enumerate(tokens)]
