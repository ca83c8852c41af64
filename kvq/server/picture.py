"""What the engine shows of itself to people who look: blocks and counts, never a prompt's text."""

from typing import Literal

import msgspec

from kvq.blockmgr import PoolUsage
from kvq.engine import Receipt
from kvq.engine.outputs import FinishReason
from kvq.scheduler.request import RequestState


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one format takes of a block."""

    kv: str  # the format's name
    side: Literal["K", "V", "K and V"]
    layers: int
    block_bytes: int  # scales included


class PoolPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One layer group's blocks."""

    cells: bytes  # a byte for every `stride`-th block, see `kvq.blockmgr.census`
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
