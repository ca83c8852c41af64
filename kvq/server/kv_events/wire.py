"""Wire format of block events: msgpack, byte for byte as vLLM 0.32 writes it.

Each event is a map. Earlier versions wrote arrays, which some readers expect: the kind, then the fields.

Source: vllm/distributed/kv_events.py. Hashes are the last 64 bits of kvq's digests: vLLM sends 64 bits where
it sends numbers, and routers keep no more of longer ones.
"""

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvq.server.kv_events.config import Form

_MEDIUM = "GPU"  # vLLM's name for the memory that a model attends to, also on a CPU


class Entered(NamedTuple):
    """A block can be found from now on."""

    name: int
    parent: int | None  # None: it begins a prompt
    tokens: bytes


Change = Entered | int | None  # a name: that block can't be found any more; None: nothing can


class _BlockStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """Blocks of one prompt, each after the one before it, can be found."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: None = None
    group_idx: int | None = None


class _BlockRemoved(msgspec.Struct, omit_defaults=True, tag="BlockRemoved"):
    """Blocks can't be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    """No block can be found any more."""


_Event = _BlockStored | _BlockRemoved | _AllBlocksCleared


class _EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The content of one message."""

    ts: float  # seconds since 1970
    events: list[_Event] | list[list[Any]]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()


def name_of(digest: bytes) -> int:
    """Return a block's name for routers: the last 64 bits of its digest."""
    return int.from_bytes(digest[-8:], "big")


def encode(changes: Iterable[Change], *, block_size: int, now: float, form: Form = "maps") -> bytes:
    """Encode a batch; neighbouring blocks of a chain, and neighbouring removals, are one event."""
    events: list[_Event] = []
    for change in changes:
        last = events[-1] if events else None
        if change is None:
            events.append(_AllBlocksCleared())
        elif isinstance(change, int):
            if isinstance(last, _BlockRemoved):
                last.block_hashes.append(change)
            else:
                events.append(_BlockRemoved([change], _MEDIUM, 0))
        elif isinstance(last, _BlockStored) and last.block_hashes[-1] == change.parent:
            last.block_hashes.append(change.name)
            last.token_ids += array("I", change.tokens)
        else:
            tokens = array("I", change.tokens).tolist()
            place = (None, _MEDIUM, None, None, 0)  # no LoRA; the layer group
            events.append(_BlockStored([change.name], change.parent, tokens, block_size, *place))
    arrays = [[event.__struct_config__.tag, *msgspec.structs.astuple(event)] for event in events]
    batch = _EventBatch(ts=now, events=events if form == "maps" else arrays, data_parallel_rank=0)
    return _encoder.encode(batch)
