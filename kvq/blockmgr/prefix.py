"""Prefix index: finds the blocks that hold a prompt's KV by means of chained digests.

The digest of a block covers the model, the recipe, the salt and all tokens up to the block's end, so a prefix
is found with one dictionary lookup per block. Digests only find candidates. The tokens are then compared,
block by block from the root, so colliding digests can't lead to the wrong KV.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from kvq.blockmgr.pool import BlockId
from kvq.errors import ConfigError, RequestError
from kvq.tiers.tiers import BlockKey

TOKEN_BYTES = 4
TAG_BITS = 12  # the highest of a token id, for the adapter under which its K and V were computed
_SHIFT = 8 * TOKEN_BYTES - TAG_BITS
_MOST_SIBLINGS = 32  # children examined on either side for a partial block to copy
_VERSION = b"kvq-prefix-1"


def sha256_digest(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`, 32 bytes."""
    return sha256(data).digest()


class Node:
    """Node of the index: one block's tokens after a prefix, and the blocks with their KV by layer group.

    A node stays in the index while it has a block in any group or a child, so that every chain from a
    root can be compared token by token.
    """

    __slots__ = (
        "alive",
        "blocks",
        "children",
        "coldest",
        "depth",
        "digest",
        "is_end",
        "keys",
        "num_held",
        "parent",
        "root",
        "tokens",
    )

    def __init__(self, parent: "Node | None", digest: bytes, tokens: bytes, num_groups: int) -> None:
        self.parent = parent  # None for a root
        self.digest = digest
        self.root: bytes = digest if parent is None else parent.root  # digest at the top: model, recipe, salt
        self.tokens = tokens  # the block's token ids as bytes
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks up to the end of this one
        self.blocks: list[BlockId | None] = [None] * num_groups
        self.num_held = 0  # groups that have a block
        self.keys: list[bytes] | tuple[()] = ()  # tokens of the children, sorted; most nodes have none
        self.children: list[Node] | tuple[()] = ()  # in the order of `keys`
        self.alive = True  # False after it has left the index
        self.is_end = False  # True where a prompt or sequence ended: others may go on from there
        self.coldest = (
            0  # rung of the fewest bits in which the KV was stored, see `kvq.blockmgr.packed.ladder`
        )

    def key(self, group: int) -> BlockKey:
        """Return the identity of the node's block in a layer group, for the tiers below the pools."""
        return BlockKey(self.root, self.digest, group)


def _remove_child(parent: Node, child: Node) -> None:
    keys, children = parent.keys, parent.children
    if len(children) == 1 or isinstance(keys, tuple) or isinstance(children, tuple):
        parent.keys, parent.children = (), ()
    else:
        at = bisect_left(keys, child.tokens)
        del keys[at], children[at]


@dataclass(slots=True, eq=False)
class PrefixQuery:
    """Prompt tokens to look up, validated only once, with the digests computed so far."""

    tokens: "array[int]"
    tenant: str
    root: bytes  # digest at the start of the chain: model, recipe and salt
    data: bytes  # the tokens as bytes
    digests: list[bytes]  # of the full blocks, in order
    block_size: int  # tokens of a full block
    max_reuse: int | None = None  # limit for the tokens of a hit, if below the prompt's length - 1


def token_array(tokens: Iterable[int]) -> "array[int]":
    """Return token ids as `array('I')`.

    Raises:
        RequestError: an id is not a whole number from 0 to 2**32 - 1.
    """
    if isinstance(tokens, bytes | bytearray | str):
        raise RequestError(
            f"token ids must be whole numbers, got {type(tokens).__name__}; tokenize text first"
        )
    try:
        return array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids must be whole numbers from 0 to 2**32 - 1: {error}") from error


