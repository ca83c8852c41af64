"""Separation of control tokens, which give a prompt its structure, from text that merely spells them.

Before a chat template is rendered, spellings such as `<|im_end|>` in untrusted texts are replaced with
private characters that no text contains, so any spellings left in the result come from the template. A copy
of the tokenizer, in which control tokens have spellings that nobody can guess, then encodes the entire text.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvq.errors import RequestError
from kvq.models.loading.tokenizer import template_source

_PRIVATE = range(0x100000, 0x10FFFE)  # the last plane: unused in texts, unchanged by normalizers
_BYTES = 0xF0000  # the first of 256 private-plane characters that encode the bytes of hidden text
_LOOKS_IT = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # also code models' file tokens, absent from templates
_NONCE_LENGTH = 8  # characters: 128 bits


class ControlTokens:  # D292: spellings are hidden; a second tokenizer reads them
    """Control tokens of one tokenizer: its special tokens, and others that its chat template writes.

        safe = control.hide(turn["content"])
        text = tokenizer.apply_chat_template([{"role": "user", "content": safe}], tokenize=False)
        ids = control.encode(text)  # with no more control tokens than the template wrote

    Texts that spell control tokens are rejected if the tokenizer has no `tokenizer.json` or can't be copied.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a tokenizer of transformers; it is not changed."""
        self._tokenizer = tokenizer
        ids = _control_ids(tokenizer)
        self.spellings = frozenset(ids)
        nonce = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_NONCE_LENGTH))
        self._begin, self._end = nonce, nonce[::-1] + nonce[0]
        self._hidden = re.compile(f"{self._begin}(?P<veiled>[{chr(_BYTES)}-{chr(_BYTES + 255)}]+){self._end}")
        self._spelled = _one_of(ids)
        self._reserved = re.compile(f"[{nonce}]")
        self._parts = re.compile(
            f"{self._hidden.pattern}|(?P<spelled>{self._spelled.pattern})|{self._reserved.pattern}"
        )
        self._secret = {text: nonce + _number(i) for i, text in enumerate(ids)}
        # The tokenizer normalizes texts before it matches such tokens, so other spellings match, too
        self._is_normalized = any(
            token.normalized
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if str(token) in ids
        )
        self._folded_ones = {_folded(text) for text in ids}
        self._looked_for = _one_of(self._folded_ones)
        self._starts = {text[:n] for text in self._folded_ones for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._folded_ones for n in range(1, len(text))}
        self._longest = max(map(len, self._folded_ones), default=0)
        self._guarded = _guarded(tokenizer, self._secret, ids) if ids else None

    def hide(self, value: Any, *, whole: bool = False) -> Any:
        """Return a text, or lists and dictionaries of texts, with control tokens' spellings hidden.

        Spellings are hidden regardless of case. The beginning of a spelling at the end of a text and the end
        of one at its start are hidden too, ignoring outer white space, because adjacent text may complete
        them.
        `whole`: also hide a text that is part of a spelling, since a template may write the rest around it.
        """
        if isinstance(value, str):
            return self._hide(value, whole)
        if isinstance(value, list | tuple):
            return [self.hide(one, whole=whole) for one in value]
        if isinstance(value, dict):
            return {self._hide(str(k), False): self.hide(one, whole=whole) for k, one in value.items()}
        return value

    def show(self, text: str) -> str:
        """Return a text with hidden spellings restored; fragments of the hiding characters are removed."""
        return self._reserved.sub("", self._hidden.sub(lambda found: _shown(found[1]), text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered template with hidden texts; no special tokens are added."""
        return self.encode_placed(text)[0]

    def encode_placed(self, text: str) -> tuple[list[int], Callable[[int], int | None] | None]:
        """Return what `encode` does, and a function that maps characters of the text to indices of tokens.

        The function is None if the text has hidden spellings, or if the tokenizer does not know.

        Raises:
            RequestError: the text contains a hidden spelling that this tokenizer can't encode as plain text.
        """
        if self._begin not in text and not (self._is_normalized and self._guarded is not None):
            found = self._tokenizer(text, add_special_tokens=False)
            return found["input_ids"], found.char_to_token if getattr(found, "is_fast", False) else None
        return self._read(self._parts.sub(self._resolved, text), special=False), None

    def encode_plain(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text without any control tokens, whatever the text spells.

        `special`: include the special tokens that the tokenizer adds around a text.

        Raises:
            RequestError: the text spells a control token that this tokenizer can't encode as plain text.
        """
        if self._guarded is not None:
            self._check_reserved(text)
            return self._read(text, special)
        if self._spelled.search(text):
            raise _cannot(self._spelled.search(text))
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _read(self, text: str, special: bool) -> list[int]:
        if self._guarded is None:
            raise _cannot(self._spelled.search(text))
        ids: list[int] = self._guarded.encode(text, add_special_tokens=special).ids
        return ids

    def _hide(self, text: str, whole: bool) -> str:
        if not text or not self.spellings:
            return text
        self._check_reserved(text)
        bare = text.strip()  # templates may strip it, too, and write the rest next to other text
        if whole and bare and self._is_piece(bare):
            return text.replace(bare, self._veil(bare))
        text = self._hide_whole_ones(text)
        start = len(text) - len(text.lstrip())
        head = self._num_ending(text[start : start + self._longest - 1])
        text = text[:start] + self._veil(text[start : start + head]) + text[start + head :]
        end = len(text.rstrip())
        tail = self._num_beginning(text[max(0, end - self._longest + 1) : end])
        return text[: end - tail] + self._veil(text[end - tail : end]) + text[end:]

    def _is_piece(self, text: str) -> bool:
        """Return True if a text is part of a control token's spelling."""
        if len(text) >= self._longest:
            return False
        folded = _folded(text)
        return any(folded in one for one in self._folded_ones)

    def _hide_whole_ones(self, text: str) -> str:
        folded = _folded(text)
        found = [one.span() for one in self._looked_for.finditer(folded)]
        if not found:
            return text
        origins = _origins(text, folded)
        parts, done = [], 0
        for first, end in found:
            begin, after = max(done, origins[first]), origins[end - 1] + 1
            parts += [text[done:begin], self._veil(text[begin:after])]
            done = after
        return "".join(parts) + text[done:]

    def _num_ending(self, text: str) -> int:
        """Return how many characters at a text's beginning may be the end of a spelling."""
        folded = _folded(text)
        found = next((n for n in range(len(folded), 0, -1) if folded[:n] in self._ends), 0)
        return _origins(text, folded)[found - 1] + 1 if found else 0

    def _num_beginning(self, text: str) -> int:
        """Return how many characters at a text's end may be the beginning of a spelling."""
        folded = _folded(text)
        found = next((at for at in range(len(folded)) if folded[at:] in self._starts), None)
        return len(text) - _origins(text, folded)[found] if found is not None else 0

    def _resolved(self, found: re.Match[str]) -> str:
        """Return a match's replacement for the guarded tokenizer; "" for broken fragments of hidden text."""
        if found["veiled"] is not None:
            return _shown(found["veiled"])
        return self._secret[found["spelled"]] if found["spelled"] is not None else ""

    def _check_reserved(self, text: str) -> None:
        """Raise RequestError if a text contains characters of the nonce, which must have leaked."""
        if self._reserved.search(text):
            raise RequestError("the text holds characters of a private Unicode range that are taken here")

    def _veil(self, text: str) -> str:
        if not text:
            return ""
        return self._begin + "".join(chr(_BYTES + byte) for byte in text.encode()) + self._end


def _control_ids(tokenizer: Any) -> dict[str, int]:
    """Return ids, keyed by spelling, of added tokens that are or look special or are in the template."""
    source = template_source(tokenizer)
    found: dict[str, int] = {
        str(token): number
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if str(token).strip() and (token.special or str(token) in source or _LOOKS_IT.fullmatch(str(token)))
    }
    return found


def _number(i: int) -> str:
    """Return a number encoded as two private characters."""
    high, low = divmod(i, len(_PRIVATE))
    return chr(_PRIVATE[high]) + chr(_PRIVATE[low])


def _one_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that, like the tokenizer, matches the longest spelling at a position."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _folded(text: str) -> str:  # D293: any case: templates may change it
    """Return a folded text that is the same for all texts that differ only in case."""
    return text.upper().casefold()  # casefold leaves the dotless i unchanged; upper turns it into I


def _origins(text: str, folded: str) -> Sequence[int]:
    """Return, for each character of a folded text, the index of its original character."""
    if len(folded) == len(text):
        return range(len(text))
    return [at for at, character in enumerate(text) for _ in _folded(character)]


def _guarded(tokenizer: Any, secret: dict[str, str], ids: dict[str, int]) -> Any:
    """Return a tokenizer copy with secret spellings of control tokens, or None if that is impossible."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer

    tree = json.loads(backend.to_str())
    tree["padding"] = tree["truncation"] = None
    for token in tree["added_tokens"]:
        token["content"] = secret.get(token["content"], token["content"])
    _rename(tree["model"], secret)
    try:
        guarded = Tokenizer.from_str(json.dumps(tree))
    except Exception:  # noqa: BLE001 - the parser may raise anything for an unexpected vocabulary
        return None
    same = all(guarded.token_to_id(secret[text]) == number for text, number in ids.items())
    return guarded if same else None


def _rename(model: dict[str, Any], secret: dict[str, str]) -> None:
    """Rename control tokens in a tokenizer model, whose vocabulary may contain them as ordinary pieces."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # without merges that would produce a renamed piece
        model["merges"] = [pair for pair in model["merges"] if _joined(pair) not in secret]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = secret.get(model["unk_token"], model["unk_token"])


def _joined(pair: Any) -> str:
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)


def _shown(veiled: str) -> str:
    return bytes(ord(character) - _BYTES for character in veiled).decode()


def _cannot(found: re.Match[str] | None) -> RequestError:
    what = "a control token" if found is None else repr(found[0])
    return RequestError(f"this model's tokenizer can't read {what} as plain text; leave it out")
