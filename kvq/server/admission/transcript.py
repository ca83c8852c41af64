"""Transcripts: what the engine generated for a request, kept beside its answer to compare two versions."""

from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from kvq.engine import TokenLogprobs
from kvq.engine.requests.outputs import Piece
from kvq.engine.requests.request_options import RequestOptions
from kvq.scheduler import Priority
from kvq.server.engine.messages import Ended


@dataclass(kw_only=True, slots=True, eq=False)
class Transcript:  # D429: tokens of the engine, not texts; both have one seed
    """Tokens of the first result of a request's first prompt, with log-probabilities if it asks for them."""

    seed: int  # for sampling, unless the request has one
    is_shadow: bool = False  # a copy of another request, whose answer nobody sees
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_complete: bool = False
    _is_taken: bool = False

    def take(self, options: RequestOptions) -> "tuple[RequestOptions, Transcript | None]":
        """Return a prompt's options with the seed, and the transcript if it is the first prompt."""
        own, self._is_taken = None if self._is_taken else self, True
        if options.params.seed is None:
            options = replace(options, params=replace(options.params, seed=self.seed))
        return replace(options, priority=Priority.BATCH) if self.is_shadow else options, own

    def add(self, message: Piece | Ended) -> None:
        """Add a message of the engine."""
        if isinstance(message, Ended):
            self.is_complete = message.error is None
        elif message.index == 0:
            self.token_ids += message.token_ids
            self.logprobs += message.logprobs or ()


transcript: ContextVar[Transcript | None] = ContextVar("kvq_transcript", default=None)  # of this request
