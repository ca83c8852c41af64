"""A complete model step in one C++ call for CPUs: embedding, layers, final norm and head."""

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_void_p
from typing import Any

import torch
from torch import Tensor

from kvq.errors import ConfigError
from kvq.kernels.adapters.cpu import CpuStepAdapters
from kvq.kernels.decoder.stack import KEPT_BYTES, CpuStack
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.abi import DTYPES, struct
from kvq.kernels.native.library import loaded, run
from kvq.kernels.paged import SequenceBatch
from kvq.kernels.rms_norm.reference import NormWeight

AngleTables = Mapping[str, tuple[Tensor, Tensor]]  # of every kind, cos and sin [positions, dim]


class ReadyPass:
    """A prepared step, which can be run at once, or started and waited for.

    `tokens`: int64 [rows], writable until the step starts. `logits`: [wanted, vocab], valid when it ends.
    """

    def __init__(self, tokens: Tensor, logits: Tensor, step: Any, named: Sequence[Any]) -> None:
        self.tokens, self.logits = tokens, logits
        self._step = step  # KvqWholeStep
        self._named = named  # the step points to their memory
        self._end = loaded().kernels["decoder_pass_end"]  # at exit, modules may be gone before this object
        self._runs = False

    @property
    def seconds(self) -> float:
        """Seconds spent writing K and V and computing attention."""
        found: float = self._step.seconds
        return found

    @property
    def took_s(self) -> float:
        """Duration of the pass in seconds."""
        found: float = self._step.took
        return found

    def run(self) -> None:
        """Run the complete pass.

        Raises:
            IndexError: a token, a position, a row or a block does not exist.
            MemoryError: there is not enough memory for scratch buffers.
        """
        run("decoder_pass", self._step)

    def begin(self) -> bool:
        """Start the pass on the kernels' threads, if there are any; `wait` completes it.

        Other passes of the same stack must have ended. Returns False if the pass has already ended.
        """
        self._runs = True
        run("decoder_pass_begin", self._step)
        return bool(self._step.number)

    def wait(self) -> None:
        """Take part in computing the pass until it ends.

        Raises:
            IndexError, MemoryError: as for `run`.
        """
        if self._runs:
            run("decoder_pass_end", self._step)
            self._runs = False

    def __del__(self) -> None:
        if self._runs:  # it must not continue in memory that is reused
            self._end(self._step)


class CpuPass:  # D113: from token ids to logits in one call
    """Builder of a model's steps, whose results are bit-identical to those of separate operations.

    Steps of one stack share the buffers between operations, so only one may run at a time.
    """

    def __init__(
        self,
        embedding: Tensor | CpuLinear,
        norm: NormWeight,
        head: CpuLinear,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        """Check the parts. `embedding`: [vocab, hidden] in `dtype`, or the head, to look up its rows.

        `scale`: the factor by which embeddings are multiplied, in fp32, before they are rounded to `dtype`.

        Raises:
            ConfigError: the parts don't match.
        """
        weight, hidden = norm.weight, head.in_features
        fits = dtype in DTYPES and weight.dtype in DTYPES and weight.is_contiguous()
        if isinstance(embedding, Tensor):
            (vocab, *widths), looked_up = embedding.shape, None
            fits = fits and embedding.is_contiguous() and embedding.dtype is dtype
        else:
            vocab, widths, looked_up = embedding.out_features, [embedding.in_features], embedding
        widths += weight.shape
        if not fits or widths != [hidden] * 2:
            raise ConfigError(
                f"an embedding and a norm of {widths} numbers don't fit a head of {hidden} inputs in {dtype}"
            )
        self.dtype, self._head = dtype, head
        self._around = {
            "embedding": embedding.data_ptr() if isinstance(embedding, Tensor) else None,
            "looked_up": None if looked_up is None else addressof(looked_up.struct),
            "vocab": vocab,
            "scale": scale,
            "norm": struct("KvqNorm")(weight.data_ptr(), norm.eps, DTYPES[weight.dtype]),
            "head": addressof(head.struct),
        }
        self._named = embedding, norm, head  # steps point to their memory
        self._tables: AngleTables = {}
        self._arrays: tuple[Any, ...] = ()  # of pointers to the tables
        self._angles: dict[str, Any] = {}  # of the tables, in a KvqPass

    def __call__(
        self,
        stack: CpuStack,
        tables: AngleTables,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        batches: Sequence[SequenceBatch],
        bad: Tensor,
        adapters: CpuStepAdapters | None = None,
    ) -> ReadyPass:
        """Return a step that computes the logits of the rows `wanted` from token ids.

        tokens, positions: int64 [rows]; wanted: int64, indices of rows; batches, bad: as for `CpuStack`.

        Raises:
            ConfigError: the shapes don't match.
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
        angles, hidden, dtype = self._angles, self._head.in_features, self.dtype
        own = hidden, angles["kinds"], {angles["dim"]}
        if own != (stack.hidden, stack.kinds, stack.dims):
            raise ConfigError(
                f"numbers, kinds of angles and their dimensions are {own}, those of the layers "
                f"{(stack.hidden, stack.kinds, stack.dims)}: they don't fit each other's tables"
            )
        memory = self._take_memory(stack, max(rows, count))
        names = "tokens", "positions", "wanted", "x", "out", "angles", "lens"
        at = {name: tensor.data_ptr() for name, tensor in zip(names, (*numbers, *memory), strict=True)}
        given = struct("KvqPass")(**self._around, **angles, **at, num_wanted=count)
        logits = torch.empty(count, self._head.out_features, dtype=dtype)
        step = stack.step(batches, bad, rows, dtype, adapters)
        whole = struct("KvqWholeStep")(
            layers=addressof(stack.structs),
            step=addressof(step.struct),
            logits=logits.data_ptr(),
            bad=bad.data_ptr(),
            rows=rows,
            count=len(stack.layers),
            code=DTYPES[dtype],
            threads=torch.get_num_threads(),
            **{"pass": addressof(given)},
        )
        named = stack, self, step, given, numbers, memory, tables, self._arrays, bad
        return ReadyPass(tokens, logits, whole, named)

    def _take_tables(self, tables: AngleTables) -> None:
        each = [angle for pair in tables.values() for angle in pair]
        dims = {tuple(angle.shape) for angle in each}
        fit = all(angle.dtype is self.dtype and angle.is_contiguous() for angle in each)
        if len(dims) != 1 or not fit:
            raise ConfigError(
                f"tables of angles must be alike, whole and in {self.dtype}, got {sorted(dims)}"
            )
        cos, sin = (
            (c_void_p * len(tables))(*(x.data_ptr() for x in own))
            for own in zip(*tables.values(), strict=True)
        )
        num_positions, dim = dims.pop()
        self._angles = {
            "cos": addressof(cos),
            "sin": addressof(sin),
            "kinds": len(tables),
            "num_positions": num_positions,
            "dim": dim,
        }
        self._tables, self._arrays = tables, (cos, sin)

    def _take_memory(self, stack: CpuStack, rows: int) -> tuple[Tensor, ...]:
        """Return buffers for data between operations, kept for the stack's next step if they are small."""
        kept, dtype = stack.pass_memory, self.dtype
        if kept and kept[0].dtype is dtype and rows <= len(kept[0]):
            return kept
        found = (
            *(torch.empty(rows, stack.hidden, dtype=dtype) for _ in range(2)),
            torch.empty(2 * len(self._tables) * rows, self._angles["dim"], dtype=dtype),
            torch.empty(rows, dtype=torch.int32),
        )
        stack.pass_memory = found if sum(x.nbytes for x in found) <= KEPT_BYTES else ()
        return found
