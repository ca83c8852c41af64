"""Roofline model of step times, from bytes and operations, a GPU's data sheet, and efficiencies.

Linear layers take the time to read the weights once or to multiply for every token, whichever is longer
(Williams et al., 2009, "Roofline"). Decode attention takes the time to read the KV, and prefill attention the
time to multiply; the engine adds some time per sequence. Efficiencies are assumed or benchmarked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.capacity.plan.gpus import Gpu, check_share
from kvq.capacity.plan.target import Target
from kvq.errors import ConfigError
from kvq.layout import KVLayout, Role
from kvq.sizing.parameters import Parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:  # D280: until measured, 0.8 of bandwidth and 0.7 of a step are assumed
    """Shares of a GPU's data sheet figures that an engine reaches, either assumed or benchmarked.

    `measured`: (tokens, share of the roofline) for the linear layers of steps, in ascending order of tokens.
    For linear layers, these points replace the assumed shares of bandwidth and arithmetic.
    """

    bandwidth: float = 0.8  # share of the data sheet's figure, in kernels that read weights or KV
    step: float = 0.7  # share of a step's time in such kernels
    arithmetic: float = 0.5  # share of the dense peak, in prefill
    measured: tuple[tuple[int, float], ...] = ()
    kv: float | None = None  # share of the bandwidth when decode steps read KV; None: as for weights
    attention: float | None = None  # share of the dense peak in prefill attention; None: as in linear layers
    sequence_s: float = 0.0  # additional time per sequence that gets a token

    def __post_init__(self) -> None:
        for name in ("bandwidth", "step", "arithmetic", "kv", "attention"):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name))
        for tokens, share in self.measured:
            check_share(f"the efficiency of {tokens} tokens", share)
        if not 0 <= self.sequence_s < 60:
            raise ConfigError(f"seconds a sequence must be 0 to 60, got {self.sequence_s}")

    def linear_s(self, gpu: Gpu, weight_bytes: float, flops: float, *, tokens: int) -> float:
        """Return the seconds that linear layers take for `tokens` tokens, from bytes and operations."""
        if self.measured:
            return self._measured_s(gpu, weight_bytes, flops / tokens, tokens)
        read = weight_bytes / (gpu.bandwidth * self.bandwidth * self.step)
        return max(read, flops / (gpu.flops * self.arithmetic))

    def _measured_s(self, gpu: Gpu, weight_bytes: float, token_flops: float, tokens: int) -> float:
        """Interpolate between measured points; beyond them, use the nearest point's efficiency."""

        def at(number: int, share: float) -> float:
            return max(weight_bytes / gpu.bandwidth, token_flops * number / gpu.flops) / share

        before, *rest = self.measured
        if tokens <= before[0]:
            return at(tokens, before[1])
        for after in rest:
            if tokens <= after[0]:
                way = (tokens - before[0]) / (after[0] - before[0])
                return at(*before) + way * (at(*after) - at(*before))
            before = after
        return at(tokens, before[1])

    def read_s(self, gpu: Gpu, kv_bytes: float) -> float:
        """Return the seconds that it takes to read `kv_bytes` bytes of KV."""
        return kv_bytes / (gpu.bandwidth * (self.bandwidth * self.step if self.kv is None else self.kv))

    def attention_s(self, gpu: Gpu, flops: float) -> float:
        """Return the seconds that `flops` operations of prefill attention take."""
        return flops / (gpu.flops * (self.arithmetic if self.attention is None else self.attention))


def expert_share(experts: float, chosen: float, tokens: int) -> float:
    """Return the share of routed experts that `tokens` tokens use, if experts are chosen uniformly."""
    return 1 - (1 - chosen / experts) ** tokens if experts else 0.0


_KEYS = {"linear", "read_s", "pair_s", "sequence_s", "weight_bytes", "token_flops", "kv_bytes", "pair_flops"}


