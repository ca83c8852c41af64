"""Layers with recurrent states, which their own modules compute separately for each sequence of a step.

Such a module takes one row of tokens per sequence, so a step's packed row is split: all decodes run as one
batch, and each sequence in prefill runs alone, in pieces that end where snapshots are needed.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Generic, ParamSpec, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.blockmgr import StateMove
from kvq.cache.stores.recurrent import StateSlots, Tensors
from kvq.geometry import ModelGeometry

P = ParamSpec("P")
CACHE_NAMES = ("cache_params", "past_key_values")  # modules' names for the argument with their states
_HIDDEN = "hidden_states"

Rows = slice | Tensor  # rows of a step; int64 indices if they are not contiguous


class _Unused(TypedDict, total=False):
    """Keyword arguments that modules pass with a state and that only other caches use."""

    cache_kwargs: dict[str, Any]


class _LayerState:
    """One layer's state with the interface of a transformers cache. Source: `transformers.Cache`, 5.x."""

    def __init__(self, values: Tensors | None = None) -> None:
        """`values`: copies of the state's tensors, for the module to modify; None before the first token."""
        self.values: Tensors = {} if values is None else values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.values.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.values.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.values)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Unpack[_Unused],
    ) -> Tensor:
        """Return a convolution's inputs, [batch, channels, tokens], preceded by its last earlier inputs."""
        before = self.values.get(("conv", state_idx))
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        inputs = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        inputs = functional.pad(inputs, (max(0, width - inputs.shape[-1]), 0))
        self.values["conv", state_idx] = inputs[..., -width:].clone()
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Unpack[_Unused]
    ) -> Tensor:
        self.values["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state as `MiniMaxCache` does."""
        return self.values.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.values["linear", 0] = linear_cache


@dataclass(frozen=True, slots=True)
class _Piece:
    """Adjacent tokens of a step that belong to one sequence."""

    begin: int  # rows of the step
    end: int
    block: int  # the block that the state after them is written to
    draft_of: int | None = None  # for drafts, their sequence's index; their state may never be kept


class StepStates:
    """States of a step's sequences; `write` stores them in blocks after all layers have run."""

    def __init__(
        self,
        slots: StateSlots,
        moves: Sequence[StateMove | None],
        device: torch.device,
        drafts: Sequence[int] | None = None,
    ) -> None:
        """`moves`: sequences' moves, in the order of their tokens; None for a sequence without new tokens.

        `drafts`: for each sequence with new tokens, the number of final tokens that are drafts, all in its
        last piece.
        """
        self._slots, self._device = slots, device
        self._moves = [move for move in moves if move is not None]
        self._drafts = drafts or [0] * len(self._moves)
        self._new: list[tuple[int, Tensor, Tensors]] = []  # layer, blocks, states
        self._drafted: dict[int, list[tuple[int, Tensor, Tensors]]] = {}  # by sequence

    @cached_property
    def _decodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, blocks to read and blocks to write, int64, of sequences with one new token."""
        found, at = [], 0
        for move in self._moves:
            if _is_decode(move):
                found.append((at, move.source, move.pieces[0][1]))
            at += sum(count for count, _ in move.pieces)
        rows, sources, targets = zip(*found, strict=True) if found else ((), (), ())
        return self._numbers(rows), self._numbers(sources), self._numbers(targets)

    @cached_property
    def _others(self) -> list[tuple[Tensor | None, list[_Piece]]]:
        """For each sequence not in `_decodes`, the block to read, if any, and the pieces."""
        found, at = [], 0
        for number, (move, drafts) in enumerate(zip(self._moves, self._drafts, strict=True)):
            pieces = []
            for count, block in move.pieces:
                pieces.append(_Piece(at, at + count, block))
                at += count
            if drafts:
                last = pieces.pop()
                pieces.append(_Piece(last.begin, at - drafts, last.block))
                pieces.append(_Piece(at - drafts, at, last.block, draft_of=number))
            if not _is_decode(move):
                found.append((self._numbers([move.source]) if move.start else None, pieces))
        return found

    def _numbers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def run(
        self, number: int, hidden: Tensor, compute: Callable[[Tensor, _LayerState, Rows], Tensor]
    ) -> Tensor:
        """Return a module's results for a step, [1, rows, dim] in and out; padding rows are zero.

        `compute(tokens, state, rows)` runs the module on the step's `rows`, [batch, tokens, dim].
        """
        out: Tensor | None = None

        def put(rows: Rows, result: Tensor) -> None:
            nonlocal out
            if out is None:
                out = result.new_zeros((hidden.shape[1], *result.shape[2:]))
            out[rows] = result.flatten(0, 1)

        rows, sources, targets = self._decodes
        if len(rows):
            state = _LayerState(self._slots.read(number, sources))
            put(rows, compute(hidden[0, rows][:, None], state, rows))
            self._new.append((number, targets, state.values))
        for source, pieces in self._others:
            state = _LayerState(None if source is None else self._slots.read(number, source))
            for i, piece in enumerate(pieces):
                if i:  # the previous piece's state is stored unchanged
                    state = _LayerState({key: value.clone() for key, value in state.values.items()})
                span = slice(piece.begin, piece.end)
                put(span, compute(hidden[:, span], state, span))
                kept = self._new if piece.draft_of is None else self._drafted.setdefault(piece.draft_of, [])
                kept.append((number, self._numbers([piece.block]), state.values))
        assert out is not None, "a step has tokens"
        return out[None]

    def write(self) -> None:  # D198: written once all layers have run
        """Store the new states, except those after drafts; a step that fails earlier may be rerun."""
        for number, blocks, values in self._new:
            self._slots.write(number, blocks, values)
        self._new.clear()

    def keep(self, sequence: int) -> None:
        """Store the state after a sequence's drafts, all of which were accepted."""
        for number, blocks, values in self._drafted.pop(sequence):
            self._slots.write(number, blocks, values)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make modules with states compute this step while the context is open."""
        self._new.clear()
        self._drafted.clear()
        _running.states = self
        try:
            yield
        finally:
            _running.states = None


def _is_decode(move: StateMove) -> bool:
    return move.start > 0 and len(move.pieces) == 1 and move.pieces[0][0] == 1


class _Running(threading.local):
    states: StepStates | None = None


_running = _Running()  # global, since model code doesn't pass keyword arguments to all its parts


def cut_states(model: nn.Module, geometry: ModelGeometry) -> None:
    """Make modules with states compute steps of several sequences; outside steps, nothing changes."""
    kinds = {(state.number, state.kind) for state in geometry.states}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int) and (number, type(module).__name__) in kinds:
            module.forward = _Cut(module.forward, number)


class _Cut(Generic[P]):
    """Replacement of a module's forward pass that splits a step by sequence."""

    def __init__(self, forward: Callable[P, Any], number: int) -> None:
        self._forward: Callable[..., Any] = forward  # also called with pieces of a step
        self._number = number
        self.__signature__ = signature(forward)
        self._cache = next(name for name in CACHE_NAMES if name in self.__signature__.parameters)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Tensor | tuple[Tensor | None, ...]:
        states = _running.states
        if states is None:
            alone: Tensor | tuple[Tensor | None, ...] = self._forward(*args, **kwargs)
            return alone
        given = self.__signature__.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        hidden = given.pop(_HIDDEN)
        given = {name: value for name, value in given.items() if name not in ("kvq_step", self._cache)}
        length = hidden.shape[1]

        more: tuple[None, ...] = ()  # further results of some modules, which are not needed

        def compute(tokens: Tensor, state: _LayerState, rows: Rows) -> Tensor:
            nonlocal more
            cut = {name: _of_rows(value, rows, length) for name, value in given.items()}
            found = self._forward(tokens, **cut, **{self._cache: state})
            result: Tensor = found[0] if isinstance(found, tuple) else found
            more = (None,) * (len(found) - 1) if isinstance(found, tuple) else ()
            return result

        out = states.run(self._number, hidden, compute)
        return (out, *more) if more else out


def _of_rows(value: Any, rows: Rows, length: int) -> Any:
    """Select some of a step's rows from a keyword argument's tensors [1, rows, ...], also inside tuples."""
    if isinstance(value, tuple):
        return tuple(_of_rows(part, rows, length) for part in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, length):
        return value[:, rows] if isinstance(rows, slice) else value[0, rows][:, None]
    return value
