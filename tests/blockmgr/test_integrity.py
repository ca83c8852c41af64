"""check_integrity finds every kind of corruption, and says which."""

from array import array
from collections.abc import Callable

import pytest

from kvq.blockmgr import BlockId, BlockManager, Sequence
from kvq.blockmgr.prefix import Node
from tests.blockmgr.helpers import cache, manager, run


class Scene:
    """A manager with something of everything: live, cached, pinned, announced."""

    def __init__(self) -> None:
        self.blocks: BlockManager = manager(24, 24, windows=[None, 4])
        cache(self.blocks, range(60, 66))
        cache(self.blocks, [60, 61, 70, 71])
        cache(self.blocks, range(20, 24), "a")
        self.blocks.pin(self.blocks.prompt(range(60, 62)), 9.0)
        self.live: Sequence = run(self.blocks, range(7), "a")
        self.blocks.free(run(self.blocks, range(40, 45)))
        self.coming: Sequence = self.blocks.start(self.blocks.prompt(range(30, 36)))

    @property
    def nodes(self) -> dict[bytes, Node]:
        return self.blocks.blocks.index._nodes

    def node(self, *tokens: int) -> Node:
        return next(n for n in self.nodes.values() if n.tokens == array("I", tokens).tobytes())


def move_to_end(scene: Scene) -> None:
    """Make a prefix older than what follows it."""
    node = scene.node(62, 63)
    block = node.blocks[0]
    assert block is not None
    scene.blocks.pools[0]._cached._blocks.move_to_end(block, last=False)


def forget_prefix(scene: Scene) -> None:
    node = scene.node(62, 63)
    (block,) = node.blocks[:1]
    scene.blocks.blocks.index.forget([node], 0)
    assert block is not None
    pool = scene.blocks.pools[0]
    pool._entries[block] = None
    pool._cached.remove(block)
    pool._free.append(block)


def useless_node(scene: Scene) -> None:
    index = scene.blocks.blocks.index
    parent = scene.node(0, 1)
    tokens = array("I", [9, 9]).tobytes()
    index.insert(parent, index.chain(parent.digest, tokens), tokens)


def lose_root(scene: Scene) -> None:
    roots = scene.blocks.blocks.index._roots
    del roots[scene.live.node.root]


