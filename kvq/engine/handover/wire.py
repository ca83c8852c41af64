"""Wire format of hand-overs: typed messages, and digests that bind a block's bytes to their place.

After hello, the sender announces tokens and sends their blocks. For a request, the receiver then returns the
tokens that follow. A connection has one transfer; ending it early cancels the transfer.
"""

import hashlib
from typing import Any

import msgspec
import xxhash

from kvq.blockmgr.prefix import TOKEN_BYTES
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.engine.requests.request_options import RequestOptions

VERSION = 1
Block = tuple[int, int, bytes, bytearray]  # layer group, index in the sequence, digest, content


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True):
    """First message of both sides. `facts`: what must be the same on both sides, by name."""

    version: int
    nonce: bytes
    has_key: bool
    facts: dict[str, str] = {}


class Proof(_Message, frozen=True):
    """Message: a proof that the sender knows the key."""

    mac: bytes


class Refused(_Message, frozen=True):
    """Message: why the transfer has failed."""

    reason: str


class Begin(_Message, frozen=True):
    """Message: the tokens whose blocks follow: a prefix, or a request's prompt and its generated tokens."""

    tokens: bytes  # ids, packed
    length: int  # leading tokens whose K and V are complete
    options: RequestOptions  # of a prefix, only tenant and salts count
    prompt_length: int = 0  # of a request; 0: a prefix
    seed: int = 0


class Answer(_Message, frozen=True):
    """Message: how many tokens' blocks the receiver wants, and then, how many tokens it has taken over."""

    tokens: int


class Blocks(_Message, frozen=True):
    """Message: blocks. The receiver reads the next message once they are stored."""

    blocks: list[Block]
    are_last: bool


class Tokens(_Message, frozen=True):
    """Message: the next tokens of a request. It ends with the last message, perhaps by an error."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    are_last: bool = False
    kv_digest: str = ""
    error: str | None = None


AnyMessage = Hello | Proof | Refused | Begin | Answer | Blocks | Tokens
encoder = msgspec.msgpack.Encoder()
decoder: "msgspec.msgpack.Decoder[AnyMessage]" = msgspec.msgpack.Decoder(AnyMessage)


def block_names(tokens: bytes, block_size: int) -> list[bytes]:
    """Return a digest for each block of these tokens and all before it. The last block may be partial."""
    step, last, found = block_size * TOKEN_BYTES, b"kvq hand-over", []
    for at in range(0, len(tokens), step):
        last = hashlib.sha256(last + tokens[at : at + step]).digest()
        found.append(last)
    return found


def block_digest(context: bytes, name: bytes, place: tuple[int, int], content: Any) -> bytes:
    """Return the digest of a block's bytes, any buffer: xxh3-128.

    `context`: of layout and recipe. `name`: from `block_names`. `place`: layer group and index.
    """
    hasher = xxhash.xxh3_128(context + name + b"".join(number.to_bytes(8, "little") for number in place))
    hasher.update(content)
    return hasher.digest()