def tagged(tokens: "array[int]", tag: int, start: int = 0) -> "array[int]":
    """Return token ids with a tag, as returned by `PrefixIndex.tag`, on those from `start` on."""
    return tokens[:start] + array("I", [token | tag for token in tokens[start:]]) if tag else tokens


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class PrefixIndex:
    """Chains of nodes, with one root per salt."""

    def __init__(self, *, block_size: int, num_groups: int, identity: bytes = b"") -> None:
        """Create an empty index. `identity` names the model and the recipe."""
        self.block_size = block_size
        self._step = block_size * TOKEN_BYTES
        self._num_groups = num_groups
        self._identity = sha256_digest(identity)
        self._digest = sha256_digest  # of a block, chained to the previous one
        self._tags: dict[int, bytes] = {}  # digests of adapters
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> Node | None:
        """Return the node with this digest, or None. Roots are not found."""
        return self._nodes.get(digest)

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except roots."""
        return iter(self._nodes.values())

    def roots(self) -> Iterator[Node]:
        """Iterate over the roots that have child nodes."""
        return iter(self._roots.values())

    def root_digest(  # D74: the salt follows the tenant's length
        self, tenant: str, shared_salt: str | None = None, cache_salt: str | None = None
    ) -> bytes:
        """Return the digest that starts the chains of a tenant, or of all tenants with a `shared_salt`.

        A `cache_salt` separates the chains further.
        """
        kind, salt = (b"t", _utf8(tenant)) if shared_salt is None else (b"s", _utf8(shared_salt))
        if cache_salt is not None:
            kind, salt = b"c" + kind, len(salt).to_bytes(8, "little") + salt + _utf8(cache_salt)
        return sha256_digest(_VERSION + self._identity + kind + salt)

    def root(self, digest: bytes) -> Node:
        """Return the root with this digest. The root enters the index with its first child."""
        return self._roots.get(digest) or Node(None, digest, b"", self._num_groups)

    def tag(self, digest: bytes) -> int:  # D420
        """Return the tag of the adapter with this digest, the same in every call.

        K and V of a token differ between adapters, so the token counts as another one in each: tagged, it
        never equals the token without a tag or with another one. Digests of tagged blocks cover the
        adapter's, which, unlike tags, is the same in every process.

        Raises:
            ConfigError: there were too many adapters since the start.
        """
        for tag, known in self._tags.items():
            if known == digest:
                return tag
        if len(self._tags) + 1 >= 1 << TAG_BITS:
            raise ConfigError(
                f"{len(self._tags)} adapters were loaded since the engine started, the most that its prefix "
                f"cache tells apart; start it again"
            )
        tag = len(self._tags) + 1 << _SHIFT
        self._tags[tag] = digest
        return tag

    def tag_of(self, tokens: bytes) -> int:
        """Return the tag of the last of these tokens, or 0."""
        tag = int.from_bytes(tokens[-TOKEN_BYTES:], "little") >> _SHIFT << _SHIFT
        return tag if tag in self._tags else 0

    def digest_at(self, prompt: PrefixQuery, block: int) -> bytes:
        """Return the chained digest of a prompt's full block, hashing any preceding blocks as needed."""
        digests, data, step = prompt.digests, prompt.data, self._step
        while len(digests) <= block:
            at = len(digests) * step
            last = digests[-1] if digests else prompt.root
            digests.append(self.chain(last, data[at : at + step]))
        return digests[block]

    def chain(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest of a block with these tokens that follows the block with digest `parent`."""
        salt = self._tags.get(self.tag_of(tokens), b"") if self._tags else b""
        return self._digest(parent + salt + tokens)

    def walk(self, prompt: PrefixQuery, max_blocks: int) -> list[Node]:
        """Return the nodes of a prompt's leading indexed blocks. Doesn't change the index."""
        parent = self._roots.get(prompt.root)
        found: list[Node] = []
        if parent is None:
            return found
        digests, data, step, chain = prompt.digests, prompt.data, self._step, self.chain
        nodes = self._nodes
        last, known = prompt.root, len(digests)
        for i in range(max_blocks):
            tokens = data[i * step : (i + 1) * step]
            if i < known:
                last = digests[i]
            else:
                last = chain(last, tokens)
                digests.append(last)
            node = nodes.get(last)
            if node is None or node.parent is not parent or node.tokens != tokens:
                break
            found.append(node)
            parent = node
        return found

    def insert(self, parent: Node, digest: bytes, tokens: bytes) -> Node | None:
        """Return the node for a block after `parent`, creating it if missing, or None on a collision."""
        if parent.parent is None:
            parent = self._roots.get(parent.digest, parent)  # another root may have been added meanwhile
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
        """Record the block that holds the node's KV in one layer group."""
        assert node.blocks[group] is None, "the node has a block in that group already"
        node.blocks[group] = block
        node.num_held += 1

    def forget(self, nodes: list[Node], group: int) -> list[BlockId]:
        """Remove the nodes' blocks in one group. Nodes that are no longer needed leave the index.

        Returns the blocks of this group that directly follow a removed block.
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

    def prune(self, node: Node) -> None:  # D69: nodes without blocks stay while they have children
        """Remove a node that has no blocks and no children, and any ancestors that only this node kept."""
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
        """Return the child with the longest common prefix with `tokens`, and the length of this prefix.

        Children are sorted by tokens, so the best child is the nearest one on either side that has blocks in
        all `num_groups` layer groups with blocks at its depth. Only a limited number of neighbors is
        examined, so that no client can make the search slow.
        """
        best: Node | None = None
        longest = 0
        if not node.keys:
            return best, longest
        at = bisect_left(node.keys, tokens)
        before = range(at - 1, max(-1, at - 1 - _MOST_SIBLINGS), -1)
        after = range(at, min(len(node.keys), at + _MOST_SIBLINGS))
        for side in (before, after):
            for i in side:
                common = common_tokens(node.keys[i], tokens)
                if common <= longest:
                    break
                if node.children[i].num_held == num_groups:
                    best, longest = node.children[i], common
                    break
        return best, longest

    def num_common(self, node: Node, tokens: bytes) -> int:
        """Return how many leading tokens `tokens` shares with the child that shares most, in any group."""
        if not node.keys:
            return 0
        at = bisect_left(node.keys, tokens)
        near = node.keys[max(0, at - 1) : at + 1]
        return max((common_tokens(key, tokens) for key in near), default=0)


def common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of leading tokens that two arrays of token ids have in common."""
    size = min(len(a), len(b))
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)  # its lowest bit
