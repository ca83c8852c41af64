"""Control tokens, which give a prompt its structure, told apart from text that only spells them.

Before a chat template is rendered, spellings such as `<|im_end|>` in untrusted texts are hidden behind
characters that no text holds; in the result those that are left are the template's own. A second tokenizer,
the same but that it knows its control tokens by spellings nobody can guess, then reads the whole.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from kvq.errors import RequestError
from kvq.models.loading.tokenizer import template_source

_PRIVATE = range(0x100000, 0x10FFFE)  # the last plane: used in no text, changed by no normalizer
_BYTES = 0xF0000  # the first of 256 characters of a private plane, which stand for a hidden text's bytes
_LOOKS_IT = re.compile(r"<[|\uff5c].+[|\uff5c]>")  # of code models, whose templates know nothing of files
_NONCE_LENGTH = 8  # characters: 128 bits


class ControlTokens:  # D292: spellings hidden, read by a second tokenizer
    """Control tokens of one tokenizer: its special tokens, and others that its chat template writes.

        safe = control.hide(turn["content"])
        text = tokenizer.apply_chat_template([{"role": "user", "content": safe}], tokenize=False)
        ids = control.encode(text)  # with no more control tokens than the template wrote

    A tokenizer without `tokenizer.json`, or whose control tokens can't be told apart, refuses such texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of transformers; it is not changed."""
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
        # Of such tokens the tokenizer sees other spellings than those that are looked for
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
        """`value`, a text or lists and dictionaries of them, with control tokens' spellings hidden.

        So they are in any case. Beginnings of one at a text's end, and ends at its beginning, are hidden,
        too, also before and behind white space: what comes to stand beside it may complete them. `whole`: so
        is a text that is a part of one, around which a template may write the rest.
        """
        if isinstance(value, str):
            return self._hide(value, whole)
        if isinstance(value, list | tuple):
            return [self.hide(one, whole=whole) for one in value]
        if isinstance(value, dict):
            return {self._hide(str(k), False): self.hide(one, whole=whole) for k, one in value.items()}
        return value

    def show(self, text: str) -> str:
        """Return a text as it was before anything in it was hidden; pieces of what hid it are left out."""
        return self._reserved.sub("", self._hidden.sub(lambda found: _shown(found[1]), text))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered template, in which untrusted texts were hidden; nothing is added.

        Raises:
            RequestError: something is hidden in it, and this tokenizer can't read it as plain text.
        """
        if self._begin not in text and not (self._is_normalized and self._guarded is not None):
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        return self._read(self._parts.sub(self._resolved, text), special=False)

    def encode_plain(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text that holds no control tokens, whatever it spells.

        `special`: with what the tokenizer puts around a text by itself.

        Raises:
            RequestError: it spells one, and this tokenizer can't read that as plain text.
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
        bare = text.strip()  # as templates may do it, and then what is left stands beside others
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
        """True if a token is a part of a spelling."""
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
        """Characters at a text's beginning with which a spelling may end."""
        folded = _folded(text)
        found = next((n for n in range(len(folded), 0, -1) if folded[:n] in self._ends), 0)
        return _origins(text, folded)[found - 1] + 1 if found else 0

    def _num_beginning(self, text: str) -> int:
        """Characters at a text's end with which a spelling may begin."""
        folded = _folded(text)
        found = next((at for at in range(len(folded)) if folded[at:] in self._starts), None)
        return len(text) - _origins(text, folded)[found] if found is not None else 0

    def _resolved(self, found: re.Match[str]) -> str:
        """Return the text for the guarded tokenizer, without what a template left of something hidden."""
        if found["veiled"] is not None:
            return _shown(found["veiled"])
        return self._secret[found["spelled"]] if found["spelled"] is not None else ""

    def _check_reserved(self, text: str) -> None:
        """Raise RequestError if a text could join in with what hides others: somebody has seen it."""
        if self._reserved.search(text):
            raise RequestError("the text holds characters of a private Unicode range that are taken here")

    def _veil(self, text: str) -> str:
        if not text:
            return ""
        return self._begin + "".join(chr(_BYTES + byte) for byte in text.encode()) + self._end


def _control_ids(tokenizer: Any) -> dict[str, int]:
    """Added tokens that are special, that the chat template writes, or that look it, by their spelling."""
    source = template_source(tokenizer)
    found: dict[str, int] = {
        str(token): number
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if str(token).strip() and (token.special or str(token) in source or _LOOKS_IT.fullmatch(str(token)))
    }
    return found


def _number(i: int) -> str:
    """Return a number in two private characters."""
    high, low = divmod(i, len(_PRIVATE))
    return chr(_PRIVATE[high]) + chr(_PRIVATE[low])


def _one_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return the longest of those that begin at a place, as the tokenizer takes it."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _folded(text: str) -> str:  # D293: any case: templates may change it
    """Fold a text so that all texts which changes of case may turn into each other fold alike."""
    return text.upper().casefold()  # casefold leaves the dotless i, which upper makes an I


def _origins(text: str, folded: str) -> Sequence[int]:
    """Return the index of the character that each character of a folded text comes from."""
    if len(folded) == len(text):
        return range(len(text))
    return [at for at, character in enumerate(text) for _ in _folded(character)]


def _guarded(tokenizer: Any, secret: dict[str, str], ids: dict[str, int]) -> Any:
    """Return a copy of the tokenizer with other spellings of its control tokens; None if it can't be made."""
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
    except Exception:  # noqa: BLE001 - whatever the parser makes of a vocabulary it does not expect: not guarded
        return None
    same = all(guarded.token_to_id(secret[text]) == number for text, number in ids.items())
    return guarded if same else None


def _rename(model: dict[str, Any], secret: dict[str, str]) -> None:
    """In a tokenizer's vocabulary, where control tokens may stand as pieces like any other."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {secret.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # none that made such a piece, which would be missing
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
