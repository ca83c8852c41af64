"""Short ways to bring a block manager into a state."""

from collections.abc import Iterable
from typing import Any

from kvq.blockmgr import BlockManager, Sequence
from kvq.blockmgr.prefix import sha256_digest


def manager(*num_blocks: int, size: int = 2, **options: Any) -> BlockManager:
    """A block manager with small blocks, one layer group a number; `digest` in place of SHA-256."""
    digest = options.pop("digest", sha256_digest)
    blocks = BlockManager(num_blocks=list(num_blocks), block_size=size, **options)
    blocks.blocks.index._digest = digest
    return blocks


def run(blocks: BlockManager, tokens: Iterable[int], tenant: str = "", salt: str | None = None) -> Sequence:
    """Start a request and compute its whole prompt."""
    sequence = blocks.start(blocks.prompt(tokens, tenant=tenant, shared_salt=salt))
    compute(blocks, sequence)
    return sequence


def compute(blocks: BlockManager, sequence: Sequence, tokens: Iterable[int] = ()) -> None:
    """Compute and commit everything known of a sequence, then learn further tokens."""
    blocks.append([(sequence, len(sequence.tokens) - sequence.length)])
    blocks.commit(sequence, tokens)
    blocks.take_orders()


def cache(blocks: BlockManager, tokens: Iterable[int], tenant: str = "", salt: str | None = None) -> None:
    """Leave the KV of these tokens' whole blocks in the prefix cache."""
    blocks.free(run(blocks, tokens, tenant, salt))


def hit(blocks: BlockManager, tokens: Iterable[int], tenant: str = "", salt: str | None = None) -> int:
    """How many tokens a new request would reuse."""
    return blocks.lookup(blocks.prompt(tokens, tenant=tenant, shared_salt=salt)).length
