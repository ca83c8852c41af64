"""Ways through a grammar: a given text's, or one at random."""

import numpy as np

from kvq.engine.params import StructuredOutput
from kvq.errors import RequestError
from tests.waiting import HANG_S


def matcher_of(compiler, **spec):
    return compiler.submit(StructuredOutput(**spec)).result(HANG_S)


def allowed_tokens(matcher) -> list[int]:
    packed = matcher.mask().numpy().view(np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()


def accepts(compiler, tokenizer, text: str, **spec) -> bool:
    """True if `text`, whole and ended, matches; every token of it is looked up in the mask too."""
    matcher = matcher_of(compiler, **spec)
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]:
        allowed = allowed_tokens(matcher)
        is_forced = len(allowed) == 1  # then other tokens of the same text are accepted, too
        try:
            matcher.accept(token)
        except RequestError:
            assert token not in allowed, "the mask allowed a token that was refused"
            return False
        assert token in allowed or is_forced, "a token was accepted that the mask forbids"
    return matcher.is_finished


def random_walk(matcher, tokenizer, rng, max_tokens: int) -> str | None:
    """Return a text of uniformly drawn tokens; None if it hasn't ended after `max_tokens`."""
    tokens: list[int] = []
    for _ in range(max_tokens):
        token = rng.choice(allowed_tokens(matcher))
        matcher.accept(token)
        if token != tokenizer.eos_token_id:
            tokens.append(token)
        if matcher.is_finished:
            return tokenizer.decode(tokens)
    return None
