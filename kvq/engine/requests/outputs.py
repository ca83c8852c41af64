"""Request outputs: streamed pieces while a request is running, and results when it ends."""

from dataclasses import dataclass, field
from typing import Literal

from kvq.blockmgr import PrefixMiss
from kvq.errors import KVQError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of a token and of the most likely tokens at its position.

    `rank`: 1 for the most likely token; on ties, the lower id comes first. `top`: the most likely tokens with
    their log-probabilities, ordered by rank. Values may be -inf, or NaN if the logits were NaN.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactReceipt:
    """Digests of a request to an exact engine, in hex. Requests with the same `digest` have the same bits.

    `tokens` and `prompt` have 8 digits per token, over its id and, if requested, its log-probabilities, and
    over all tokens before it. `kv` covers the K and V of a result as they are stored; it is empty for beams.
    """

    digest: str  # of the model, recipe, program and request
    model: str  # config and tensors of the checkpoint
    recipe: str  # how K and V are stored
    program: str  # versions, kernels and the dtype that compute, in words
    request: str  # prompt and sampling parameters, with the seed, the limit and the tokens that end a text
    seed: int
    max_tokens: int  # the limit, also if the request leaves it to context and pool
    kv: list[str]  # by result
    tokens: list[str]  # by result
    prompt: str  # of prompt tokens with log-probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Resources that one request used. Block counts are totals over all layer groups."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix index
    host_tokens: int  # of these, brought back from host memory for this request
    disk_tokens: int  # of these, brought back from the disk for this request
    cold_tokens: int  # of these, or of those found after a preemption, stored in fewer bits meanwhile
    pinned_tokens: int  # prompt tokens pinned there for a time
    generated_tokens: int  # in all results
    recomputed_tokens: int  # computed again after a preemption
    restored_tokens: int  # brought back from host memory or the disk after a preemption
    blocks: int  # allocated from the pools
    shared_blocks: int  # found in the prefix index or shared between results
    copied_blocks: int  # copied before a write
    peak_blocks: int  # peak number that one result held
    peak_bytes: int  # peak bytes of the KV pools held by one result, with scales and padding
    preemptions: int
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of these, confirmed by the model
    miss: PrefixMiss | None = None  # why no more prompt tokens were found there; None: there are none to find
    exact: ExactReceipt | None = None  # of an exact engine


@dataclass(kw_only=True, slots=True)
class Timing:
    """Times of a request in seconds. `itl_s`: times between consecutive steps that produced tokens."""

    arrival_s: float  # on the engine's clock; all others are durations
    queue_s: float | None = None  # from arrival until it got blocks
    prefill_s: float | None = None  # from then until the first token
    ttft_s: float | None = None  # from arrival to the first token
    e2e_s: float | None = None  # from arrival to the end
    itl_s: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One of the results of a request."""

    index: int
    text: str
    token_ids: list[int]  # generated tokens, including the end token
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    cumulative_logprob: float | None = None  # if log-probabilities were requested, and for beams
    logprobs: list[TokenLogprobs] | None = None  # per token
    kv_digest: str = ""  # of the stored K and V that its last token read, if the engine is exact


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """Output of a request. `error`: the cause if the finish reason is "error"."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # entries are None before the start
    receipt: Receipt
    timing: Timing
    error: KVQError | None = None
    vector: list[float] | None = None  # an embedding or the score, if requested


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptUse:
    """Token counts for a prompt."""

    total: int
    cached: int  # of these, found in the prefix index
    pinned: int  # of these, pinned there for a time


@dataclass(kw_only=True, slots=True)  # one per token: a frozen one would take four times as long to create
class Piece:  # D239: one per token: neither frozen nor msgspec
    """Tokens that one step added to one result, with the text completed by these tokens.

    The last piece of a result has a `finish_reason`; the last piece of `stream` also has the `output`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptUse | None = None  # with the first piece of a streaming request
    output: RequestOutput | None = None


Event = Piece | RequestOutput  # what a listener receives: pieces, then the output


def as_piece(event: Event) -> Piece:
    """Return an event as a piece of a stream. The final output becomes a piece without tokens.

    Raises:
        KVQError: the error that ended the request.
    """
    if isinstance(event, Piece):
        return event
    if event.error is not None:
        raise event.error
    return Piece(request_id=event.request_id, index=0, text="", token_ids=[], output=event)
