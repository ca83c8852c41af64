"""How long a step of an engine takes, from what is in it.

Its parts run one after the other on a GPU: linear layers, which read the weights once or multiply for
every token, whatever takes longer; attention of decodes, which reads the KV of each; attention of
prefill, which multiplies; and what the engine does for every sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from kvq.capacity.plan.gpus import Gpu
from kvq.capacity.plan.roofline import Efficiency, Machine, expert_share
from kvq.capacity.plan.target import Target
from kvq.layout import KVLayout
from kvq.sizing.parameters import Parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """What the parts of a step take, in seconds; one entry of each tuple per layer group."""

    stage_s: Callable[[int], float]  # linear layers of one stage of a pipeline, for so many tokens
    stages: int = 1
    windows: tuple[int | None, ...]
    read_s: tuple[float, ...]  # of one token of KV that one decode sees
    pair_s: tuple[float, ...]  # of one token of a prefill and one token that it sees
    sequence_s: float = 0.0  # of a sequence that gets a token

    def linear_s(self, tokens: int) -> float:
        """Linear layers for so many tokens, of many sequences: stages have their shares in turn."""
        return self.stages * self.stage_s(-(-tokens // self.stages))

    def read(self, seen: Sequence[int]) -> float:
        """Attention of decodes that see so many tokens together, per layer group."""
        if len(seen) == 1:
            return self.read_s[0] * seen[0]
        return sum([each * tokens for each, tokens in zip(self.read_s, seen, strict=True)])

    def seen(self, lengths: Sequence[int]) -> list[int]:
        """Tokens that decodes of sequences of these lengths see together, per layer group."""
        full = sum(lengths)
        return [
            full if window is None else sum([min(length, window) for length in lengths])
            for window in self.windows
        ]

    def prompt_s(self, start: int, end: int) -> float:
        """Computing one sequence's tokens from `start` to `end`: stages of a pipeline wait for each other."""
        return self.stages * (self.stage_s(end - start) + self.prefill_attention(start, end))

    def prefill_attention(self, start: int, end: int) -> float:
        """Attention of a chunk: the tokens at positions `start` to `end` - 1."""
        return sum(
            [
                each * _pairs(start, end, window)
                for each, window in zip(self.pair_s, self.windows, strict=True)
            ]
        )


def _pairs(start: int, end: int, window: int | None) -> int:
    """Of tokens and those that they see, themselves included."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    within = _pairs(start, window, None) if start < window else 0
    return within + window * (end - max(start, window))


def roofline(target: Target, layout: KVLayout, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    """What data sheet and efficiencies allow a model whose parameters are known.

    `layout` is the fullest GPU's. Arithmetic counts in 16 bits, whatever the weights have. Of a pipeline
    each stage has its share of the sequences, in turn.
    """
    parameters, split = target.parameters, target.split
    assert parameters is not None, "without them a step's bytes and operations are not known"
    weight_bytes = sum(term.nbytes for term in target.terms())
    machine = Machine(bandwidth=gpu.bandwidth, flops=1e12 * gpu.tflops["fp16"], efficiency=efficiency)
    active = parameters.active / split.gpus

    @cache
    def stage_s(tokens: int) -> float:
        nbytes = weight_bytes * read_share(parameters, tokens)
        return machine.linear_s(nbytes, 2 * active * tokens, tokens=tokens)

    groups = layout.groups
    q_heads = target.geometry.q_heads / split.tensor
    return StepTime(
        stage_s=stage_s,
        stages=split.pipeline,
        windows=tuple(group.group.window for group in groups),
        read_s=tuple(machine.read_s(group.block_bytes / layout.block_size) for group in groups),
        pair_s=tuple(
            machine.attention_s(
                2 * q_heads * sum(one.geometry.k_head_dim + one.geometry.v_head_dim for one in group.layers)
            )
            for group in groups
        ),
        sequence_s=efficiency.sequence_s,
    )


def read_share(parameters: Parameters, tokens: int) -> float:
    """Of the weights, what a step of so many tokens reads: looked-up rows and idle experts are left out."""
    read: float = parameters.total
    if parameters.head:
        read -= parameters.embedding
    if parameters.experts:
        chosen = parameters.active_experts / parameters.experts
        read -= parameters.experts * (1 - expert_share(1, chosen, tokens))
    return read / parameters.total
