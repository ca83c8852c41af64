"""Layer store: K and V of one layer, in any storage form."""

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from torch import Tensor

from kvq.errors import ConfigError, UnsupportedKernel
from kvq.kernels import AttentionOptions, PagedKV, SequenceBatch, StagedBatch
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.stack import StackLayer
from kvq.kernels.paged import Rows
from kvq.kernels.rope_write.reference import Angles, LayerHeads, turned_heads
from kvq.layout import Role

LayerBatch = SequenceBatch | StagedBatch  # the sequences of a step as one layer sees them
Attended = tuple[Tensor, Tensor]  # out [tokens, q_heads, v_head_dim], lse fp32 [tokens, q_heads]
Views = Mapping[Role, PagedKV]  # one layer's blocks in the pools of its layer groups


class LayerStore(Protocol):
    """Store of one layer's K and V. Models write to the store, then attend over it.

    To implement a store, derive from this class; only `batch_of`, `write` and `attend` are required.
    """

    def batch_of(self, batches: Sequence[SequenceBatch]) -> LayerBatch:
        """Return the batch for `attend`, from a step's batches of all layer groups.

        The batch's `slots` are the argument of `write`.
        """
        ...

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Store new rows of K and V after RoPE: [tokens, kv_heads, dim] each, `slots` int64 [tokens].

        Returns bool [tokens]: True where K or V contained NaN or infinity.
        """
        ...

    def attend(self, q: Tensor, batch: LayerBatch, options: AttentionOptions) -> Attended:
        """Compute causal attention of new tokens, already written, over their sequences' blocks.

        `q`: [tokens, q_heads, k_head_dim]. Returns out [tokens, q_heads, v_head_dim] in q's dtype
        and lse fp32 [tokens, q_heads], as a natural log that includes sinks.

        Raises:
            UnsupportedKernel: this store doesn't support the options.
        """
        ...

    def write_joined(
        self, joined: Tensor, angles: Angles | None, heads: LayerHeads, slots: Tensor, bad: Tensor
    ) -> Tensor:
        """Normalize and rotate queries and keys, store K and V, and set `bad` where values aren't finite.

        `joined`: queries, keys and values side by side, [tokens, heads.width], which may be overwritten;
        `angles`: RoPE angles of every token, None for no rotation; `bad`: bool [tokens]. Returns the rotated
        queries, [tokens, q_heads, k_head_dim].
        """
        q, k, v = turned_heads(joined, angles, heads)
        bad |= self.write(k, v, slots)
        return q

    def gather(
        self, tables: Tensor, start: int, end: int, *, unrotate: bool, out: Rows | None = None
    ) -> Rows:
        """Return K and V at the positions [start, end) of every table, [sequences, kv_heads, tokens, dim].

        `tables`: integer [sequences, blocks]; `unrotate`: whether to undo the rotation of rotated formats.

        Raises:
            UnsupportedKernel: the store's backend can't read rows back.
        """
        raise UnsupportedKernel(f"{type(self).__name__} can't read K and V back; use the kvq cache backend")

    def worth_expanding(self, batch: LayerBatch, options: AttentionOptions) -> list[int]:
        """Return the indices of the sequences for which expanding latents to heads saves work."""
        return []

    def stack_layer(self, decoder: CpuDecoder, options: AttentionOptions, angles: int) -> StackLayer | None:
        """Return the layer for C++ code that runs entire steps; None if other code also uses its blocks."""
        return None


class PagedStore(LayerStore, Protocol):
    """Store that keeps a layer's K and V in kvq's own blocks."""

    blocks: PagedKV  # codes and scales in the recipe's formats; for a staged layer, sealed blocks

    def backend_of(self, operation: str) -> str:
        """Return the name of the backend that runs `write_kv`, `attend` or `gather_dense`."""
        ...

    def over(self, views: Views) -> Self:
        """Return a copy of this store for pools that have grown."""
        ...

    def write_blocks(self, k: Tensor, v: Tensor, blocks: Sequence[int]) -> None:
        """Quantize complete blocks, [blocks, kv_heads, block_size, dim], of tokens kept elsewhere until now.

        Raises:
            ConfigError: the layer stores tokens one by one rather than in complete blocks.
        """
        raise self._not_whole()

    def attend_with(
        self, q: Tensor, recent: Rows, batch: SequenceBatch, options: AttentionOptions
    ) -> Attended:
        """Attend over stored blocks and unquantized recent rows, [sequences, kv_heads, some, dim].

        As with a staging area, only the positions of a token and a query determine which form of the token
        the query sees.

        Raises:
            ConfigError: the layer stores tokens one by one rather than in complete blocks.
        """
        raise self._not_whole()

    def _not_whole(self) -> ConfigError:
        return ConfigError(
            "whole blocks are written under a staged recipe without a staging area only; plan the layout "
            "with staging=False, or write tokens by their slots"
        )