def read_efficiency(path: Path, gpu: Gpu, kv: str) -> Efficiency:
    """Read the efficiency for a KV format from the results of `kvq bench engine --json`.

    Raises:
        ConfigError: the file or the format is missing, or the measurements do not fit the data sheet.
    """
    try:
        data = strict_json.read(path)
        rows = data["rows"]
        costs = {row["kv"]: row["step_costs"] for row in rows if row.get("step_costs")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no results of kvq bench engine: {error!r}") from error
    if kv not in costs:
        known = ", ".join(costs) or "none"
        raise ConfigError(f"{path} has no costs of steps with KV in {kv}, only of {known}")
    if not isinstance(costs[kv], Mapping) or set(costs[kv]) != _KEYS or not costs[kv]["linear"]:
        raise ConfigError(f"{path}: the costs of steps must have {', '.join(sorted(_KEYS))}")
    return efficiency(costs[kv], gpu, source=str(path))


def efficiency(costs: Mapping[str, Any], gpu: Gpu, *, source: str) -> Efficiency:
    """Return the shares of a GPU's data sheet figures that measured step costs reach.

    `costs` contains the seconds that linear layers take for steps of various sizes (`linear`, [tokens, s]
    each), the seconds per token of KV read in decodes, per pair of tokens in prefill attention, and per
    sequence; and the bytes and operations of each part.
    """

    def ideal(tokens: int) -> float:
        return float(max(costs["weight_bytes"] / gpu.bandwidth, costs["token_flops"] * tokens / gpu.flops))

    try:
        return Efficiency(
            measured=tuple((int(tokens), ideal(tokens) / seconds) for tokens, seconds in costs["linear"]),
            kv=_share(costs["kv_bytes"] / gpu.bandwidth, costs["read_s"]),
            attention=_share(costs["pair_flops"] / gpu.flops, costs["pair_s"]),
            sequence_s=costs["sequence_s"],
        )
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{source} does not fit the data sheet of {gpu.name}: {error}") from error


def _share(ideal_s: float, measured_s: float) -> float:
    """Return the share, clamped to 1 because a small part of a step may be measured as impossibly fast."""
    return min(1.0, ideal_s / measured_s) if measured_s else 1.0


@dataclass(frozen=True, kw_only=True)
class StepTime:  # D281: parts are additive, because kernels run one after another
    """Seconds that the parts of a step take; tuples have one entry per layer group."""

    stage_s: Callable[[int], float]  # linear layers of one pipeline stage, for a number of tokens
    stages: int = 1
    windows: tuple[int | None, ...]
    limits: tuple[int | None, ...] = ()  # maximum tokens per sequence; empty: no limits
    lag: int = 0  # number of tokens before a full block can be shared
    state_group: int | None = None  # the layer group of recurrent states
    read_s: tuple[float, ...]  # per token of KV that a decode sees
    pair_s: tuple[float, ...]  # per pair of a prefill token and a token that it sees
    sequence_s: float = 0.0  # per sequence that gets a token

    def linear_s(self, tokens: int) -> float:
        """Return the time of the linear layers for `tokens` tokens split evenly over the pipeline stages."""
        return self.stages * self.stage_s(-(-tokens // self.stages))

    def read(self, seen: Sequence[int]) -> float:
        """Return the seconds of decode attention that sees `seen` tokens in total, per layer group."""
        if len(seen) == 1:
            return self.read_s[0] * seen[0]
        return sum([each * tokens for each, tokens in zip(self.read_s, seen, strict=True)])

    def seen(self, lengths: Sequence[int]) -> list[int]:
        """Return the total number of tokens seen by decodes at these lengths, per layer group."""
        full = sum(lengths)
        return [
            full if most is None else sum([min(length, most) for length in lengths]) for most in self._most
        ]

    def decode_s(self, lengths: Sequence[int]) -> float:
        """Return the duration in seconds of a step that decodes sequences of these lengths."""
        each_s = self.sequence_s * len(lengths)
        return self.linear_s(len(lengths)) + self.read(self.seen(lengths)) + each_s

    @cached_property
    def _most(self) -> list[int | None]:
        """Maximum number of tokens that a decode sees, per layer group."""
        limits = self.limits or (None,) * len(self.windows)
        return [window or limit for window, limit in zip(self.windows, limits, strict=True)]

    def prompt_s(self, start: int, end: int) -> float:
        """Return the seconds that tokens `start` to `end` of a prompt take in all pipeline stages in turn."""
        return self.stages * (self.stage_s(end - start) + self.prefill_attention(start, end))

    def prefill_attention(self, start: int, end: int) -> float:
        """Return the seconds that attention takes for a chunk with positions `start` to `end` - 1."""
        return sum(
            [each * _pairs(start, end, window) for each, window in zip(self.pair_s, self._most, strict=True)]
        )


def _pairs(start: int, end: int, window: int | None) -> int:
    """Count the pairs of a query token and a key token visible to it, including itself."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    within = _pairs(start, window, None) if start < window else 0
    return within + window * (end - max(start, window))


def roofline(target: Target, layout: KVLayout, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    """Return the step times of a model with known parameter counts, from the data sheet and efficiencies.

    `layout` is the KV layout of the fullest GPU. Arithmetic is in 16 bits, regardless of the weight format.
    In a pipeline, each stage processes one share of the sequences at a time.
    """
    parameters, split = target.parameters, target.split
    assert parameters is not None, "without them a step's bytes and operations are not known"
    weight_bytes = sum(term.nbytes for term in target.terms())
    active = parameters.active / split.gpus

    @cache
    def stage_s(tokens: int) -> float:
        nbytes = weight_bytes * read_share(parameters, tokens)
        return efficiency.linear_s(gpu, nbytes, 2 * active * tokens, tokens=tokens)

    groups = layout.groups
    q_heads = target.geometry.q_heads / split.tensor
    of_layers = [[one.geometry for one in group.layers] for group in groups]
    head_dims = [sum(layer.k_head_dim + layer.v_head_dim for layer in layers) for layers in of_layers]
    return StepTime(
        stage_s=stage_s,
        stages=split.pipeline,
        windows=tuple(layout.holding["windows"]),
        limits=tuple(layout.holding["limits"]),
        lag=layout.holding["lag"],
        state_group=layout.holding["state_group"],
        read_s=tuple(
            # Per token that a decode sees; with recurrent states, it sees the previous state and its own
            efficiency.read_s(gpu, group.block_bytes / (1 if group.role is Role.STATES else group.block_size))
            for group in groups
        ),
        pair_s=tuple(efficiency.attention_s(gpu, 2 * q_heads * dims) for dims in head_dims),
        sequence_s=efficiency.sequence_s,
    )


def read_share(parameters: Parameters, tokens: int) -> float:
    """Return the share of weights read by a step of `tokens` tokens: all except tables and idle experts."""
    read: float = parameters.total - parameters.tables
    if parameters.head:
        read -= parameters.embedding
    if parameters.experts:
        chosen = parameters.active_experts / parameters.experts
        read -= parameters.experts * (1 - expert_share(1, chosen, tokens))
    return read / parameters.total
