"""Runner: executes a step plan as one packed forward pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.memory import check_room
from kvq.engine.device.graphs import DecodeGraphs, Tables, decode_graphs
from kvq.engine.device.transfers import upload_all
from kvq.kernels import SequenceBatch
from kvq.kernels.decoder.whole import ReadyPass
from kvq.kernels.uploads import ring
from kvq.layout import KVLayout
from kvq.models import Model
from kvq.models.loading.weights import LoadedWeights
from kvq.models.parts.adapters import StepAdapters
from kvq.models.parts.states import StepStates
from kvq.models.parts.step import Observer, PackedStep
from kvq.models.run.packing import Integers, are_decodes, positions_of, ready_pass, run_packed
from kvq.scheduler import StepPlan
from kvq.sizing.pools import PoolPlan

_NONE: Mapping[int, int] = MappingProxyType({})


@dataclass(kw_only=True, slots=True, eq=False)
class StepOutput:
    """Output of a forward pass. If the pass runs concurrently, the tensors are filled only after `wait`."""

    logits: Tensor  # [wanted rows, vocab] in the model's dtype, packed in the plan's order
    starts: list[int]  # per branch, the index of its first row of logits
    bad_tokens: Tensor  # bool [new tokens]: K or V contained NaN or infinity; on the device
    attention_s: float  # time in write and attend; on a GPU, the time to launch them
    states: tuple[StepStates | None, ...] = ()  # recurrent states, of all branches together or of each
    hidden: Tensor | None = None  # [new tokens, hidden_size] after the last norm, if the runner keeps it
    concurrent: ReadyPass | None = None  # the pass running in threads, until `wait`
    concurrent_s: float = 0.0  # duration of a pass that ran in threads

    @torch.inference_mode()
    def begin(self, tokens: Tensor) -> bool:
        """Start a prepared pass with its token ids, int64 [new tokens].

        Returns True if the pass runs concurrently, or False if no threads were free and the pass has already
        finished.
        """
        assert self.concurrent is not None, "made ready"
        self.concurrent.tokens.copy_(tokens)
        return self.concurrent.begin()

    def wait(self) -> None:
        """Wait until all tensors are filled.

        Raises:
            Exception: any exception that the pass raised; the pass may be run again.
        """
        if self.concurrent is not None:
            self.concurrent.wait()
            self.attention_s += self.concurrent.seconds
            self.concurrent_s = self.concurrent.took_s
            self.concurrent = None

    def keep_states(self, index: int) -> None:
        """Store the recurrent state after a branch's last draft, once all its drafts are accepted."""
        states = self.states[index if len(self.states) > 1 else 0] if self.states else None
        if states is not None:
            states.keep(index if len(self.states) == 1 else 0)


# Token ids, positions, wanted rows, and a batch per layer group; on a GPU, all of them are on the device.
_Inputs = tuple[Sequence[int] | Tensor, Integers | Tensor, Sequence[int] | Tensor, tuple[SequenceBatch, ...]]


