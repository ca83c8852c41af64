"""Integrity check of block memory: verifies every invariant listed in docs/blocks.md."""

from collections import Counter
from itertools import pairwise

from kvq.blockmgr.blocks import Blocks
from kvq.blockmgr.packed.ladder import Ladder
from kvq.blockmgr.pins import Pins
from kvq.blockmgr.pool import BlockId, BlockPool
from kvq.blockmgr.prefix import TOKEN_BYTES, Node
from kvq.blockmgr.sequence import HOLE, Sequence


def check_integrity(
    blocks: Blocks, sequences: list[Sequence], pins: Pins, computing: dict[bytes, Sequence]
) -> None:
    """Raise AssertionError, with the reason, unless all invariants hold."""
    for group, pool in enumerate(blocks.pools):
        pool.check_integrity()
        _check_references(group, pool, sequences, pins, blocks.ladder)
        blocks.ladder.check_integrity(group)
        _check_order(group, pool, blocks)
    _check_index(blocks)
    for sequence in sequences:
        _check_sequence(blocks, sequence)
    _check_announcements(sequences, computing)


def _check_references(
    group: int, pool: BlockPool, sequences: list[Sequence], pins: Pins, ladder: Ladder
) -> None:
    """Check that every reference belongs to exactly one entry of a table, a pin or a load."""
    counted: Counter[BlockId] = Counter()
    for sequence in sequences:
        counted.update(sequence.held_in(group))
    for pin in pins.all():
        counted.update(pin.blocks[group])
    for extent in ladder.extents(group):
        counted.update(extent.blocks if extent.holds else ())
    have = pool.held()
    if have != counted:
        block = min(b for b in have.keys() | counted.keys() if have.get(b, 0) != counted[b])
        raise AssertionError(
            f"group {group}, block {block}: references and tables differ, {have.get(block, 0)} and "
            f"{counted[block]}"
        )
    pinned = {block for pin in pins.all() for block in pin.blocks[group]}
    assert pins.num_pinned(group) == len(pinned), f"group {group}: pinned blocks are counted wrongly"
    assert pins.num_pinned(group) <= pins.limit(group), f"group {group}: more blocks are pinned than may be"


def _check_order(group: int, pool: BlockPool, blocks: Blocks) -> None:
    """Check that cached blocks of a full-attention group are evicted before the prefix that they need."""
    if blocks.windows[group] is not None:
        return
    extents = blocks.ladder.extents(group)
    rank = {block: i for i, block in enumerate(pool.cached_blocks())}
    for block, i in rank.items():
        node = pool.entry(block)
        if node in extents:
            continue
        assert isinstance(node, Node), f"group {group}, block {block} is cached for no node"
        assert node.parent is not None, f"group {group}, block {block} is a root's"
        if node.parent.parent is None:
            continue
        before = node.parent.blocks[group]
        assert before is not None, f"group {group}, block {block} outlived the prefix it needs"
        assert rank.get(before, i + 1) > i, f"group {group}, block {block} is given away after its prefix"


def _check_index(blocks: Blocks) -> None:
    """Check that nodes, chains and the pools' marks are consistent, and that no useless node remains."""
    step = blocks.block_size * TOKEN_BYTES
    marks = [0] * len(blocks.pools)
    roots = set(blocks.index.roots())
    num_children = 0
    for node in blocks.index.nodes():
        assert node.alive, "a dead node is in the index"
        assert node.parent is not None, "a root is in the index"
        assert len(node.tokens) == step, "a node has another size than a block"
        assert node.num_held or node.children, "a node is kept for nothing"
        assert node.depth > 1 or node.parent in roots, "a node's root is not in the index"
        assert node.depth == node.parent.depth + 1, "a node has another depth than its chain"
        digest = blocks.index.chain(node.parent.digest, node.tokens)
        assert node.digest == digest, "a digest is not that of its tokens"
        num_held = 0
        for group, block in enumerate(node.blocks):
            if block is not None:
                assert node.depth <= blocks.entries(group, node.depth * blocks.block_size), (
                    f"group {group}, block {block}: indexed beyond the group's limit"
                )
                num_held += 1
                marks[group] += 1
                assert blocks.pools[group].entry(block) is node, f"group {group}, block {block}: wrong mark"
        assert node.num_held == num_held, "a node counts its blocks wrongly"
        if node.children:
            num_children += _check_children(blocks, node)
    for root in roots:
        assert root.children, "a root is kept for nothing"
        num_children += _check_children(blocks, root)
    assert num_children == len(blocks.index), "a node's parent doesn't know it"
    for group, pool in enumerate(blocks.pools):
        packed = sum(len(extent.blocks) for extent in blocks.ladder.extents(group))
        assert marks[group] + packed == pool.num_indexed(), f"group {group}: a block is marked for no node"


def _check_children(blocks: Blocks, node: Node) -> int:
    assert node.keys == [child.tokens for child in node.children], "children and their keys differ"
    assert all(a < b for a, b in pairwise(node.keys)), "children are out of order"
    for child in node.children:
        assert child.parent is node, "a child has another parent"
        assert blocks.index.get(child.digest) is child, "a child is not in the index"
    return len(node.children)


def _check_sequence(blocks: Blocks, sequence: Sequence) -> None:
    """Check that tables have the required length, and that the indexed blocks are the held blocks."""
    size = blocks.block_size
    assert 0 <= sequence.committed <= sequence.length, "more tokens are committed than appended"
    for group, table in enumerate(sequence.tables):
        start = sequence.starts[group]
        assert len(table) == blocks.entries(group, sequence.length), (
            f"group {group}: a table has the wrong length"
        )
        assert 0 <= start <= len(table), f"group {group}: a table starts outside itself"
        known = sequence.committed or sequence.length  # an adopted prefix is committed in full
        if group == sequence.state_group:
            assert not table or table[-1] != HOLE, "a sequence has lost its state"
            continue
        needed = min(blocks.first_seen(group, known), len(table))
        assert start <= needed, f"group {group}: a block that is seen was given back"
    node, depth = sequence.node, sequence.depth
    assert node.depth == depth <= sequence.committed // size, "a sequence's node has another depth"
    while node.parent is not None:
        i = node.depth - 1
        assert node.tokens == sequence.tokens[i * size : (i + 1) * size].tobytes(), "indexed tokens differ"
        for group, table in enumerate(sequence.tables):
            held = sequence.holds(group, i) and group != sequence.state_group
            assert not held or node.blocks[group] == table[i], f"group {group}: the index has another block"
        node = node.parent


def _check_announcements(sequences: list[Sequence], computing: dict[bytes, Sequence]) -> None:
    """Check that every announced prefix belongs to a live sequence that is going to compute it."""
    announced = {digest: s for s in sequences for _, digest in s.announced}
    assert announced == computing, "somebody may wait for what nobody computes"
    for sequence in sequences:
        assert all(i >= sequence.depth for i, _ in sequence.announced), "an indexed block is announced"
