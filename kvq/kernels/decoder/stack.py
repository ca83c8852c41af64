"""Plain decoder layers with attention over their blocks, in C++ for CPUs: one call per step."""

from collections.abc import Sequence
from ctypes import addressof, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.adapters.cpu import CpuStepAdapters
from kvq.kernels.attend.cpu import check_batch, options_of
from kvq.kernels.attend.options import AttentionOptions, parts_of
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.native.abi import DTYPES, batch_of, layer_of, struct
from kvq.kernels.native.library import run
from kvq.kernels.paged import PagedKV, SequenceBatch, StagedBatch, StagedKV
from kvq.kernels.seal.cpu import moves_of

_MOST_PARTS = 3  # sealed, recent, sinks
KEPT_BYTES = 64 << 20  # maximum memory of a step that is kept for the next


@dataclass(frozen=True, kw_only=True, eq=False)
class StackLayer:
    """One layer, and the blocks of its K and V."""

    decoder: CpuDecoder
    kv: PagedKV | StagedKV
    options: AttentionOptions
    exact: bool  # attention in fp32 for every format
    group: int  # layer group: index in the step's batches
    angles: int  # index in the step's angles
    sees_old: bool = True  # False for a staged layer whose window ends before any sealed block
    num_kinds: int = 1  # kinds of layers; each has a group of recent blocks, then one of sinks

    @property
    def own(self) -> PagedKV:
        """The blocks in the formats of the layer's recipe."""
        return self.kv if isinstance(self.kv, PagedKV) else self.kv.sealed

    @cached_property  # a step asks each kind of layer
    def held(self) -> dict[int, tuple[PagedKV, AttentionOptions]]:
        """Blocks that the layer reads and their attention options, keyed by group."""
        if isinstance(self.kv, PagedKV):
            return {self.group: (self.kv, self.options)}
        kv, recent = self.kv, self.group + self.num_kinds
        if not self.sees_old:
            return {recent: (kv.recent, self.options)}
        parts = [self.options.of_part(part) for part in parts_of(kv.exact, kv.sealed.block_size)]
        found = {self.group: (kv.sealed, parts[0]), recent: (kv.recent, parts[1])}
        return found if kv.sinks is None else {**found, recent + self.num_kinds: (kv.sinks, parts[2])}

    @property
    def written(self) -> int:
        """Index of the group to which new tokens are written."""
        return self.group if isinstance(self.kv, PagedKV) else self.group + self.num_kinds


class _StackStep:
    """A step's KvqStackStep, its arrays, and all objects to whose memory they point."""

    def __init__(self, groups: int, kinds: int) -> None:
        self.batches = (struct("KvqBatch") * groups)()
        self.slots, self.cos, self.sin = (c_void_p * groups)(), (c_void_p * kinds)(), (c_void_p * kinds)()
        self.moves, self.num_moves = (c_void_p * groups)(), (c_int64 * groups)()
        names = "batches", "slots", "moves", "num_moves", "cos", "sin"
        self.struct = struct("KvqStackStep")(**{name: addressof(getattr(self, name)) for name in names})
        self.named: list[Any] = []


