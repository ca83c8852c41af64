"""What prefix lookups should find, worked out the slow way from everything that is indexed."""

from kvq.blockmgr import BlockManager, PrefixQuery

Held = dict[tuple[int, ...], list[bool]]  # all tokens up to a block's end: which layer groups have it


def held_below(manager: BlockManager, root: bytes) -> Held:
    """Every indexed block of one salt by its tokens from the start on."""
    held: Held = {}
    todo = [((), node) for node in manager.blocks.index.roots() if node.digest == root]
    while todo:
        path, node = todo.pop()
        for child in node.children:
            longer = (*path, *memoryview(child.tokens).cast("I"))
            held[longer] = [block is not None for block in child.blocks]
            todo.append((longer, child))
    return held


def is_valid(manager: BlockManager, held: Held, tokens: tuple[int, ...], length: int) -> bool:
    """True if every position that a token at `length` sees lies in an indexed block, in every group."""
    size = manager.block_size
    ends = range(size, length + 1, size)
    if any(tokens[:end] not in held for end in ends):
        return False
    for group, window in enumerate(manager.blocks.windows):
        first = 0 if window is None else max(0, length + 1 - window)
        last = manager.blocks.limits[group] or length
        if not all(held[tokens[:end]][group] for end in ends if first < end <= last):
            return False
    return True


def is_beyond(manager: BlockManager, group: int, path: tuple[int, ...]) -> bool:
    """True if a layer group never has the block that ends a path."""
    limit = manager.blocks.limits[group]
    return limit is not None and len(path) > limit


def hit_length(manager: BlockManager, prompt: PrefixQuery) -> int:
    """Tokens that a new sequence need not compute: the longest valid whole blocks, and a part."""
    size, tokens = manager.block_size, tuple(prompt.tokens)
    usable = max(0, len(tokens) - 1)
    held = held_below(manager, prompt.root)
    whole = max(n for n in range(0, usable + 1, size) if is_valid(manager, held, tokens, n))
    if manager.blocks.states is not None:  # a state is that of whole blocks
        return whole
    shared = [
        n
        for path, groups in held.items()
        if len(path) == whole + size
        and all(has or is_beyond(manager, g, path) for g, has in enumerate(groups))
        for n in range(1, min(size, usable - whole) + 1)
        if path[: whole + n] == tokens[: whole + n]
    ]
    return whole + max(shared, default=0)
