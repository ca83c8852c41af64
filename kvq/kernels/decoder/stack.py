"""Plain decoder layers over their blocks in C++ for CPUs: a whole step's in one call."""

from collections.abc import Sequence
from ctypes import addressof, c_double, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.attend.cpu import check_batch, options_of
from kvq.kernels.attend.options import AttentionOptions
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.native.abi import DTYPES, batch_of, layer_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV, SequenceBatch

_KEPT_ROWS = 256  # of a step, for which memory stays


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackLayer:
    """A layer and where its K and V lie."""

    decoder: CpuDecoder
    kv: PagedKV
    options: AttentionOptions
    exact: bool  # attention in fp32 for every format
    group: int  # of the step's batches
    angles: int  # of the step's angles


class CpuStack:
    """Layers one after the other, with the bits that their halves and attention give in calls of their own."""

    def __init__(self, layers: Sequence[StackLayer]) -> None:
        """Take layers, whose blocks must be the same tensors in every call.

        Raises:
            ConfigError: heads that don't fit the blocks.
        """
        self.layers = layers
        self._kept: list[Any] = []  # tensors whose memory is named
        structs = [self._struct(layer) for layer in layers]
        self._structs = (struct("KvqStackLayer") * len(layers))(*structs)
        heads = [layer.decoder.parts.heads for layer in layers]
        self._widths = tuple(max(one) for one in zip(*((h.width, h.q_heads * h.k_dim, h.q_heads) for h in heads)))
        self._groups = {layer.group: layer for layer in layers}
        self._memory: tuple[torch.dtype, int, tuple[Tensor, ...]] | None = None

    def _struct(self, layer: StackLayer) -> Any:
        heads, kv = layer.decoder.parts.heads, layer.kv
        kv_heads = kv.k.codes.shape[1]
        if (heads.kv_heads, heads.k_dim, heads.v_dim) != (kv_heads, kv.formats.k_head_dim, kv.formats.v_head_dim):
            raise ConfigError(f"{heads.kv_heads} KV heads of {heads.k_dim} don't fit blocks of {kv_heads} heads")
        attention, sinks = options_of(layer.options, heads.q_heads, kv_heads, exact=layer.exact)
        self._kept.append(sinks)
        return struct("KvqStackLayer")(
            decoder=addressof(layer.decoder.struct),
            kv=addressof(layer_of(kv)),
            attention=attention,
            group=layer.group,
            angles=layer.angles,
        )

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        batches: Sequence[SequenceBatch],
        bad: Tensor,
    ) -> tuple[Tensor, float]:
        """The result [rows, hidden], and the seconds that writing and attention took of it.

        x: [rows, hidden]; angles: cos and sin [rows, dim] of every kind; batches: of all layer groups, of
        as many new tokens; bad: bool [rows], set where K or V was not finite.

        Raises:
            IndexError: a table or a slot names a block outside the pool.
            MemoryError: no room for scratch memory.
            ConfigError: shapes that don't fit each other.
        """
        rows = len(x)
        x = self.layers[0].decoder.rows(x, self.layers[0].decoder.hidden)
        for layer in self.layers:
            layer.decoder.check_angles(x, *angles[layer.angles])
        turned = [(cos.contiguous(), sin.contiguous()) for cos, sin in angles]
        sequences, kept = [], []
        for group in range(max(self._groups) + 1):
            if group not in self._groups:  # of another kind of layer
                sequences.append(struct("KvqBatch")())
                kept.append(None)
                continue
            layer, batch = self._groups[group], batches[group]
            check_batch(batch, rows, layer.kv.block_size, layer.options)
            if batch.slots.shape != (rows,) or bad.shape != (rows,):
                raise ConfigError(f"slots and flags must be those of {rows} rows")
            slots = batch.slots.long().contiguous()
            found, tables = batch_of(batch, 0)
            sequences.append(found)
            kept.append((slots, tables))
        heads, attended, lse, flags = self._memory_of(rows, x.dtype)
        out = torch.empty_like(x)
        seconds = c_double(0.0)
        step = struct("KvqStackStep")(
            batches=addressof(batch_array := (struct("KvqBatch") * len(sequences))(*sequences)),
            slots=addressof(slot_array := _addresses([None if one is None else one[0] for one in kept])),
            cos=addressof(cos_array := _addresses([cos for cos, _ in turned])),
            sin=addressof(sin_array := _addresses([sin for _, sin in turned])),
            heads=heads.data_ptr(),
            attended=attended.data_ptr(),
            lse=lse.data_ptr(),
            bad=flags.data_ptr(),
        )
        sizes = DTYPES[x.dtype], rows, torch.get_num_threads()
        into = x.data_ptr(), out.data_ptr(), bad.data_ptr(), addressof(seconds)
        run("decoder_stack", self._structs, len(self._structs), step, *into, *sizes)
        del batch_array, slot_array, cos_array, sin_array  # which `step` named
        return out, seconds.value

    def _memory_of(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What goes from one operation to the next; that of few rows is kept for the next step."""
        if self._memory is not None and self._memory[0] is dtype and rows <= self._memory[1]:
            return self._memory[2]
        heads, attended, q_heads = self._widths
        found = (
            torch.empty(rows, heads, dtype=dtype),
            torch.empty(rows, attended, dtype=dtype),
            torch.empty(rows, q_heads),
            torch.empty(rows, dtype=torch.bool),
        )
        if rows <= _KEPT_ROWS:
            self._memory = dtype, rows, found
        return found


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (c_void_p * len(tensors))(*(None if one is None else one.data_ptr() for one in tensors))