class CpuStack:  # D112: all layers in one call
    """A stack of layers run in one call, bit-identical to separate calls of their parts."""

    def __init__(self, layers: Sequence[StackLayer]) -> None:
        """Prepare a stack of layers, whose blocks must be the same tensors in every call.

        Raises:
            ConfigError: the heads don't fit the blocks.
        """
        self.layers = layers
        self._kept: list[Any] = []  # tensors to whose memory structures point
        structs = [self._struct(layer) for layer in layers]
        self.structs = (struct("KvqStackLayer") * len(layers))(*structs)
        heads = [layer.decoder.parts.heads for layer in layers]
        self._widths = tuple(
            max(one) for one in zip(*((h.width, h.q_heads * h.k_dim, h.q_heads) for h in heads), strict=True)
        )
        self._groups = {layer.group: layer for layer in layers}
        self._kinds = {layer.angles: layer.decoder for layer in layers}
        self._num_groups = 1 + max(group for layer in layers for group in (layer.group, *layer.held))
        self.kinds = max(self._kinds) + 1
        self._is_staged = not all(isinstance(layer.kv, PagedKV) for layer in layers)
        self._memory: tuple[Tensor, ...] = ()
        self.pass_memory: tuple[Tensor, ...] = ()  # of a CpuPass, if whole steps are run
        self.hidden = layers[0].decoder.hidden
        self.dims = {layer.decoder.parts.heads.k_dim for layer in layers}

    def _struct(self, layer: StackLayer) -> Any:
        heads, kv, held = layer.decoder.parts.heads, layer.own, layer.held
        own = heads.kv_heads, heads.k_dim, heads.v_dim
        stored = kv.k.codes.shape[1], kv.formats.k_head_dim, kv.formats.v_head_dim
        if own != stored:
            raise ConfigError(f"KV heads and their dimensions are {own}, those of the blocks {stored}")
        _, options = held.get(layer.group, (kv, layer.options))
        attention, sinks = options_of(options, heads.q_heads, heads.kv_heads, exact=layer.exact)
        self._kept.append(sinks)
        staged = {}
        if isinstance(layer.kv, StagedKV):
            first = None if layer.kv.sinks is None else addressof(layer_of(layer.kv.sinks))
            staged = {"recent": addressof(layer_of(layer.kv.recent)), "sinks": first}
        return struct("KvqStackLayer")(
            decoder=addressof(layer.decoder.struct),
            kv=addressof(layer_of(kv)),
            attention=attention,
            group=layer.group,
            angles=layer.angles,
            recent_group=layer.written,
            sinks_group=layer.written + layer.num_kinds,
            sees_old=layer.sees_old,
            **staged,
        )

    def __call__(
        self,
        x: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        batches: Sequence[SequenceBatch],
        bad: Tensor,
        adapters: CpuStepAdapters | None = None,
    ) -> tuple[Tensor, float]:
        """Return the output [rows, hidden], and the seconds spent on writing K and V and on attention.

        x: [rows, hidden]; angles: cos and sin [rows, dim] for each kind of angle; batches: one for each
        layer group, with `rows` new tokens each; bad: bool [rows], set to True where K or V was not finite.

        Raises:
            IndexError: a table or a slot names a block outside the pool.
            MemoryError: there is not enough memory for scratch buffers.
            ConfigError: the shapes don't match.
        """
        rows, first = len(x), self.layers[0].decoder
        x = first.rows(x, first.hidden)
        step = self.step(batches, bad, rows, x.dtype, adapters)
        for kind, decoder in self._kinds.items():
            decoder.check_angles(x, *angles[kind])
            cos, sin = (angle.contiguous() for angle in angles[kind])
            step.cos[kind], step.sin[kind] = cos.data_ptr(), sin.data_ptr()
            step.named += cos, sin
        out, seconds = torch.empty_like(x), c_double(0.0)
        into = x.data_ptr(), out.data_ptr(), bad.data_ptr(), addressof(seconds)
        sizes = DTYPES[x.dtype], rows, torch.get_num_threads()
        run("decoder_stack", self.structs, len(self.layers), step.struct, *into, *sizes)
        return out, seconds.value

    def step(
        self,
        batches: Sequence[SequenceBatch],
        bad: Tensor,
        rows: int,
        dtype: torch.dtype,
        adapters: CpuStepAdapters | None,
    ) -> "_StackStep":
        """Return a step for `rows` rows of a dtype, without its angles; see `__call__` for the arguments."""
        step = _StackStep(self._num_groups, self.kinds)
        named = step.named
        for layer in self._groups.values():
            for group, (kv, options) in layer.held.items():
                check_batch(batches[group], rows, kv.block_size, options)
                step.batches[group], tables = batch_of(batches[group])
                named += batches[group], tables
            given = batches[layer.written].slots
            if given.shape != (rows,) or bad.shape != (rows,):
                raise ConfigError(
                    f"slots and flags must be of {rows} tokens, got {list(given.shape)} and {list(bad.shape)}"
                )
            slots = given.long().contiguous()
            step.slots[layer.written] = slots.data_ptr()
            named += (slots,)
            if isinstance(layer.kv, StagedKV) and layer.sees_old:
                sinks = layer.written + layer.num_kinds
                moves, step.num_moves[layer.group] = moves_of(
                    layer.kv,
                    StagedBatch(
                        sealed=batches[layer.group],
                        recent=batches[layer.written],
                        sinks=None if layer.kv.sinks is None else batches[sinks],
                    ),
                )
                step.moves[layer.group] = addressof(moves)
                named += (moves,)
        memory = self._take_memory(rows, dtype)
        names = "heads", "attended", "lse", "bad", "parts", "part_lse"
        for name, tensor in zip(names, memory, strict=True):
            setattr(step.struct, name, tensor.data_ptr())
        named += memory
        if adapters is not None:
            step.struct.adapters = addressof(adapters.struct)
            named += (adapters,)
        return step

    def _take_memory(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return buffers for data between operations; if they are small, they are kept for the next step."""
        kept = self._memory
        if kept and kept[0].dtype is dtype and rows <= len(kept[0]):
            return kept
        heads, attended, q_heads = self._widths
        parts = _MOST_PARTS if self._is_staged else 0
        found = (
            torch.empty(rows, heads, dtype=dtype),
            torch.empty(rows, attended, dtype=dtype),
            torch.empty(rows, q_heads, dtype=torch.float32),
            torch.empty(rows, dtype=torch.bool),
            torch.empty(parts, rows, attended, dtype=torch.float32),
            torch.empty(parts, rows, q_heads, dtype=torch.float32),
        )
        self._memory = found if sum(x.nbytes for x in found) <= KEPT_BYTES else ()
        return found
