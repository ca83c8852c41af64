"""A model's whole step in one call of C++ for CPUs: embedding, layers, last norm and head."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.decoder.stack import KEPT_BYTES, CpuStack
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.paged import SequenceBatch
from kvq.kernels.rms_norm.weight import NormWeight

AngleTables = Sequence[tuple[Tensor, Tensor]]  # of every kind, cos and sin [positions, dim]


class CpuPass:
    """What lies around a model's layers; a step's results have the bits of the operations one by one."""

    def __init__(
        self, embedding: Tensor | CpuLinear, norm: NormWeight, head: CpuLinear, dtype: torch.dtype
    ) -> None:
        """`embedding`: [vocab, hidden] of `dtype`, or the head whose weight rows are looked up in as `dtype`.

        Raises:
            ConfigError: they don't fit each other.
        """
        hidden = head.in_features
        table = embedding if isinstance(embedding, Tensor) else None
        if isinstance(embedding, Tensor):
            fits, vocab = embedding.is_contiguous() and embedding.dtype is dtype, embedding.shape[0]
            widths = [*embedding.shape[1:], *norm.weight.shape]
        else:
            fits, vocab = True, embedding.out_features
            widths = [embedding.in_features, *norm.weight.shape]
        if not fits or dtype not in DTYPES or widths != [hidden] * 2 or norm.weight.dtype not in DTYPES:
            raise ConfigError(
                f"an embedding and a norm of {widths} numbers don't fit a head of {hidden} inputs in {dtype}"
            )
        self.dtype = dtype
        self._parts = embedding, norm, head
        self._vocab = head.out_features
        self._hidden = hidden
        self._struct = struct("KvqPass")(
            embedding=None if table is None else table.data_ptr(),
            looked_up=addressof(embedding.struct) if isinstance(embedding, CpuLinear) else None,
            vocab=vocab,
            norm=struct("KvqNorm")(norm.weight.data_ptr(), norm.eps, DTYPES[norm.weight.dtype]),
            head=addressof(head.struct),
        )
        self._tables: AngleTables = ()
        self._memory: tuple[Tensor, ...] = ()

    def __call__(
        self,
        stack: CpuStack,
        tables: AngleTables,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        batches: Sequence[SequenceBatch],
        bad: Tensor,
    ) -> tuple[Tensor, float]:
        """Logits [wanted, vocab], and the seconds that writing and attention took.

        tokens, positions: int64 [rows]; wanted: int64, rows; batches, bad: as `CpuStack` takes them.

        Raises:
            IndexError: a token, a position, a row, or a block that isn't there.
            MemoryError: no room for scratch memory.
            ConfigError: shapes that don't fit each other.
        """
        rows, count = len(tokens), len(wanted)
        numbers = tokens, positions, wanted
        if len(positions) != rows or any(
            x.dtype is not torch.int64 or not x.is_contiguous() for x in numbers
        ):
            raise ConfigError(
                f"tokens, positions and rows must be whole int64, got "
                f"{[(list(x.shape), x.dtype) for x in numbers]}"
            )
        if tables is not self._tables:
            self._take_tables(tables)
        fits = stack.hidden == self._hidden and stack.dims == {tables[0][0].shape[1]}
        if not fits or stack.kinds != len(tables):
            raise ConfigError(
                f"layers of {stack.hidden} numbers and {stack.kinds} kinds of angles of {stack.dims} "
                f"don't fit this embedding, head and tables"
            )
        memory = self._take_memory(max(rows, count))
        given = self._struct
        given.tokens, given.positions, given.wanted = (x.data_ptr() for x in numbers)
        given.num_wanted = count
        logits = torch.empty(count, self._vocab, dtype=self.dtype)
        seconds = stack.run_pass(given, logits, batches, bad, rows)
        del memory  # which the kernel has read
        return logits, seconds

    def _take_tables(self, tables: AngleTables) -> None:
        each = [angle for pair in tables for angle in pair]
        dims = {tuple(angle.shape) for angle in each}
        if len(dims) != 1 or any(
            angle.dtype is not self.dtype or not angle.is_contiguous() for angle in each
        ):
            raise ConfigError(
                f"tables of angles must be alike, whole and in {self.dtype}, got {sorted(dims)}"
            )
        kinds = len(tables)
        self._cos = (c_void_p * kinds)(*(cos.data_ptr() for cos, _ in tables))
        self._sin = (c_void_p * kinds)(*(sin.data_ptr() for _, sin in tables))
        given = self._struct
        given.cos, given.sin, given.kinds = addressof(self._cos), addressof(self._sin), kinds
        given.num_positions, given.dim = dims.pop()
        self._tables, self._memory = tables, ()

    def _take_memory(self, rows: int) -> tuple[Tensor, ...]:
        """What goes from one operation to the next; it is kept for the next step, if it isn't much."""
        if self._memory and rows <= len(self._memory[0]):
            return self._memory
        pieces = 2 * len(self._tables) * rows
        found = (
            *(torch.empty(rows, self._hidden, dtype=self.dtype) for _ in range(3)),
            torch.empty(pieces, self._tables[0][0].shape[1], dtype=self.dtype),
            torch.empty(rows, dtype=torch.int32),
        )
        for name, tensor in zip(("x", "out", "normed", "angles", "lens"), found, strict=True):
            setattr(self._struct, name, tensor.data_ptr())
        self._memory = found if sum(x.nbytes for x in found) <= KEPT_BYTES else ()
        return found
