"""Messages between the HTTP process and the engine process."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvq.blockmgr import PoolUsage
from kvq.engine import Piece, Receipt, Timing, TokenLogprobs
from kvq.engine.requests.outputs import FinishReason
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import KVQError, Overloaded, RequestError
from kvq.scheduler import PoolShape, SchedulerConfig, Snapshot
from kvq.scheduler.request import RequestState
from kvq.server.engine.residency import BlockTimes
from kvq.server.kv_events.config import EventsConfig
from kvq.server.logs import LogConfig


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


# To the engine


class Start(Message, frozen=True):
    """First message: the engine to build."""

    folder: str  # of the model; absolute, and never looked up as a name
    kv: str
    options: dict[str, Any]  # of `kvq.LLM`
    log: LogConfig = LogConfig()
    kv_events: EventsConfig | None = None


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes, so that a prompt of a million is not visited id by id on its way."""
    return array("I", tokens).tobytes()


def unpack(packed: bytes) -> "array[int]":
    """Return token ids that were packed."""
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens


class Submit(Message, frozen=True):
    """Request to generate from a prompt."""

    number: int
    prompt: bytes  # token ids, packed
    options: RequestOptions


class Cancel(Message, frozen=True):
    """Request to cancel a request; ignored if it has ended."""

    number: int


class Ping(Message, frozen=True):
    """Sign of life, answered at once with another one even during a step."""


class Look(Message, frozen=True):
    """Request for a picture of the engine. One picture, taken between two steps, may answer several."""


# From the engine


class Ready(Message, frozen=True):
    """The engine was built."""

    model_digest: str  # of the checkpoint's tensors
    vocab_size: int
    block_bytes: list[int]  # per layer group
    kv: list[str]  # the formats' full names per layer group: "int4_g32_s8_rot", or K/V where they differ
    shape: PoolShape
    scheduler: SchedulerConfig
    is_staging: list[bool] = []  # per layer group: for tokens that stay unquantized; none: no group is

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self.scheduler.max_context


class Refused(Message, frozen=True):
    """The engine can't be built. Another try helps only if `may_pass`."""

    reason: str
    may_pass: bool = False
    breaks_model: bool = False  # the KV format does


ErrorKind = Literal["request", "busy", "engine"]  # cause: the request, the load, or the engine


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """End of a request. Without an error its results are complete."""

    number: int
    receipt: Receipt | None = None  # None if it was refused
    timing: Timing | None = None  # None if it was refused; without `itl_s`, which the steps reported
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    kind: ErrorKind | None = None  # of the error

    def failed(self, error: KVQError) -> "Ended":
        """Return this message for a failed request, with the kind of its error."""
        kind: ErrorKind = "request" if isinstance(error, RequestError) else "engine"
        kind = "busy" if isinstance(error, Overloaded) else kind
        return msgspec.structs.replace(self, error=str(error), kind=kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges(Snapshot):
    """Engine gauges after a step; totals are since its start."""

    generated_tokens: int
    evictions: int = 0  # blocks that left the prefix index
    pinned: list[int] = field(default_factory=list)  # blocks under a pin, per layer group
    refused_pins: int = 0
    kv_events: int = 0  # changes of blocks that were published
    dropped_kv_events: int = 0  # of these, dropped for lack of room
    memory: dict[str, int] = field(default_factory=dict)  # bytes by device: "host", "cuda:0"


class Stepped(Message, frozen=True):
    """Result of a step."""

    pieces: list[Piece]
    ended: list[Ended]
    gauges: Gauges
    itl_s: list[float] = []  # between neighbouring tokens of a request, of all requests
    block_times: BlockTimes | None = None  # since the last message; None: no event


# The engine as the web page shows it: blocks and counts, never the text of a prompt


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Share of a block that one format takes."""

    kv: str  # the format's name
    side: Literal["K", "V", "K and V"]
    layers: int
    block_bytes: int  # scales included


class PoolSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One layer group's blocks."""

    cells: bytes  # a byte for every `stride`-th block, see `kvq.blockmgr.snapshot`
    stride: int
    usage: PoolUsage
    window: int | None  # tokens; None: full attention
    block_bytes: int
    parts: list[Part]


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended."""

    number: int
    tenant: str
    state: RequestState
    branches: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    blocks: int  # held now, over all layer groups
    preemptions: int
    seconds: float  # since it arrived
    ttft_s: float | None


class PastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ended."""

    number: int
    tenant: str
    finish_reason: FinishReason
    receipt: Receipt
    queue_s: float | None
    ttft_s: float | None
    itl_s: float | None  # median of the request
    e2e_s: float | None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles over the requests that ended last, in seconds; None if none was measured."""

    requests: int
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None


class TenantSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant, in the order of the owner codes."""

    name: str
    running: int
    waiting: int  # preempted ones too
    latency: Latency


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """State of the engine between two steps."""

    cost_s: float  # time to make this picture
    kv: str  # the recipe's name
    block_size: int  # tokens
    pools: list[PoolSnapshot]
    tenants: list[TenantSnapshot]
    live: list[LiveRequest]  # a few of each tenant, oldest first
    past: list[PastRequest]  # a few of each tenant, latest first


ToEngine = Start | Submit | Cancel | Ping | Look
FromEngine = Ready | Refused | Ping | Stepped | EngineSnapshot
