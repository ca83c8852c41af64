"""Merges of a SentencePiece vocabulary, of which a GGUF file has the scores alone.

SentencePiece joins neighbouring pieces to the token with the highest score, the leftmost first, until no two
make a token. The tokenizers library wants the pairs instead, best first: every way to cut a token in two
tokens. A pair that no text can bring together does no harm.
"""

from collections.abc import Sequence


def scored_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of tokens that make another, in the order of what they make.

    `tokens`: without empty or equal ones, the highest score first.
    """
    known = {token: token for token in tokens}.get  # pairs hold the same strings
    return [
        (left, right)
        for token in tokens
        for at in range(1, len(token))
        if (left := known(token[:at])) and (right := known(token[at:]))
    ]
