"""What the HTTP process and the engine process say to each other."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvq.blockmgr import PoolUsage
from kvq.engine import Piece, Receipt, Timing, TokenLogprobs
from kvq.engine.requests.outputs import FinishReason
from kvq.engine.requests.request_options import Terms
from kvq.errors import KVQError, Overloaded, RequestError
from kvq.scheduler import PoolShape, SchedulerConfig, Snapshot
from kvq.scheduler.request import RequestState
from kvq.server.engine.residency import BlockTimes
from kvq.server.kv_events.config import EventsConfig
from kvq.server.logs import LogConfig


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Any of them."""


# To the engine


class Start(Message, frozen=True):
    """The first message: what to build."""

    folder: str  # of the model; absolute, and never looked up as a name
    kv: str
    options: dict[str, Any]  # of `kvq.LLM`
    log: LogConfig = LogConfig()
    kv_events: EventsConfig | None = None


class Submit(Message, frozen=True):
    number: int
    prompt: list[int]  # token ids
    terms: Terms


class Cancel(Message, frozen=True):
    """Nobody waits for a request any more. One that ended is passed over."""

    number: int


class Ping(Message, frozen=True):
    """To be answered at once with another one, whatever the engine is doing."""


class Look(Message, frozen=True):
    """Somebody wants to see the engine; one picture, taken between two steps, may serve several of these."""


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
        """Tokens of a prompt and its output together."""
        return self.scheduler.max_context


class Refused(Message, frozen=True):
    """The engine can't be built; trying again won't help, unless it may pass."""

    reason: str
    may_pass: bool = False
    breaks_model: bool = False  # the KV format does


ErrorKind = Literal["request", "busy", "engine"]  # whose fault it is: busy is everybody's


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A request is over. Without an error its results are complete."""

    number: int
    receipt: Receipt | None = None  # None if it was refused
    timing: Timing | None = None  # the same; without the times between tokens, which were told in steps
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    kind: ErrorKind | None = None  # of the error

    def failed(self, error: KVQError) -> "Ended":
        """The same of a request that failed."""
        kind: ErrorKind = "request" if isinstance(error, RequestError) else "engine"
        kind = "busy" if isinstance(error, Overloaded) else kind
        return msgspec.structs.replace(self, error=str(error), kind=kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges(Snapshot):
    """Where the engine stands after a step; totals are since its start."""

    generated_tokens: int
    evictions: int = 0  # blocks that left the prefix index
    pinned: list[int] = field(default_factory=list)  # blocks under a pin, per layer group
    refused_pins: int = 0
    kv_events: int = 0  # changes of blocks that were published
    dropped_kv_events: int = 0  # of these, those for which there was no room
    memory: dict[str, int] = field(default_factory=dict)  # bytes by device: "host", "cuda:0"


class Stepped(Message, frozen=True):
    """What came of a step."""

    pieces: list[Piece]
    ended: list[Ended]
    gauges: Gauges
    itl_s: list[float] = []  # between neighbouring tokens of a request, of all requests
    block_times: BlockTimes | None = None  # since the last time; None: nothing happened


# What the engine shows of itself to people who look: blocks and counts, never a prompt's text


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one format takes of a block."""

    kv: str  # the format's name
    side: Literal["K", "V", "K and V"]
    layers: int
    block_bytes: int  # scales included


class PoolPicture(msgspec.Struct, frozen=True, kw_only=True):
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
    itl_s: float | None  # median of its own
    e2e_s: float | None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles over the requests that ended last, in seconds; None where nothing was measured."""

    requests: int
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None


class TenantPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant, in the order of the owner codes."""

    name: str
    running: int
    waiting: int  # preempted ones too
    latency: Latency


class Picture(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine between two steps."""

    cost_s: float  # what making it took
    kv: str  # the recipe's name
    block_size: int  # tokens
    pools: list[PoolPicture]
    tenants: list[TenantPicture]
    live: list[LiveRequest]  # so many of each tenant, oldest first
    past: list[PastRequest]  # so many of each tenant, latest first


ToEngine = Start | Submit | Cancel | Ping | Look
FromEngine = Ready | Refused | Ping | Stepped | Picture
