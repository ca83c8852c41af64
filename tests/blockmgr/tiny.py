"""All states of a block manager so small that they can be counted.

A state is a value: what the sequences know and hold, what is indexed, the order of eviction. Ids of
blocks are left out, for another naming changes nothing; so is the order of free blocks. `build` makes
a manager in a state, `describe` says which state a manager is in.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from kvq.blockmgr import BlockId, BlockManager, Sequence
from kvq.blockmgr.prefix import Node
from kvq.errors import OutOfBlocks

State = tuple[Any, ...]
Operation = tuple[Any, ...]
Path = tuple[int, ...]  # all tokens up to a block's end
SIZE = 2
ALPHABET = (0, 1)
EMPTY: State = ((), (), ())


@dataclass(frozen=True, kw_only=True)
class World:
    """How much of the world is explored."""

    num_blocks: int = 4
    num_sequences: int = 3
    prompts: tuple[Path, ...] = tuple(p for n in (1, 2, 3) for p in product(ALPHABET, repeat=n))
    longest: int = 3  # tokens of a sequence
    splits: bool = True  # append and commit are two operations, with others in between
    truncates: bool = False

    def manager(self) -> BlockManager:
        """An empty one."""
        return BlockManager(num_blocks=[self.num_blocks], block_size=SIZE)


def describe(manager: BlockManager) -> State:
    """The state a manager is in; equal for managers that differ in names of blocks only."""
    pool = manager.pools[0]
    paths = {node.blocks[0]: _path(node) for node in manager.blocks.index.nodes()}
    by_key: dict[Any, list[Sequence]] = {}
    for sequence in manager.sequences():
        by_key.setdefault(_key(sequence, paths), []).append(sequence)
    keys = sorted(by_key)
    orders = product(*(permutations(by_key[key]) for key in keys))
    rows = min(_rows([s for alike in order for s in alike], paths) for order in orders)
    cached = tuple(paths[block] for block in pool.cached_blocks())
    return rows, tuple(sorted(paths.values())), cached


def _rows(sequences: list[Sequence], paths: dict[Any, Path]) -> State:
    names: dict[BlockId, int] = {}
    rows = []
    for s in sequences:
        table = s.tables[0][s.starts[0] :]
        held = tuple(paths.get(b) or (-1 - names.setdefault(b, len(names)),) for b in table)
        rows.append((*_key(s, paths), held))
    return tuple(rows)


def _key(s: Sequence, paths: dict[Any, Path]) -> State:
    held = tuple(paths.get(block, ()) for block in s.tables[0][s.starts[0] :])
    announced = tuple(i for i, _ in s.announced)
    assert s.node.alive, "a sequence's node has left the index"
    return (tuple(s.tokens), s.length, s.committed, s.depth, announced, held)


def _path(node: Node) -> Path:
    tokens: Path = ()
    while node.parent is not None:
        tokens = (*memoryview(node.tokens).cast("I"), *tokens)
        node = node.parent
    return tokens


def build(world: World, state: State) -> BlockManager:
    """A manager in that state."""
    manager = world.manager()
    rows, indexed, cached = state
    index, pool = manager.blocks.index, manager.pools[0]
    names: dict[Path, BlockId] = {}
    nodes: dict[Path, Node] = {(): index.root(index.root_digest(""))}
    for path in sorted(indexed, key=len):
        block = names[path] = pool.allocate(1)[0]
        parent = nodes[path[:-SIZE]]
        tokens = array("I", path[-SIZE:]).tobytes()
        node = index.insert(parent, index.chain(parent.digest, tokens), tokens)
        assert node is not None
        index.attach(node, 0, block)
        pool.keep(block, node)
        nodes[path] = node
    private = {name for row in rows for name in row[-1] if name[0] < 0}
    names.update(zip(private, pool.allocate(len(private)), strict=True))
    for row in rows:
        _add(manager, row, nodes, names)
    for path in cached:
        pool.release(names[path])
    for name in names.keys() - set(cached):
        pool.release(names[name])  # each table has its own reference by now
    return manager


def _add(manager: BlockManager, row: State, nodes: dict[Path, Node], names: dict[Path, BlockId]) -> None:
    tokens, length, committed, depth, announced, _, held = row
    s = manager.new_sequence()
    s.tokens, s.length, s.committed, s.depth = array("I", tokens), length, committed, depth
    s.tables = [[names[name] for name in held]]
    for block in s.tables[0]:
        manager.pools[0].share(block)
    s.node = nodes[tokens[: depth * SIZE]]
    prompt = manager.prompt(tokens)
    for i in announced:
        digest = manager.blocks.index.digest_at(prompt, i)
        s.announced.append((i, digest))
        manager.prefixes._computing[digest] = s


def operations(world: World, state: State) -> Iterator[Operation]:
    """What may be tried in a state: (verb, index of the sequence, arguments...)."""
    rows = state[0]
    if len(rows) < world.num_sequences:
        for tokens in world.prompts:
            yield ("start", None, tokens)
    for i, (tokens, length, committed, *_) in enumerate(rows):
        yield ("free", i)
        yield from _steps(world, i, len(tokens), length, committed)
        if length == committed and len(rows) < world.num_sequences:
            yield ("fork", i)
        for shorter in range(length if world.truncates else 0):
            yield ("truncate", i, shorter)
    if state[2]:
        yield ("drop_cached", None)


def _steps(world: World, i: int, known: int, length: int, committed: int) -> Iterator[Operation]:
    for count in {1, known - length} if length < known else ():
        yield ("append" if world.splits else "compute", i, count)
    if length > committed:
        yield ("commit", i)
        yield ("fail", i)
    for token in ALPHABET if length == known < world.longest else ():
        yield ("commit", i, token)


def apply(manager: BlockManager, operation: Operation) -> None:
    """Carry an operation out; one that is refused for want of blocks changes nothing."""
    verb, i, *rest = operation
    if verb == "drop_cached":
        manager.drop_cached()
    elif verb == "start":
        manager.start(manager.prompt(*rest))
    else:
        sequence = manager.sequences()[i]
        try:
            if verb == "append":
                manager.append([(sequence, *rest)])
            elif verb == "compute":
                manager.append([(sequence, *rest)])
                manager.commit(sequence)
            elif verb == "commit":
                manager.commit(sequence, rest)
            elif verb == "fail":
                manager.scrub(sequence)
                manager.free(sequence)
            else:
                getattr(manager, verb)(sequence, *rest)
        except OutOfBlocks:
            pass
    manager.take_orders()


def explore(world: World, limit: int | None = None) -> dict[State, list[State]]:
    """Every reachable state and the states that lead to it, breadth first; all invariants are checked."""
    before: dict[State, list[State]] = {EMPTY: []}
    frontier = [EMPTY]
    while frontier:
        reached = []
        for state in frontier:
            for operation in operations(world, state):
                manager = build(world, state)
                apply(manager, operation)
                after = describe(manager)
                if after not in before:
                    manager.check_integrity()
                    before[after] = []
                    reached.append(after)
                before[after].append(state)
        frontier = reached
        if limit and len(before) > limit:
            break
    return before


def can_reach(target: State, before: dict[State, list[State]]) -> set[State]:
    """The states from which some operations lead to `target`."""
    found, todo = {target}, [target]
    while todo:
        for state in before[todo.pop()]:
            if state not in found:
                found.add(state)
                todo.append(state)
    return found
