"""Messages between the HTTP process and the engine process."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvq.engine import Piece, Receipt, Timing, TokenLogprobs
from kvq.engine.params import HintAction
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import KVQError, Overloaded, RequestError
from kvq.scheduler import PoolShape, SchedulerConfig, Snapshot
from kvq.server.engine.residency import BlockTimes
from kvq.server.kv_events.config import EventsConfig
from kvq.server.logs import LogConfig


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages."""


# To the engine


class Start(Message, frozen=True):
    """First message: a description of the engine to build."""

    folder: str  # absolute path of the model folder; never looked up as a model name
    kv: str
    options: dict[str, Any]  # options of `kvq.LLM`
    log: LogConfig = LogConfig()
    kv_events: EventsConfig | None = None
    kv_also: tuple[str, ...] = ()  # formats that requests may ask for, besides `kv`
    kv_also_share: float = 0.0  # of the KV memory, for each of them
    guard_fallback: str | None = None  # of them, for new requests after an alert of the guard
    has_fallen_back: bool = False  # an engine before this one has


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes; this avoids encoding the ids of a long prompt one by one."""
    return array("I", tokens).tobytes()


def unpack(packed: bytes) -> "array[int]":
    """Return the token ids that `pack` packed into these bytes."""
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens


class Submit(Message, frozen=True):
    """Message: a request to generate from a prompt."""

    number: int
    prompt: bytes  # token ids, packed
    options: RequestOptions


class Hint(Message, frozen=True):
    """Message: a client's hint about a session; see `kvq.engine.requests.sessions`."""

    tenant: str
    session: str
    action: HintAction
    seconds: float | None = None


class ChangeAdapter(Message, frozen=True):
    """Message: load an adapter from a folder, or unload it."""

    name: str
    folder: str | None  # None: unload


# A number cancels the request with this number, unless it has ended. "ping" is answered immediately with
# "ping", even during a step; "look" is answered between two steps with one snapshot for all looks so far.
Ping = Literal["ping"]
Look = Literal["look"]
Drain = Literal["drain"]  # lets the requests go on in another engine, if there is one to hand them over to


# From the engine


class Ready(Message, frozen=True):
    """Message: the engine is ready, with a description of it."""

    model_digest: str  # digest of the checkpoint's tensors
    vocab_size: int
    block_bytes: list[int]  # per layer group
    kv: list[str]  # the formats' full names per layer group: "int4_g32_s8_rot", or K/V where they differ
    shape: PoolShape
    scheduler: SchedulerConfig
    is_staging: list[bool] = []  # per layer group: True if its tokens are unquantized; empty: none
    others: dict[str, PoolShape] = {}  # of the other formats that requests may have

    def of(self, kv_format: str | None) -> "Ready":
        """Return the description for requests of a format."""
        shape = self.others.get(kv_format or "", self.shape)
        return msgspec.structs.replace(self, shape=shape)

    @property
    def max_context(self) -> int:
        """Maximum number of tokens in a prompt and its output together."""
        return self.scheduler.max_context


class Refused(Message, frozen=True):
    """Message: the engine can't be built. A retry may succeed only if `may_pass` is True."""

    reason: str
    may_pass: bool = False
    breaks_model: bool = False  # the KV format breaks the model


ErrorKind = Literal["request", "busy", "engine"]  # cause: the request, the load, or the engine


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Message: a request has ended. If there is no error, its results are complete."""

    number: int
    kv_format: str | None = None  # None: there is only one, or it was refused
    receipt: Receipt | None = None  # None if it was refused
    timing: Timing | None = None  # None if it was refused; without `itl_s`, which the steps reported
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    vector: bytes = b""  # fp32, of an embedding or a score
    error: str | None = None
    kind: ErrorKind | None = None  # kind of the error

    def failed(self, error: KVQError) -> "Ended":
        """Return a copy of this message for a request that failed with `error`."""
        kind: ErrorKind = "request" if isinstance(error, RequestError) else "engine"
        kind = "busy" if isinstance(error, Overloaded) else kind
        return msgspec.structs.replace(self, error=str(error), kind=kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges(Snapshot):
    """Engine gauges after a step; totals count from the engine's start."""

    generated_tokens: int
    evictions: int = 0  # blocks removed from the prefix index
    pinned: list[int] = field(default_factory=list)  # pinned blocks, per layer group
    refused_pins: int = 0
    kv_events: int = 0  # block changes that were published
    dropped_kv_events: int = 0  # block changes dropped for lack of room
    tier_bytes: dict[str, int] = field(default_factory=dict)  # "host", "disk"
    dropped_blocks: int = 0  # left the pools and were not kept
    damaged_blocks: int = 0  # in tiers, or parts of files
    packed_blocks: int = 0  # by a ladder
    prefetched_sessions: int = 0
    guard_requests: int = 0  # computed again
    guard_tokens: int = 0  # whose predictions were compared
    guard_same: int = 0  # of them, with the same likeliest successor
    guard_alerts: int = 0
    guard_kl: dict[str, float] = field(default_factory=dict)  # nats per token, by least depth
    guard_fallback: int = 0  # 1: new requests go to the guard's safer format
    formats: dict[str, dict[str, int]] = field(default_factory=dict)  # requests and blocks, by format
    memory: dict[str, int] = field(default_factory=dict)  # bytes, keyed by device: "host", "cuda:0"


class Stepped(Message, frozen=True):
    """Message: results of one step."""

    pieces: list[Piece]
    ended: list[Ended]
    gauges: Gauges
    itl_s: list[float] = []  # times between consecutive tokens, for all requests
    block_times: BlockTimes | None = None  # since the last message; None: no events


class AdapterChanged(Message, frozen=True):
    """Message: an adapter was loaded or unloaded, or why not."""

    name: str
    error: str | None = None


class EngineSnapshot(Message, frozen=True):
    """State of the engine between two steps, for the web page; never contains the text of a prompt.

    `Introspection` creates the snapshots.
    """

    cost_s: float  # time to make this snapshot
    kv: str  # name of the recipe
    block_size: int  # tokens
    pools: list[dict[str, Any]]  # one per layer group, of the default format
    tenants: list[dict[str, Any]]  # in the order of the owner codes
    live: list[dict[str, Any]]  # live requests, a few per tenant, oldest first
    past: list[dict[str, Any]]  # ended requests, a few per tenant, latest first
    guard: dict[str, Any] | None = None  # what it found; None: there is none


ToEngine = Start | Submit | Hint | ChangeAdapter | int | Ping | Look | Drain
FromEngine = Ready | Refused | Ping | Stepped | EngineSnapshot | AdapterChanged
