"""What requests return: pieces while they run, results when they end."""

from dataclasses import dataclass, field
from typing import Literal

from kvq.errors import KVQError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, beside the likeliest ones.

    `rank`: 1 is the likeliest; of equally likely tokens the lower id comes first. `top`: the likeliest
    tokens with their log-probabilities, in that order. -inf is legal, and NaN where the logits were NaN.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What one request used. Blocks are counted over all layer groups."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix index
    pinned_tokens: int  # of the prompt, kept there for a time as the request asked
    generated_tokens: int  # of all results
    recomputed_tokens: int  # computed again after a preemption
    blocks: int  # taken from the pools
    shared_blocks: int  # found in the prefix index or shared between results
    copied_blocks: int  # copied before a write
    swapped_blocks: int  # moved to host memory
    peak_blocks: int  # most that one result held at once
    peak_bytes: int  # most bytes of the KV pools that one result held at once, scales and padding included
    preemptions: int
    drafted_tokens: int = 0  # guessed by speculation
    accepted_tokens: int = 0  # of these, what the model would have said


@dataclass(kw_only=True, slots=True)
class Timing:
    """When things happened to a request, in seconds. `itl_s`: between neighbouring steps with tokens."""

    arrival_s: float  # on the engine's clock; all others are durations
    queue_s: float | None = None  # until it was given blocks
    prefill_s: float | None = None  # from then to the first token
    ttft_s: float | None = None  # from arrival to the first token
    e2e_s: float | None = None  # from arrival to the end
    itl_s: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One result of a request."""

    index: int
    text: str
    token_ids: list[int]  # generated, the end token included
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    cumulative_logprob: float | None = None  # where log-probabilities were asked for, and of beams
    logprobs: list[TokenLogprobs] | None = None  # per token


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request that ended. `error` says why, where `finish_reason` is "error"."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None before the start
    receipt: Receipt
    timing: Timing
    error: KVQError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptUse:
    """What a prompt took, in tokens."""

    total: int
    cached: int  # of these, found in the prefix index
    pinned: int  # of these, kept there for a time


@dataclass(kw_only=True, slots=True)  # one a token: frozen, it would take four times as long to make
class Piece:
    """What one step added to one result: tokens, and the text that became complete with them.

    The last piece of a result has a `finish_reason`; the last one of `stream` an `output` too.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptUse | None = None  # with the first piece of a request that shows its tokens as they come
    output: RequestOutput | None = None


Event = Piece | RequestOutput  # what a request tells its listener: what was added, and in the end all of it


def as_piece(event: Event) -> Piece:
    """An event for who reads a stream: the end is a last piece that adds nothing.

    Raises:
        KVQError: the one that ended the request.
    """
    if isinstance(event, Piece):
        return event
    if event.error is not None:
        raise event.error
    return Piece(request_id=event.request_id, index=0, text="", token_ids=[], output=event)
