"""Token texts: single tokens as text and bytes, and their log-probabilities in OpenAI's form."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvq.engine import TokenLogprobs

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


class TokenTexts:
    """Token texts of a tokenizer, cached per token, since a response may have a million tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = repr(getattr(backend, "decoder", None))
        self._byte_of = _byte_level() if "ByteLevel" in decoder else None
        self._has_spaces = _SPACE in decoder or "Metaspace" in decoder
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token for token, known in added.items() if known.special}
        self._look = cache(self._read)

    def text(self, token: int) -> str:
        r"""Return the text of a token; partial characters appear as in OpenAI's API: `bytes:\xf0\x9f`."""
        return self._look(token)[0]

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token; concatenating the bytes of all tokens gives the bytes of the text."""
        return self._look(token)[1]

    def completion_logprobs(
        self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], start: int, *, within: str = ""
    ) -> dict[str, Any]:
        """Return log-probabilities of tokens from text offset `start` on; a prompt's first token has none.

        `within`: the text of the prompt, without tokens that the tokenizer added.
        """
        tokens, values, tops, offsets = [], [], [], []
        for token, entry in zip(ids, entries, strict=True):
            tokens.append(self.text(token))
            values.append(None if entry is None else _finite(entry.logprob))
            tops.append(None if entry is None else {self.text(t): _finite(value) for t, value in entry.top})
            offsets.append(start)
            raw = self.raw(token)
            if within and not within.startswith(raw.decode(errors="ignore"), start):
                is_space = within.startswith(" ", start)
                raw = b"" if token in self._special else raw if is_space else raw.removeprefix(b" ")
            start += sum(byte & 0xC0 != 0x80 for byte in raw)  # characters that start in this token
            start = min(start, len(within)) if within else start
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the log-probabilities of a message's tokens in the form of the chat API."""
        content = [
            self._named(entry.token, entry.logprob)
            | {"top_logprobs": [self._named(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(self.raw(token))}

    def _read(self, token: int) -> tuple[str, bytes]:
        raw = self._raw(token)
        if raw is None:
            text: str = self._tokenizer.decode([token])
            return text, text.encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _raw(self, token: int) -> bytes | None:
        """Return the bytes of a token, or None if the vocabulary's notation for bytes is unknown."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if self._byte_of is not None:
            values = [self._byte_of.get(character, -1) for character in piece]
            return None if -1 in values else bytes(values)
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return piece.replace(_SPACE, " ").encode() if self._has_spaces else None


def _finite(value: float) -> float:
    """Return the value, clamped to at least -9999 as in OpenAI's API, because JSON has no infinity."""
    return max(value, -9999.0)


def _byte_level() -> dict[str, int]:
    """Return the byte for each character in byte-level vocabularies (GPT-2, Radford et al., 2019):
    printable bytes map to themselves, all others to characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
