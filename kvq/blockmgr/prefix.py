"""Prefix index: the blocks that hold the KV of given tokens, found by chained digests.

The digest of a block covers the model, the recipe, the salt and all tokens up to the block's end, so
one dictionary lookup a block finds a prefix. Digests only find: on a hit the tokens themselves are
compared, block by block from the root, so that equal digests of different tokens can't serve wrong KV.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from kvq.blockmgr.pool import BlockId
from kvq.errors import RequestError

TOKEN_BYTES = 4
_MOST_SIBLINGS = 32  # children looked at on either side for a part to copy
_VERSION = b"kvq-prefix-1"


def sha256_digest(data: bytes) -> bytes:
    """Return the SHA-256 of `data`, 32 bytes."""
    return sha256(data).digest()


class Node:
    """Tokens of one block after a prefix, and the blocks that hold their KV, per layer group.

    A node stays while it has a block in any group or a node after it, so that every chain from a
    root can be compared token by token.
    """

    __slots__ = (
        "alive",
        "blocks",
        "children",
        "depth",
        "digest",
        "keys",
        "num_held",
        "parent",
        "root",
        "tokens",
    )

    def __init__(self, parent: "Node | None", digest: bytes, tokens: bytes, num_groups: int) -> None:
        self.parent = parent  # None: a root
        self.digest = digest
        self.root: bytes = digest if parent is None else parent.root  # digest above: model, recipe and salt
        self.tokens = tokens  # the block's token ids as bytes
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks up to this one's end
        self.blocks: list[BlockId | None] = [None] * num_groups
        self.num_held = 0  # groups whose block is there
        self.keys: list[bytes] | tuple[()] = ()  # tokens of the children, sorted; most nodes have none
        self.children: list[Node] | tuple[()] = ()  # in the order of `keys`
        self.alive = True  # False once it left the index


def _remove_child(parent: Node, child: Node) -> None:
    keys, children = parent.keys, parent.children
    if len(children) == 1 or isinstance(keys, tuple) or isinstance(children, tuple):
        parent.keys, parent.children = (), ()
    else:
        at = bisect_left(keys, child.tokens)
        del keys[at], children[at]


@dataclass(slots=True, eq=False)
class PrefixQuery:
    """Tokens of a prompt to look up: validated once, digests computed as far as they were needed."""

    tokens: "array[int]"
    tenant: str
    root: bytes  # digest that starts the chain: model, recipe and salt
    data: bytes  # the tokens as bytes
    digests: list[bytes]  # of the full blocks, in order
    block_size: int  # tokens; what a full block is
    max_reuse: int | None = None  # most tokens of a hit, if fewer than all but one


def token_array(tokens: Iterable[int]) -> "array[int]":
    """Return token ids as `array('I')`.

    Raises:
        RequestError: an id that is no whole number of 0 to 2**32 - 1.
    """
    if isinstance(tokens, bytes | bytearray | str):
        raise RequestError(
            f"token ids must be whole numbers, got {type(tokens).__name__}; tokenize text first"
        )
    try:
        return array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids must be whole numbers from 0 to 2**32 - 1: {error}") from error


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class PrefixIndex:
    """Chains of nodes below one root per salt."""

    def __init__(self, *, block_size: int, num_groups: int, identity: bytes = b"") -> None:
        """Make an empty index; `identity` names the model and the recipe."""
        self.block_size = block_size
        self._step = block_size * TOKEN_BYTES
        self._num_groups = num_groups
        self._identity = sha256_digest(identity)
        self._digest = sha256_digest  # of a block, chained
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> Node | None:
        """Return the node of that digest, roots left out."""
        return self._nodes.get(digest)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes, roots left out."""
        return iter(self._nodes.values())

    def roots(self) -> Iterator[Node]:
        """Iterate over the roots that have nodes below them."""
        return iter(self._roots.values())

    def root_digest(  # D74: salt after the tenant's length
        self, tenant: str, shared_salt: str | None = None, cache_salt: str | None = None
    ) -> bytes:
        """Return the digest that starts the chains of a tenant, or of all tenants with one `shared_salt`.

        Every `cache_salt` separates further.
        """
        kind, salt = (b"t", _utf8(tenant)) if shared_salt is None else (b"s", _utf8(shared_salt))
        if cache_salt is not None:
            kind, salt = b"c" + kind, len(salt).to_bytes(8, "little") + salt + _utf8(cache_salt)
        return sha256_digest(_VERSION + self._identity + kind + salt)

    def root(self, digest: bytes) -> Node:
        """Return the root of that digest; it joins the index with its first child."""
        return self._roots.get(digest) or Node(None, digest, b"", self._num_groups)

    def digest_at(self, prompt: PrefixQuery, block: int) -> bytes:
        """Return the chained digest of a prompt's full block, hashing what was not hashed yet."""
        digests, data, step, digest = prompt.digests, prompt.data, self._step, self._digest
        while len(digests) <= block:
            at = len(digests) * step
            last = digests[-1] if digests else prompt.root
            digests.append(digest(last + data[at : at + step]))
        return digests[block]

    def chain(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest of a block of tokens after `parent`."""
        return self._digest(parent + tokens)

    def walk(self, prompt: PrefixQuery, max_blocks: int) -> list[Node]:
        """Return the nodes of a prompt's first blocks, as far as they are indexed. Changes nothing."""
        parent = self._roots.get(prompt.root)
        found: list[Node] = []
        if parent is None:
            return found
        digests, data, step, digest = prompt.digests, prompt.data, self._step, self._digest
        nodes = self._nodes
        last, known = prompt.root, len(digests)
        for i in range(max_blocks):
            tokens = data[i * step : (i + 1) * step]
            if i < known:
                last = digests[i]
            else:
                last = digest(last + tokens)
                digests.append(last)
            node = nodes.get(last)
            if node is None or node.parent is not parent or node.tokens != tokens:
                break
            found.append(node)
            parent = node
        return found

    def insert(self, parent: Node, digest: bytes, tokens: bytes) -> Node | None:
        """Return the node of a block of tokens after `parent`, new if need be; None on a digest collision."""
        if parent.parent is None:
            parent = self._roots.get(parent.digest, parent)  # another may have joined meanwhile
        node = self._nodes.get(digest)
        if node is not None:
            return node if node.parent is parent and node.tokens == tokens else None
        if parent.parent is None:
            self._roots[parent.digest] = parent
        assert parent.alive, "a node's parent must be in the index"
        node = self._nodes[digest] = Node(parent, digest, tokens, self._num_groups)
        keys, children = parent.keys, parent.children
        if isinstance(keys, tuple) or isinstance(children, tuple):
            parent.keys, parent.children = [tokens], [node]
        else:
            at = bisect_left(keys, tokens)
            keys.insert(at, tokens)
            children.insert(at, node)
        return node

    def attach(self, node: Node, group: int, block: BlockId) -> None:
        """Record that a block holds the node's KV in one layer group."""
        assert node.blocks[group] is None, "the node has a block in that group already"
        node.blocks[group] = block
        node.num_held += 1

    def forget(self, nodes: list[Node], group: int) -> list[BlockId]:
        """Forget the nodes' blocks in one group; nodes that nothing needs any more leave the index.

        Returns the blocks of that group that follow directly after a forgotten one.
        """
        stranded: list[BlockId] = []
        known = self._nodes
        for node in nodes:
            node.blocks[group] = None
            node.num_held -= 1
            if node.children:
                stranded += [b for child in node.children if (b := child.blocks[group]) is not None]
            elif not node.num_held:
                parent = node.parent
                assert parent is not None, "a root has no blocks"
                node.alive = False
                del known[node.digest]
                if len(parent.children) > 1:
                    _remove_child(parent, node)
                    continue
                parent.keys, parent.children = (), ()
                if not parent.num_held:
                    self.prune(parent)
        return stranded

    def prune(self, node: Node) -> None:  # D69: nodes without blocks stay while something follows
        """Remove a node without blocks and children, and ancestors that it alone kept."""
        while node.parent is not None:
            if node.num_held or node.children or not node.alive:
                return
            parent = node.parent
            node.alive = False
            del self._nodes[node.digest]
            _remove_child(parent, node)
            node = parent
        if not node.children and self._roots.get(node.digest) is node:
            del self._roots[node.digest]

    def best_child(self, node: Node, tokens: bytes, num_groups: int) -> tuple[Node | None, int]:  # D70
        """Return the child that starts with most of `tokens`, and how many tokens they share.

        Children are sorted by their tokens, so on either side the nearest that is there in all
        `num_groups` layer groups that have blocks at its depth shares most. Only some neighbours are
        looked at, so that no client can make it slow.
        """
        best: Node | None = None
        longest = 0
        at = bisect_left(node.keys, tokens)
        before = range(at - 1, max(-1, at - 1 - _MOST_SIBLINGS), -1)
        after = range(at, min(len(node.keys), at + _MOST_SIBLINGS))
        for side in (before, after):
            for i in side:
                common = _common_tokens(node.keys[i], tokens)
                if common <= longest:
                    break
                if node.children[i].num_held == num_groups:
                    best, longest = node.children[i], common
                    break
        return best, longest


def _common_tokens(a: bytes, b: bytes) -> int:
    """Return how many tokens two rows of token ids share from the start."""
    pairs = zip(memoryview(a).cast("I"), memoryview(b).cast("I"), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // TOKEN_BYTES)