class Runner:
    """Model with its block pools. All memory needed between steps is allocated at the start."""

    def __init__(
        self,
        model: Model,
        pools: PoolPlan,
        max_context: int,
        *,
        uses_graphs: bool = True,
        keeps_hidden: bool = False,
    ) -> None:
        """Allocate pools and block tables, for sequences of at most `max_context` tokens.

        `uses_graphs`: whether to capture decode steps as graphs on a GPU.
        `keeps_hidden`: whether outputs contain hidden states, which are valid until the next step.

        Raises:
            OutOfMemory: the pools don't fit.
        """
        weights, layout = model.weights, model.layout
        num_blocks, max_num_seqs = pools.num_blocks, pools.sequences
        spare = int(weights.device.type == "cuda")  # a block and a table row for padding in graphs
        self.model = model
        self.cache = KVCache(
            layout,
            num_blocks=[count + spare for count in num_blocks],
            device=weights.device,
            backend=model.prepared.backend,
        )
        self.observer: Observer | None = None  # sees K and V of every layer before they are written
        self.keeps_hidden = keeps_hidden
        self.adapters: Callable[[StepPlan], StepAdapters | None] = lambda plan: None  # of its branches
        self._device = weights.device
        if self._device.type == "cuda":
            ring(self._device)  # allocated now, since pinning memory is slow
        self._block_size = layout.block_size
        longest = longest_context(layout, num_blocks, max_context)
        self._width = -(-longest // layout.block_size)
        shape = (max_num_seqs + spare, self._width)
        groups = layout.attended
        check_room(4 * prod(shape) * len(groups), self._device, purpose="the block tables")
        tables = [torch.zeros(shape, dtype=torch.int32, device=self._device) for _ in groups]
        for table, count in zip(tables, num_blocks, strict=False):
            table[max_num_seqs:] = count
        # The host's copy saves kernel launches; on a CPU, both share memory.
        self._tables = Tables(tables, [table.cpu().numpy() for table in tables], longest)
        capture = partial(
            DecodeGraphs,
            *(model, self.cache, self._tables),
            max_num_seqs=max_num_seqs,
            keeps_hidden=keeps_hidden,
        )
        self._graphs = decode_graphs(self._device, capture) if uses_graphs else None

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> None:
        """Carry out a plan's orders and update the block tables; call this once, before `forward`."""
        self.cache.carry_out(plan.orders)
        self._update_tables(plan)

    @torch.inference_mode()
    def forward(
        self,
        plan: StepPlan,
        *,
        last_rows: Mapping[int, int] = _NONE,
        tokens: Tensor | None = None,
        weights: LoadedWeights | None = None,
        keeps_hidden: bool = False,
    ) -> StepOutput:
        """Run the layers, which write K and V before attending, and compute the requested logits.

        Logits are computed for the last row of each branch that samples and for the last `last_rows[i]` rows
        of branch i.
        `tokens`: int64 [new tokens] on the device, to use instead of the plan's tokens.
        `weights`: the same model in another form, for drafting. `keeps_hidden`: the output contains hidden
        states even if the runner does not always keep them.
        Nothing is committed: if a plan raises an error, it may be run again, in full or branch by branch.
        """
        if not plan.branches:
            return self.nothing(plan)
        keeps_hidden |= self.keeps_hidden
        adapters = self.adapters(plan) if weights is None else None
        plainly = self.observer is None and not last_rows and weights is None and adapters is None
        plainly &= self.keeps_hidden or not keeps_hidden
        if self._graphs is not None and plainly and self._graphs.takes(plan):
            logits, bad = self._graphs.run(plan, tokens)
            hidden = self._graphs.hidden
            return StepOutput(
                logits=logits,
                starts=list(range(len(plan.branches))),
                bad_tokens=bad,
                attention_s=0.0,
                hidden=None if hidden is None else hidden[: len(plan.branches)],
            )
        starts, wanted = _wanted(plan, last_rows)
        find = self._inputs_on_cpu if self._device.type == "cpu" else self._inputs_on_gpu
        ids, positions, rows, batches = find(plan, wanted, tokens)
        step = self._packed(plan, batches, adapters, keeps_hidden)
        logits = run_packed(weights or self.model.weights, step, ids, positions, rows)
        return StepOutput(
            logits=logits,
            starts=starts,
            bad_tokens=step.bad_tokens,
            attention_s=step.attention_s,
            states=() if step.states is None else (step.states,),
            hidden=None if step.hidden is None else step.hidden[: plan.num_tokens],
        )

    @property
    def runs_concurrently(self) -> bool:
        """True if passes can run while Python continues: on a GPU, or in the threads of CPU kernels."""
        if self._graphs is not None or self._device.type != "cpu":
            return True
        short = self.model.weights.fused_pass
        is_plain = self.observer is None and not self.keeps_hidden and self.cache.states is None
        return is_plain and short is not None and short.is_whole and torch.get_num_threads() > 1

    @torch.inference_mode()
    def get_ready(self, plan: StepPlan) -> StepOutput | None:
        """Lay out a decode pass that `begin` starts once its tokens are known. Return None on a GPU.

        Another pass may run in the meantime but must end before this pass begins.
        """
        if self._graphs is not None or self._device.type != "cpu" or not self.runs_concurrently:
            return None
        starts, wanted = _wanted(plan, _NONE)
        ids, positions, _, batches = self._inputs_on_cpu(plan, wanted, None)
        step = self._packed(plan, batches, self.adapters(plan), self.keeps_hidden)
        ready = ready_pass(self.model.weights, step, ids, positions, wanted)
        if ready is None:
            return None
        return StepOutput(
            logits=ready.logits[: len(wanted)],
            starts=starts,
            bad_tokens=step.bad_tokens,
            attention_s=0.0,
            concurrent=ready,
        )

    def _packed(
        self,
        plan: StepPlan,
        batches: tuple[SequenceBatch, ...],
        adapters: StepAdapters | None,
        keeps_hidden: bool,
    ) -> PackedStep:
        slots = self.cache.states
        return PackedStep(
            cache=self.cache,
            geometry=self.model.geometry,
            batches=batches,
            bad_tokens=torch.zeros(plan.num_tokens, dtype=torch.bool, device=self._device),
            observer=self.observer,
            states=None if slots is None else StepStates(slots, plan.moves, self._device, plan.drafts),
            keeps_hidden=keeps_hidden,
            adapters=adapters,
        )

    def nothing(self, plan: StepPlan) -> StepOutput:
        """Return the empty output of a plan that computes nothing."""
        logits = torch.empty(0, self.model.geometry.vocab_size, device=self._device, dtype=torch.float32)
        starts = [0] * len(plan.branches)
        fine = torch.zeros(plan.num_tokens, dtype=torch.bool, device=self._device)
        return StepOutput(logits=logits, starts=starts, bad_tokens=fine, attention_s=0.0)

    def _inputs_on_gpu(self, plan: StepPlan, wanted: list[int], tokens: Tensor | None) -> _Inputs:
        """Upload all integer inputs of the step in one copy. The block tables are already on the device."""
        counts, rows = np.array(plan.counts), _rows(plan)
        positions = positions_of(plan.counts, plan.ends)
        known = () if tokens is not None else plan.token_ids
        numbers = (known, positions, wanted, rows, *self._slots(plan, rows, positions))
        arrays = [np.asarray(values, np.int64) for values in numbers]
        arrays.append(np.array((np.cumsum(counts) - counts, counts, plan.ends), np.int32))
        ids, where, keep, sequences, *slots, lens = upload_all(arrays, self._device)
        width = self._blocks_of(plan)
        tables = [table[sequences, :width] for table in self._tables.there]
        return ids if tokens is None else tokens, where, keep, _batches(plan, tables, slots, lens)

    def _inputs_on_cpu(self, plan: StepPlan, wanted: list[int], tokens: Tensor | None) -> _Inputs:
        """Compute the inputs with NumPy, which takes a tenth of torch's time for so little data."""
        rows, positions = _rows(plan), positions_of(plan.counts, plan.ends)
        width = self._blocks_of(plan)
        slots = [torch.from_numpy(own) for own in self._slots(plan, rows, positions)]
        tables = [torch.from_numpy(own[rows, :width]) for own in self._tables.here]
        ids = plan.token_ids if tokens is None else tokens
        return ids, positions, wanted, _batches(plan, tables, slots, None)

    def _slots(self, plan: StepPlan, rows: list[int], positions: Integers) -> list[Integers]:
        """Return the slots, int64 [new tokens] per layer group: block * block_size + offset."""
        size = self._block_size
        owners = rows if are_decodes(plan.counts) else np.repeat(rows, plan.counts)
        index, offset = np.divmod(positions, size)
        return [own[owners, index].astype(np.int64) * size + offset for own in self._tables.here]

    def _blocks_of(self, plan: StepPlan) -> int:
        """Return the number of blocks in the step's longest sequence."""
        return -(-max(plan.ends) // self._block_size)

    def _update_tables(self, plan: StepPlan) -> None:
        """Write the plan's changes to the block tables, in one copy."""
        places: list[list[int]] = [[] for _ in self._tables.here]
        blocks: list[list[int]] = [[] for _ in self._tables.here]
        for row, group, first, entries in plan.table_changes:
            at = row * self._width + first
            places[group].extend(range(at, at + len(entries)))
            blocks[group].extend(entries)
        changed = [group for group, where in enumerate(places) if where]
        for group in changed:
            self._tables.here[group].reshape(-1)[places[group]] = blocks[group]
        if not changed or self._device.type == "cpu":
            return
        arrays = [
            np.asarray(values[group], kind)
            for group in changed
            for values, kind in ((places, np.int64), (blocks, np.int32))
        ]
        moved = upload_all(arrays, self._device)
        for group, where, what in zip(changed, moved[::2], moved[1::2], strict=True):
            self._tables.there[group].view(-1)[where] = what


def _rows(plan: StepPlan) -> list[int]:
    """Return the table row of each branch; branches without a row get the last one."""
    return [-1 if branch.row is None else branch.row for branch in plan.branches]


def _batches(
    plan: StepPlan, tables: Sequence[Tensor], slots: Sequence[Tensor], lens: Tensor | None
) -> tuple[SequenceBatch, ...]:
    """Return one batch per layer group, with the group's table and slots."""
    counts, ends = tuple(plan.counts), tuple(plan.ends)
    return tuple(
        SequenceBatch(query_lens=counts, context_lens=ends, tables=table, slots=own, lens=lens)
        for table, own in zip(tables, slots, strict=True)
    )


def longest_context(layout: KVLayout, num_blocks: Sequence[int], max_context: int) -> int:
    """Return the length in tokens of the longest sequence that the pools can hold.

    Groups with windows and staging areas keep only some tokens and set no limit.
    """
    full = [
        count * layout.block_size
        for count, group in zip(num_blocks, layout.groups, strict=True)
        if group.holds_all
    ]
    return min(max_context, *full) if full else max_context


def join(parts: list[StepOutput]) -> StepOutput:
    """Combine the outputs of a step whose branches were run one by one."""
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += len(part.logits)
    hidden = [part.hidden for part in parts if part.hidden is not None]
    return StepOutput(
        logits=torch.cat([part.logits for part in parts]),
        starts=starts,
        bad_tokens=torch.cat([part.bad_tokens for part in parts]),
        attention_s=sum(part.attention_s for part in parts),
        states=tuple(part.states[0] if part.states else None for part in parts),
        hidden=torch.cat(hidden) if len(hidden) == len(parts) else None,  # a part that raised has none
    )


def _wanted(plan: StepPlan, last_rows: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return each branch's first row of logits, and the packed rows for which logits are computed."""
    starts: list[int] = []
    keep: list[int] = []
    at = 0
    for i, (count, samples) in enumerate(zip(plan.counts, plan.samples, strict=True)):
        starts.append(len(keep))
        at += count
        keep.extend(range(at - last_rows.get(i, int(samples)), at))
    return starts, keep
