"""How much of a prompt the pools hold: the rule that makes a prefix hit valid in every layer group."""

from dataclasses import dataclass

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.ids import BlockId
from kvq.blockmgr.prefix import TOKEN_BYTES, Node, PrefixQuery
from kvq.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Whole blocks that are there, and a block that starts with the tokens after them."""

    nodes: list[Node]  # of the whole blocks, from the root on
    part: Node | None  # a block whose first tokens come next in the prompt; to be copied
    length: int  # tokens, those of the part included


def find(blocks: Blocks, prompt: PrefixQuery, max_tokens: int) -> Hit:
    """The longest valid hit of at most `max_tokens` tokens. Changes nothing.

    A hit of length L is valid if full-attention groups hold all of [0, L), and sliding-window groups
    the part of it that a token at position L sees.
    """
    check_prompt(blocks, prompt)
    size = blocks.block_size
    walked = blocks.index.walk(prompt, max_tokens // size)
    depth = _valid_depth(blocks, walked)
    nodes = walked[:depth]
    parent = nodes[-1] if nodes else blocks.index.root(prompt.root)
    start = depth * size
    rest = prompt.data[start * TOKEN_BYTES : min(start + size, max_tokens) * TOKEN_BYTES]
    part, common = blocks.index.best_child(parent, rest)
    return Hit(nodes=nodes, part=part, length=start + common)


def needed_blocks(blocks: Blocks, nodes: list[Node], length: int) -> tuple[list[int], list[list[BlockId]]]:
    """Of a valid hit's whole blocks those that a token at position `length` needs, per layer group.

    Returns (index of the first one, blocks from there on).
    """
    starts = [min(blocks.first_seen(group, length), len(nodes)) for group in range(len(blocks.pools))]
    held = [
        [block for node in nodes[start:] if (block := node.blocks[group]) is not None]
        for group, start in enumerate(starts)
    ]
    assert all(len(nodes) == start + len(found) for start, found in zip(starts, held, strict=True)), (
        "a valid hit holds every block"
    )
    return starts, held


def check_prompt(blocks: Blocks, prompt: PrefixQuery) -> None:
    """Raise ConfigError if a prompt was prepared for blocks of another size: its digests mean others."""
    if prompt.block_size != blocks.block_size:
        raise ConfigError(
            f"the prompt was prepared for blocks of {prompt.block_size} tokens, these have "
            f"{blocks.block_size}; prepare it with this manager's prompt()"
        )


def _valid_depth(blocks: Blocks, nodes: list[Node]) -> int:
    """The most leading nodes that form a valid hit."""
    depth = len(nodes)
    sliding = []
    for group, window in enumerate(blocks.windows):
        if window is None:
            depth = next((i for i, n in enumerate(nodes[:depth]) if n.blocks[group] is None), depth)
        else:
            sliding.append(group)
    if not sliding:
        return depth
    best = 0
    run = [0] * len(blocks.windows)  # neighbouring blocks that are there, up to the node before
    for i, node in enumerate(nodes[:depth], start=1):
        length = i * blocks.block_size
        valid = True
        for group in sliding:
            run[group] = run[group] + 1 if node.blocks[group] is not None else 0
            valid = valid and run[group] >= i - blocks.first_seen(group, length)
        if valid:
            best = i
    return best
