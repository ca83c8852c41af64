"""A model's whole step in one call of C++ for CPUs: embedding, layers, last norm and head."""

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.decoder.stack import KEPT_BYTES, CpuStack
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.paged import SequenceBatch
from kvq.kernels.rms_norm.weight import NormWeight

AngleTables = Mapping[str, tuple[Tensor, Tensor]]  # of every kind, cos and sin [positions, dim]


@dataclass(frozen=True, slots=True, eq=False)
class PassParts:
    """What lies around a model's layers.

    `embedding`: [vocab, hidden] of `dtype`, or the head whose weight rows are looked up in as `dtype`.

    Raises:
        ConfigError: they don't fit each other.
    """

    embedding: Tensor | CpuLinear
    norm: NormWeight
    head: CpuLinear
    dtype: torch.dtype

    def __post_init__(self) -> None:
        embedding, weight, hidden = self.embedding, self.norm.weight, self.head.in_features
        if isinstance(embedding, Tensor):
            widths = [*embedding.shape[1:], *weight.shape]
            fits = embedding.is_contiguous() and embedding.dtype is self.dtype
        else:
            widths, fits = [embedding.in_features, *weight.shape], True
        fits &= self.dtype in DTYPES and weight.dtype in DTYPES and weight.is_contiguous()
        if not fits or widths != [hidden] * 2:
            raise ConfigError(
                f"an embedding and a norm of {widths} numbers don't fit a head of {hidden} inputs "
                f"in {self.dtype}"
            )

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        embedding = self.embedding
        return embedding.shape[0] if isinstance(embedding, Tensor) else embedding.out_features


class CpuPass:
    """Steps over one stack; results have the bits of the operations one by one.

    What a step writes belongs to it, as a stack's does: those of several caches may run side by side.
    """

    def __init__(self, parts: PassParts) -> None:
        self.parts = parts
        embedding, norm, head = parts.embedding, parts.norm, parts.head
        self._struct = struct("KvqPass")(
            embedding=embedding.data_ptr() if isinstance(embedding, Tensor) else None,
            looked_up=None if isinstance(embedding, Tensor) else addressof(embedding.struct),
            vocab=parts.vocab,
            norm=struct("KvqNorm")(norm.weight.data_ptr(), norm.eps, DTYPES[norm.weight.dtype]),
            head=addressof(head.struct),
        )
        self._tables: AngleTables = {}
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
        given = self._struct
        own = self.parts.head.in_features, given.kinds, {given.dim}
        if own != (stack.hidden, stack.kinds, stack.dims):
            raise ConfigError(
                f"numbers, kinds of angles and their dimensions are {own}, those of the layers "
                f"{(stack.hidden, stack.kinds, stack.dims)}: they don't fit each other's tables"
            )
        memory = self._take_memory(max(rows, count))
        given.tokens, given.positions, given.wanted = (x.data_ptr() for x in numbers)
        given.num_wanted = count
        logits = torch.empty(count, self.parts.head.out_features, dtype=self.parts.dtype)
        seconds = stack.run_pass(given, logits, batches, bad, rows)
        del memory  # which the kernel has read
        return logits, seconds

    def _take_tables(self, tables: AngleTables) -> None:
        each = [angle for pair in tables.values() for angle in pair]
        dims = {tuple(angle.shape) for angle in each}
        fit = all(angle.dtype is self.parts.dtype and angle.is_contiguous() for angle in each)
        if len(dims) != 1 or not fit:
            raise ConfigError(
                f"tables of angles must be alike, whole and in {self.parts.dtype}, got {sorted(dims)}"
            )
        self._cos = (c_void_p * len(tables))(*(cos.data_ptr() for cos, _ in tables.values()))
        self._sin = (c_void_p * len(tables))(*(sin.data_ptr() for _, sin in tables.values()))
        given = self._struct
        given.cos, given.sin, given.kinds = addressof(self._cos), addressof(self._sin), len(tables)
        given.num_positions, given.dim = dims.pop()
        self._tables, self._memory = tables, ()

    def _take_memory(self, rows: int) -> tuple[Tensor, ...]:
        """What goes from one operation to the next; it is kept for the next step, if it isn't much."""
        if self._memory and rows <= len(self._memory[0]):
            return self._memory
        hidden, dtype, angles = self.parts.head.in_features, self.parts.dtype, self._struct.dim
        found = (
            *(torch.empty(rows, hidden, dtype=dtype) for _ in range(2)),
            torch.empty(2 * len(self._tables) * rows, angles, dtype=dtype),
            torch.empty(rows, dtype=torch.int32),
        )
        for name, tensor in zip(("x", "out", "angles", "lens"), found, strict=True):
            setattr(self._struct, name, tensor.data_ptr())
        self._memory = found if sum(x.nbytes for x in found) <= KEPT_BYTES else ()
        return found