CORRUPTIONS: dict[str, tuple[Callable[[Scene], object], str]] = {
    "a broken pool": (lambda s: s.blocks.pools[1]._free.popleft(), "idle and free or cached blocks differ"),
    "a lost block": (lambda s: s.live.tables[1].pop(), "references and tables differ, 1 and 0"),
    "a block of nobody": (lambda s: s.blocks.pools[0].allocate(1), "references and tables differ, 1 and 0"),
    "another's block": (lambda s: s.live.tables[0].__setitem__(3, s.live.tables[0][0]), "tables differ"),
    "a block outside the pool": (
        lambda s: s.coming.tables[0].append(BlockId(99)),
        "block 99: references and tables differ, 0 and 1",
    ),
    "a stray reference": (lambda s: s.blocks.pools[0].share(s.live.tables[0][1]), "tables differ, 2 and 1"),
    "a lost pin": (lambda s: s.blocks.pins._pins.clear(), "references and tables differ, 1 and 0"),
    "a forgotten sequence": (lambda s: s.blocks._live.pop(s.live), "references and tables differ"),
    "too many pins": (lambda s: setattr(s.blocks.pins, "_max_blocks", 0), "more blocks are pinned than may"),
    "a prefix older than its end": (move_to_end, "is given away after its prefix"),
    "an outlived prefix": (forget_prefix, "outlived the prefix it needs"),
    "a dead node": (lambda s: setattr(s.node(0, 1), "alive", False), "a dead node is in the index"),
    "a root among the nodes": (
        lambda s: s.nodes.__setitem__(b"r", s.blocks.blocks.index.root(b"r")),
        "a root is in the index",
    ),
    "a short node": (lambda s: setattr(s.node(60, 61), "tokens", b"1234"), "another size than a block"),
    "a useless node": (useless_node, "a node is kept for nothing"),
    "a lost root": (lose_root, "a node's root is not in the index"),
    "a wrong depth": (lambda s: setattr(s.node(2, 3), "depth", 7), "another depth than its chain"),
    "other tokens": (
        lambda s: (s.nodes.update({b"x": s.node(4, 5)}), setattr(s.node(4, 5), "digest", b"x")),
        "a digest is not that of its tokens",
    ),
    "a wrong mark": (
        lambda s: s.blocks.pools[0]._entries.__setitem__(s.live.tables[0][0], s.node(2, 3)),
        "wrong mark",
    ),
    "a stray mark": (
        lambda s: s.blocks.pools[0]._entries.__setitem__(s.live.tables[0][3], s.node(2, 3)),
        "a block is marked for no node",
    ),
    "a miscounted node": (lambda s: setattr(s.node(0, 1), "num_held", 3), "counts its blocks wrongly"),
    "a child unknown to its parent": (
        lambda s: (s.node(60, 61).keys.pop(), s.node(60, 61).children.pop()),
        "a node's parent doesn't know it",
    ),
    "children without keys": (lambda s: s.node(60, 61).keys.pop(), "children and their keys differ"),
    "children out of order": (
        lambda s: (s.node(60, 61).keys.reverse(), s.node(60, 61).children.reverse()),
        "children are out of order",
    ),
    "a child of another": (
        lambda s: s.node(60, 61).children.__setitem__(0, Node(None, b"", s.node(60, 61).keys[0], 2)),
        "a child has another parent",
    ),
    "a useless root": (
        lambda s: s.blocks.blocks.index._roots.__setitem__(b"r", s.blocks.blocks.index.root(b"r")),
        "a root is kept for nothing",
    ),
    "more committed than there is": (lambda s: setattr(s.live, "committed", 8), "more tokens are committed"),
    "a grown length": (lambda s: setattr(s.live, "length", 9), "a table has the wrong length"),
    "a start outside": (
        lambda s: s.coming.starts.__setitem__(0, 1),
        "a table starts outside itself",
    ),
    "a wrong sequence depth": (lambda s: setattr(s.live, "depth", 2), "a sequence's node has another depth"),
    "other indexed tokens": (lambda s: s.live.tokens.__setitem__(2, 99), "indexed tokens differ"),
    "an announcement of nobody": (lambda s: s.coming.announced.pop(), "what nobody computes"),
    "an announcement of a known block": (
        lambda s: (s.live.announced.append((0, b"x")), s.blocks.prefixes._computing.update({b"x": s.live})),
        "an indexed block is announced",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_integrity_finds(name: str) -> None:
    scene = Scene()
    scene.blocks.check_integrity()
    corrupt, reason = CORRUPTIONS[name]
    corrupt(scene)
    with pytest.raises(AssertionError, match=reason):
        scene.blocks.check_integrity()


def test_check_integrity_finds_a_block_that_is_seen_and_was_given_back() -> None:
    blocks = manager(9, windows=[4])
    sequence = run(blocks, range(8))
    blocks.pools[0].release(sequence.tables[0][sequence.starts[0]])
    sequence.starts[0] += 1
    with pytest.raises(AssertionError, match="a block that is seen was given back"):
        blocks.check_integrity()


def test_check_integrity_finds_an_index_with_another_block_than_the_sequence() -> None:
    blocks = manager(9)
    sequence = run(blocks, range(4))
    other = blocks.new_sequence()
    blocks.append([(other, 2)])
    mine, theirs = sequence.tables[0], other.tables[0]
    mine[1], theirs[0] = theirs[0], mine[1]
    with pytest.raises(AssertionError, match="the index has another block"):
        blocks.check_integrity()


def test_check_integrity_finds_a_table_beyond_its_groups_limit() -> None:
    blocks = manager(9, 9, limits=[None, 2])
    sequence = run(blocks, range(4))
    sequence.tables[1] += blocks.pools[1].allocate(1)
    with pytest.raises(AssertionError, match="group 1: a table has the wrong length"):
        blocks.check_integrity()


def test_check_integrity_finds_a_block_that_is_indexed_beyond_its_groups_limit() -> None:
    blocks = manager(9, 9, limits=[None, 2])
    sequence = run(blocks, range(4))
    (block,) = blocks.pools[1].allocate(1)
    blocks.pools[1].keep(block, sequence.node)
    blocks.blocks.index.attach(sequence.node, 1, block)
    blocks.pools[1].release(block)
    with pytest.raises(AssertionError, match="group 1, block 1: indexed beyond the group's limit"):
        blocks.check_integrity()
