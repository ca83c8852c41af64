"""A session: KV pools for sequences of one model, and steps that run these sequences."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvq.blockmgr import BlockManager, Sequence
from kvq.cache.transformers.attention import NAME, PACKED_NAME
from kvq.errors import ModelError, RequestError
from kvq.kernels import SequenceBatch
from kvq.layout import KVLayout
from kvq.models.loading.prepared import make_cache
from kvq.models.loading.weights import LoadedWeights
from kvq.models.parts.states import StepStates
from kvq.models.parts.step import Observer, PackedStep, SharedInputs
from kvq.models.run.packing import positions_of, run_packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """Logits of one sequence from a step."""

    logits: Tensor  # fp32 [rows, vocab]: a row for every new token, or for the last one only
    finite: bool  # False: K or V contained NaN or infinity; the sequence's blocks were scrubbed

    def trusted_logits(self) -> Tensor:
        """Return the logits; raise RequestError if K or V was not finite."""
        if not self.finite:
            raise RequestError(
                "K or V held NaN or infinity; the weights or the dtype overflow, try dtype fp32"
            )
        return self.logits


class Session:
    """Session that runs packed steps over its own KV pools; each layer writes K and V, then attends."""

    def __init__(
        self,
        weights: LoadedWeights,
        layout: KVLayout,
        *,
        max_tokens: int,
        max_sequences: int = 1,
        pool_tokens: int | None = None,
        backend: str | None = None,
    ) -> None:
        """Allocate pools for `max_sequences` sequences of up to `max_tokens` tokens each.

        `pool_tokens`: allocate for this total number of tokens instead, however the sequences divide it.
        `backend`: kernels for kvq's own cache; None uses the model's cache and kernels.

        Raises:
            RequestError: `max_tokens` exceeds the model's context.
            ConfigError: the cache backend can't store the recipe.
            OutOfMemory: the pools don't fit.
        """
        if not 1 <= max_tokens <= weights.max_context:
            raise RequestError(
                f"a context of {max_tokens} tokens was asked for; this model takes 1 to {weights.max_context}"
            )
        num_blocks = layout.blocks_for(max_sequences, max_tokens)
        if pool_tokens is not None:
            num_blocks = [-(-pool_tokens // layout.block_size)] * len(layout.groups)
        self.weights = weights
        self.layout = layout
        self.cache = make_cache(weights.prepared, layout, num_blocks=num_blocks, backend=backend)
        self.manager = BlockManager(num_blocks=num_blocks, block_size=layout.block_size, **layout.holding)
        self.window_limit: int | None = None
        self.observer: Observer | None = None
        self.shared: SharedInputs | None = None

    def new_sequence(self) -> Sequence:
        return self.manager.new_sequence()

    def free(self, sequence: Sequence) -> None:
        self.manager.free(sequence)

    @torch.inference_mode()
    def forward(self, work: list[tuple[Sequence, list[int]]], *, all_rows: bool = False) -> list[StepResult]:
        """Run one step: append tokens to sequences and return their logits.

        `work` pairs each sequence with its new token ids: a prefill chunk, or one decoded token.
        The logits are those of each sequence's last new token or, with `all_rows`, of all new tokens.

        Raises:
            RequestError: a sequence has no new tokens, an id outside the vocabulary, or more tokens than the
                context.
            OutOfBlocks: the pools are full. None of these errors changes the session.
        """
        self._check_attention()
        for sequence, ids in work:
            self._check(sequence, ids)
        slots = self.manager.append([(sequence, len(ids)) for sequence, ids in work])
        self.cache.carry_out(self.manager.take_orders())
        lens, ends = [len(ids) for _, ids in work], [sequence.length for sequence, _ in work]
        step = self._step([sequence for sequence, _ in work], slots, lens, ends)
        ids = [token for _, tokens in work for token in tokens]
        wanted = range(len(ids)) if all_rows else [end - 1 for end in accumulate(lens)]
        logits = run_packed(self.weights, step, ids, positions_of(lens, ends), wanted)
        parts = logits.float().split(lens if all_rows else [1] * len(work))
        bad = [bool(part.any()) for part in step.bad_tokens.split(lens)]
        for (sequence, _), broken in zip(work, bad, strict=True):
            if broken:
                self.manager.scrub(sequence)
            else:
                self.manager.commit(sequence)
        self.cache.carry_out(self.manager.take_orders())
        return [StepResult(logits=x, finite=not broken) for x, broken in zip(parts, bad, strict=True)]

    def _check_attention(self) -> None:
        """Raise ModelError if the model's attention would not read this session's blocks."""
        name = self.weights.model.config._attn_implementation
        if name not in (PACKED_NAME, NAME):
            raise ModelError(
                f"the model was switched to attn_implementation={name!r}, which does not read kvq's blocks; "
                f"set it back: model.set_attn_implementation({PACKED_NAME!r})"
            )

    def _check(self, sequence: Sequence, ids: list[int]) -> None:
        vocab, limit = self.weights.geometry.vocab_size, self.weights.max_context
        if not ids:
            raise RequestError("no tokens were given; a step needs at least one per sequence")
        if min(ids) < 0 or max(ids) >= vocab:
            worst = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(
                f"token id {worst} is outside the vocabulary of 0 to {vocab - 1}; "
                f"if a tokenizer made it, it is not this model's"
            )
        if sequence.length + len(ids) > limit:
            raise RequestError(
                f"{sequence.length + len(ids)} tokens are more than this model's context of {limit}"
            )

    def _step(
        self, sequences: list[Sequence], slots: list[list[int]], lens: list[int], ends: list[int]
    ) -> PackedStep:
        device = self.weights.device
        states = self.cache.states
        moves = [sequence.move for sequence in sequences]
        return PackedStep(
            cache=self.cache,
            geometry=self.weights.geometry,
            batches=tuple(
                SequenceBatch.of([sequence.tables[group] for sequence in sequences], own, lens, ends, device)
                for group, own in enumerate(slots[: len(self.layout.attended)])
            ),
            states=None if states is None else StepStates(states, moves, device),
            bad_tokens=torch.zeros(sum(lens), dtype=torch.bool, device=device),
            window_limit=self.window_limit,
            observer=self.observer,
            shared=self.shared,
        )
