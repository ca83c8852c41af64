"""What the HTTP process and the engine process say to each other.

Everything is typed: a message of another shape is an error, whoever sent it. Requests are known by
numbers that the HTTP process chooses and never uses twice.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvq.engine import Piece, Receipt, Timing, TokenLogprobs
from kvq.engine.intake import Terms
from kvq.errors import KVQError, Overloaded, RequestError
from kvq.scheduler import PoolShape, SchedulerConfig, Snapshot
from kvq.server.logs import LogConfig
from kvq.server.picture import Picture
from kvq.server.residency import BlockTimes


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Any of them."""


# To the engine


class Start(Message, frozen=True):
    """The first message: what to build."""

    folder: str  # of the model; absolute, and never looked up as a name
    kv: str
    options: dict[str, Any]  # of `kvq.LLM`
    log: LogConfig = LogConfig()


class Submit(Message, frozen=True):
    """A request."""

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
    kv: list[str]  # the formats' full names per layer group: "int4_g64_rot", or K/V where they differ
    shape: PoolShape
    scheduler: SchedulerConfig

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its output together."""
        return self.scheduler.max_context


class Refused(Message, frozen=True):
    """The engine can't be built; trying again won't help, unless it may pass."""

    reason: str
    may_pass: bool = False


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
    memory: dict[str, int] = field(default_factory=dict)  # bytes by device: "host", "cuda:0"


class Stepped(Message, frozen=True):
    """What came of a step."""

    pieces: list[Piece]
    ended: list[Ended]
    gauges: Gauges
    itl_s: list[float] = []  # between neighbouring tokens of a request, of all requests
    block_times: BlockTimes | None = None  # since the last time; None: nothing happened


ToEngine = Start | Submit | Cancel | Ping | Look
FromEngine = Ready | Refused | Ping | Stepped | Picture
