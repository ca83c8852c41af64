"""Decode graphs: captures decode-only steps as CUDA graphs. One replay replaces a thousand launches."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.engine.device.transfers import send
from kvq.errors import first_lines
from kvq.kernels import SequenceBatch
from kvq.models import Model
from kvq.models.parts.step import PackedStep
from kvq.models.run.packing import kept_hidden
from kvq.scheduler import StepPlan

_log = logging.getLogger("kvq")
# D240: everything a graph reads lives as long as the graph
Capture = Callable[[Callable[[], None]], Callable[[], None]]  # records work; returns its replay function


@dataclass(frozen=True, slots=True)
class Tables:  # D58: as wide as the pool
    """Block tables, one [rows, blocks] table per layer group, on the device and on the host."""

    there: list[Tensor]  # int32, on the device
    here: list[npt.NDArray[np.int32]]  # copies on the host
    max_context: int  # tokens of the longest sequence


class DecodeGraphs:
    """Graphs for decode steps, one per batch size: 1, 2, 4, 8, and every multiple of 16 up to the largest.

    A graph repeats the same launches on the same memory. Therefore, everything that changes between steps is
    in one small buffer, and grids are sized for the longest context. Each unused row of a batch computes a
    token in a spare block.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        tables: Tables,
        *,
        max_num_seqs: int,
        keeps_hidden: bool = False,
        capture: Capture | None = None,
    ) -> None:
        """Capture graphs for all batch sizes, largest first, so that they share one memory pool.

        `keeps_hidden`: whether to keep the hidden states of the last run's branches in `hidden`.

        The tables have max_num_seqs + 1 rows; the last row refers to the spare block.
        """
        self._model = model
        self._cache = cache
        self._tables = tables
        self._spare_row = max_num_seqs
        sizes = {n for n in (1, 2, 4, 8, *range(16, max_num_seqs, 16)) if n < max_num_seqs} | {max_num_seqs}
        self._size_of = [min(n for n in sizes if n >= count) for count in range(max_num_seqs + 1)]
        self._device = model.weights.device
        self._block_size = model.layout.block_size
        self._rows = 3 + len(tables.there)  # token ids, positions, table rows; slots by layer group
        # Read by graphs: these rows, int64 [rows, size], then `lens` of the batch.
        self._inputs = torch.zeros(self._words(max_num_seqs), dtype=torch.int64, device=self._device)
        self._bad = torch.zeros(max_num_seqs, dtype=torch.bool, device=self._device)
        self._keep = torch.arange(max_num_seqs, device=self._device)  # graphs read it in place
        # Shared by all sizes: a graph's separate logits would not be in the memory that graphs share.
        self._logits = torch.empty(
            max_num_seqs, model.geometry.vocab_size, dtype=model.prepared.dtype, device=self._device
        )
        shape = (max_num_seqs, model.geometry.hidden_size)
        self.hidden = (
            torch.empty(shape, dtype=model.prepared.dtype, device=self._device) if keeps_hidden else None
        )
        self._replay: dict[int, Callable[[], None]] = {}
        record = capture or cuda_capture(self._device)
        for size in sorted(sizes, reverse=True):
            self._fill((), (), (), size)
            self._replay[size] = record(self._work(size))

    def takes(self, plan: StepPlan) -> bool:  # D241: steps with a prefill chunk are not captured
        """Return True if every branch of the step computes one token and samples the next."""
        if plan.num_tokens != len(plan.branches):  # also true for drafts
            return False
        return 0 < plan.num_decodes == len(plan.branches) < len(self._size_of) and all(plan.samples)

    @torch.inference_mode()
    def run(self, plan: StepPlan, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [branches, vocab], and bool [branches], True for branches with non-finite K or V.

        Both tensors are valid until the next run. This method never waits for the device.
        `tokens`: int64 [branches] on the device, to use instead of the plan's tokens.
        """
        count = len(plan.branches)
        size = self._size_of[count]
        rows = [self._spare_row if branch.row is None else branch.row for branch in plan.branches]
        self._fill(plan.token_ids if tokens is None else (), plan.ends, rows, size)
        if tokens is not None:
            self._inputs[:count].copy_(tokens)
        self._replay[size]()
        return self._logits[:count], self._bad[:count]

    def _fill(self, ids: Sequence[int], ends: Sequence[int], rows: Sequence[int], size: int) -> None:
        """Copy the inputs of a step to the device, padding unused rows with one token each."""
        words, block_size = np.zeros(self._words(size), np.int64), self._block_size
        lens = words[self._rows * size :].view(np.int32)[: 3 * size].reshape(3, size)
        lens[0], lens[1:] = np.arange(size), 1
        lens[2, : len(ends)] = ends
        own_ids, positions, own_rows, *slots = words[: self._rows * size].reshape(self._rows, size)
        own_ids[: len(ids)] = ids
        positions[:] = lens[2] - 1
        own_rows[: len(rows)], own_rows[len(rows) :] = rows, self._spare_row
        index, offset = np.divmod(positions, block_size)
        for own, entries in zip(slots, self._tables.here, strict=True):
            np.multiply(entries[own_rows, index], block_size, out=own)
            own += offset
        send(words, self._inputs[: len(words)])

    def _words(self, size: int) -> int:
        """Return the size of a step's inputs in 8-byte words; `lens` takes three half words per branch."""
        return self._rows * size + -(-3 * size // 2)

    def _work(self, size: int) -> Callable[[], None]:
        """Return a function that runs a decode step of this size, from the input buffer to logits and flags.

        The function reads only memory that it allocates or that outlives the capture: memory of this object,
        the model or the cache.
        """
        inputs = self._inputs[: self._words(size)]
        lens = inputs[self._rows * size :].view(torch.int32)[: 3 * size].view(3, size)

        @torch.inference_mode()
        def work() -> None:
            ids, positions, rows, *slots = inputs[: self._rows * size].view(self._rows, size)
            bad = self._bad[:size].zero_()
            step = PackedStep(
                cache=self._cache,
                geometry=self._model.geometry,
                batches=tuple(
                    SequenceBatch(
                        query_lens=(1,) * size,
                        context_lens=(self._tables.max_context,) * size,
                        tables=table[rows],
                        slots=own,
                        lens=lens,
                        is_captured=True,
                    )
                    for table, own in zip(self._tables.there, slots, strict=True)
                ),
                bad_tokens=bad,
                keeps_hidden=self.hidden is not None,
            )
            with kept_hidden(self._model.weights.model, step):
                output = self._model.weights.model(
                    input_ids=ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=self._keep[:size],
                    kvq_step=step,
                )
            self._logits[:size].copy_(output.logits[0])
            if self.hidden is not None and step.hidden is not None:
                self.hidden[:size].copy_(step.hidden)

        return work


def cuda_capture(device: torch.device) -> Capture:
    """Return a function that records work as CUDA graphs on `device`. The graphs share their memory.

    If a capture fails, the streams are restored.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            # Entered here as well: torch.cuda.graph stays in the stream if a capture can't be ended.
            with torch.cuda.device(device), torch.cuda.stream(stream):
                work()  # compiles kernels and fills allocator caches
                work()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
        finally:
            current.wait_stream(stream)
        return graph.replay

    return capture


def decode_graphs(device: torch.device, make: Callable[[], DecodeGraphs]) -> DecodeGraphs | None:
    """Return decode graphs on a CUDA device, or None elsewhere or (with a warning) if capture fails."""
    if device.type != "cuda":
        return None
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - a model's code may do anything that graphs can't record
        _log.warning("decode steps run without CUDA graphs: %s", first_lines(error))
        return None
