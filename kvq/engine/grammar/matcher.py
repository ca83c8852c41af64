"""Grammar matcher: the state of one request branch in its compiled grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher
from torch import Tensor, frombuffer, int32

from kvq.engine.grammar.vocabulary import Vocabulary
from kvq.engine.grammar.worker import reason
from kvq.errors import RequestError


class Matcher:
    """State of one branch in its grammar.

    Branches of a request share llguidance's lexer states, but requests don't: the limit on these states
    applies to a grammar and all its copies, so one request that reached the limit would end all others.
    """

    def __init__(self, vocabulary: Vocabulary, state: LLMatcher):
        self._vocabulary = vocabulary
        self._state = state

    def mask(self) -> Tensor:
        """Return the tokens allowed next: int32 [ceil(vocab_size / 32)] on the CPU, one bit per token.

        Token t is bit t % 32 of word t // 32. End tokens are allowed exactly where the grammar may end; ids
        that only pad the logits are never allowed. At least one token is allowed. If only one text can
        follow, only its usual token is allowed or, where the text spells a special token, only a plain token
        that begins it; `accept` also takes other tokens that spell the text.

        Raises:
            RequestError: the next mask takes more work than the limits allow, or no token can follow.
        """
        packed = self._state.compute_bitmask()
        self._check()
        ids = self._vocabulary.known if self._state.is_accepting() else self._vocabulary.inner
        mask = frombuffer(bytearray(packed), dtype=int32, count=len(ids)) & ids  # may be a word longer
        if int(mask.count_nonzero()) <= 1:
            self._spell(mask)
            if not bool(mask.any()):
                raise RequestError("structured output: the grammar leaves no token that can come next")
        return mask

    def _spell(self, mask: Tensor) -> None:
        """Allow a plain token where llguidance forces a special token, which it would then refuse.

        llguidance tokenizes forced text as the tokenizer does, which turns the text of a special token into
        that token.
        """
        forced = self._state.compute_ff_tokens()[:1]
        if not forced or self._state.validate_tokens(forced):
            return
        text = self._state.compute_ff_bytes().decode(errors="ignore")
        plain = self._vocabulary.tokenizer.greedy_tokenize(text)[:1]
        mask.zero_()
        if self._state.validate_tokens(plain):
            mask.numpy().view("<u4")[plain[0] >> 5] = 1 << (plain[0] & 31)

    def accept(self, token: int) -> None:
        """Advance by one token. An end token after a complete text is accepted and changes nothing.

        Raises:
            RequestError: the token isn't allowed here (the state is unchanged), or a limit was reached.
        """
        ends = token in self._vocabulary.eos_ids
        if ends and self.is_finished:
            return
        if (
            not self._vocabulary.is_known(token)
            or (ends and not self._state.is_accepting())
            or self._state.try_consume_tokens([token]) != 1
        ):
            self._check()
            raise RequestError(f"structured output: token {token} isn't allowed here")

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many leading `tokens` are allowed, not counting any end token. Changes nothing."""
        ends = (
            i
            for i, t in enumerate(tokens)
            if t in self._vocabulary.eos_ids or not self._vocabulary.is_known(t)
        )
        first = next(ends, len(tokens))
        return int(self._state.validate_tokens(list(tokens[:first])))

    @property
    def is_finished(self) -> bool:
        """True if only an end token can follow, or the end has been reached."""
        return self._state.is_stopped() and not self._state.is_error()

    def fork(self) -> "Matcher":
        """Return an independent copy."""
        return Matcher(self._vocabulary, self._state.deep_copy())

    def _check(self) -> None:
        if self._state.is_error():
            raise RequestError(f"structured output: {reason(self._state)}")
