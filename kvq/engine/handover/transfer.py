"""Transfer of one sequence's blocks, each of which is checked on arrival.

The receiver reads a message only once the blocks of the previous one are stored, so the socket's buffers
limit what is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq.engine.handover.link import Link
from kvq.engine.handover.wire import Answer, Begin, Block, Blocks, block_digest, block_names

Place = tuple[int, int]  # layer group, index in the sequence
PIECE = 2 << 20  # bytes of blocks in one message, unless one block has more


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes and meaning of an engine's blocks, by layer group."""

    block_size: int  # tokens
    block_bytes: list[int]
    contexts: list[bytes]  # digests of layout and recipe


def send_blocks(
    link: Link, begin: Begin, places: list[Place], shape: Shape, read: Callable[[list[Place]], list[Any]]
) -> int:
    """Send a sequence, and return how many of its tokens the peer took over. `read`: returns blocks' bytes.

    Raises:
        EngineError: the peer refused, or ended the connection.
        OSError: the connection broke, or the peer is silent.
    """
    link.send(begin)
    names, pieces = block_names(begin.tokens, shape.block_size), list[list[Place]]()
    for group, size in enumerate(shape.block_bytes) if link.expect(Answer).tokens else ():
        own, some = [place for place in places if place[0] == group], max(1, PIECE // size)
        pieces += [own[at : at + some] for at in range(0, len(own), some)]
    for number, piece in enumerate(pieces or [[]], 1):
        blocks = []
        for (group, index), content in zip(piece, read(piece) if piece else [], strict=True):
            digest = block_digest(shape.contexts[group], names[index], (group, index), content)
            blocks.append((group, index, digest, content))
        link.send(Blocks(blocks, are_last=number >= len(pieces)))
    return link.expect(Answer).tokens


def receive_blocks(
    link: Link, begin: Begin, places: list[Place], shape: Shape, put: Callable[[list[Block]], object]
) -> None:
    """Receive the blocks for these places, and pass them on to `put`, a message at a time.

    Raises:
        EngineError: a block is damaged, belongs elsewhere or is missing, or the connection has ended.
        OSError: the connection broke, or the peer is silent.
    """
    link.send(Answer(begin.length if places else 0))
    names, missing, are_last = block_names(begin.tokens, shape.block_size), set(places), False
    while not are_last:
        message = link.expect(Blocks)
        for group, index, digest, content in message.blocks:
            what = f"block {index} of layer group {group}"
            if (group, index) not in missing:
                link.refuse(f"{what} is not wanted, or comes twice")
            if len(content) != shape.block_bytes[group]:
                link.refuse(f"{what} has {len(content)} bytes")
            if digest != block_digest(shape.contexts[group], names[index], (group, index), content):
                link.refuse(f"{what} is damaged, or belongs elsewhere")
            missing.remove((group, index))
        put(message.blocks)
        are_last = message.are_last
    if missing:
        link.refuse(f"{len(missing)} blocks are missing")
