"""Quantization of one decoder layer, from statistics of its inputs."""

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kvq.calib.quantize.settings import QuantizeSettings
from kvq.calib.quantize.targets import Targets
from kvq.calib.quantize.walk import Walk
from kvq.formats.weights import Inputs
from kvq.kernels import QuantizedWeight
from kvq.kernels.linear.reference import rounded_inputs
from kvq.weights import UnstackedExperts
from kvq.weights.channel_scales import ALPHAS, ChannelScales, awq_scales, smooth_scales
from kvq.weights.folding import Fold, Run, apply_fold, find_folds, is_same, trace_inputs, undoing
from kvq.weights.gptq import gptq
from kvq.weights.linear import linear_at
from kvq.weights.rounding import clip_weight, round_weight
from kvq.weights.statistics import InputStatistics

_ROWS = 512  # tokens kept for methods that measure the rounding of inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReport:
    """Report on one quantized Linear layer. The fields are the JSON keys of `kvq quantize --json`."""

    layer: int
    module: str  # name in the model
    method: str
    format: str
    in_features: int
    out_features: int
    relative_error: float  # |(W - Q) X| / |W X| over the calibration tokens; without data, |W - Q| / |W|
    error_of: str  # "outputs" or "weights"
    bytes_before: int
    bytes_after: int
    alpha: float | None  # of the input scales; None: not scaled
    seconds: float


@dataclass(kw_only=True, slots=True)
class LayerResult:
    """One quantized decoder layer; names are relative to the layer."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # changed by folded scales
    rows: list[ModuleReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # Linear layer -> why its inputs are not scaled


class LayerQuantizer:
    """Quantizer of one decoder layer, which must be in fp32."""

    def __init__(self, targets: Targets, settings: QuantizeSettings, index: int, head_dim: int) -> None:
        """`head_dim`: V's head dimension. Call `quantize` once the layer is in fp32."""
        self.settings, self.index = settings, index
        self.layer, self.names = targets.layer(index), targets.layers[index]
        self.dtype = next(self.layer.parameters()).dtype  # the checkpoint's
        self.prefix, self.head_dim = targets.full_name(index, ""), head_dim
        self.run: Run = lambda: torch.empty(0, dtype=torch.float32)
        self.folds: list[Fold] = []
        self.skipped: dict[str, str] = {}
        self.alphas: dict[str, float] = {}
        self.statistics: dict[str, InputStatistics] = {}

    @torch.no_grad()
    def quantize(self, walk: Walk | None) -> LayerResult:
        """Quantize every target Linear layer; return the codes and any parameters changed by folded scales.

        `walk`: pass of the samples, for methods that need data.
        """
        began = time.perf_counter()
        if walk is not None:
            self.run = lambda: walk.probe(self.index)
            self._look(walk)
        result = LayerResult(skipped=self.skipped)
        before = {name: p.detach().clone() for name, p in self.layer.named_parameters()}
        for fold in self.folds:
            if not self._fold(fold):
                result.skipped |= dict.fromkeys(fold.names, "scales changed the layer's output; left out")
        spent_s = {}
        for name in self.names:
            at = time.perf_counter()
            result.weights[name] = self._codes(name)
            spent_s[name] = time.perf_counter() - at
            result.rows.append(self._row(name, result.weights[name]))
        quantized = {f"{name}.weight" for name in self.names}
        result.parameters = {
            name: p.detach().to(self.dtype).cpu()
            for name, p in self.layer.named_parameters()
            if name not in quantized and not torch.equal(p, before[name])
        }
        shared_s = (time.perf_counter() - began - sum(spent_s.values())) / max(1, len(self.names))
        result.rows = [
            replace(row, seconds=spent_s[name] + shared_s)
            for name, row in zip(self.names, result.rows, strict=True)
        ]
        return result

    def _look(self, walk: Walk) -> None:
        """Find shared inputs and folds, and collect input statistics."""
        shared = trace_inputs(self.layer, self.run)
        if self.settings.folds:
            self.folds, self.skipped = find_folds(self.layer, self.run, shared, head_dim=self.head_dim)
        experts = {
            tuple(f"{name}.{own}" for own in names)
            for name, module in self.layer.named_modules()
            if isinstance(module, UnstackedExperts)
            for names in module.shared_inputs()
        }
        own = {name for names in experts for name in names}  # most of their shared inputs can't be traced
        groups = [*(names for names, _ in shared if own.isdisjoint(names)), *sorted(experts)]
        handles = [hook for names in groups for hook in self._listen(names)]
        walk.see(self.index)
        for handle in handles:
            handle.remove()

    def _listen(self, names: tuple[str, ...]) -> list[torch.utils.hooks.RemovableHandle]:
        """Register hooks that collect statistics of the input shared by these layers."""
        chosen = [name for name in names if name in self.names]
        if not chosen:
            return []
        first = linear_at(self.layer, chosen[0])
        rows = _ROWS if self.settings.method == "smoothquant" else 0
        full = self.prefix + chosen[0]
        found = InputStatistics(full, first.in_features, first.weight.device, rows=rows)
        self.statistics |= dict.fromkeys(chosen, found)
        return [first.register_forward_pre_hook(lambda _, args: found.add(args[0]))]

    def _fold(self, fold: Fold) -> bool:
        """Choose and fold scales. If this changes the layer's outputs, undo the fold and return False."""
        if not any(name in self.statistics for name in fold.names):
            return False
        chosen = self._scales(fold)
        if bool((chosen.scale == 1).all()):
            self.alphas |= dict.fromkeys(fold.names, 0.0)
            return True
        undo, before = undoing(self.layer, fold), self.run()
        scale = apply_fold(self.layer, fold, chosen.scale, self.dtype)
        if not is_same(self.run(), before):
            undo()
            return False
        self.statistics[next(name for name in fold.names if name in self.statistics)].divide(scale)
        self.alphas |= dict.fromkeys(fold.names, chosen.alpha)
        return True

    def _scales(self, fold: Fold) -> ChannelScales:
        weights = [linear_at(self.layer, name).weight.detach() for name in fold.names if name in self.names]
        found = next(self.statistics[name] for name in fold.names if name in self.statistics)
        fmt, dtype, alpha = self.settings.fmt, self.dtype, self.settings.alpha
        if self.settings.method == "awq":
            return awq_scales(weights, found, fmt, dtype, tied=fold.tied)
        alphas = ALPHAS if alpha is None else (alpha,)
        return smooth_scales(weights, found, fmt, dtype, alphas=alphas, tied=fold.tied)

    def _codes(self, name: str) -> QuantizedWeight:
        settings, weight = self.settings, linear_at(self.layer, name).weight.detach()
        full, seen = self.prefix + name, self._seen(name)
        if settings.method == "gptq" and seen is not None:
            return gptq(weight, seen.gram, settings.fmt, options=settings.gptq, dtype=self.dtype, name=full)
        if settings.method == "awq" and seen is not None:
            return clip_weight(weight, settings.fmt, self.dtype, seen.gram)
        return round_weight(weight, settings.fmt, dtype=self.dtype)

    def _seen(self, name: str) -> InputStatistics | None:
        """Return a Linear layer's input statistics; None if there is no text or no token chose its expert."""
        found = self.statistics.get(name)
        return found if found is not None and found.tokens else None

    def _row(self, name: str, weight: QuantizedWeight) -> ModuleReport:
        found = self._seen(name)
        wanted, stored = linear_at(self.layer, name).weight.detach(), weight.dequantize().float()
        if found is None:
            error = float((stored - wanted).norm() / wanted.norm().clamp_min(1e-30))
        else:
            error = found.relative_error(wanted, stored)
        return ModuleReport(
            layer=self.index,
            module=self.prefix + name,
            method=self.settings.method,
            format=weight.fmt.name,
            in_features=weight.in_features,
            out_features=weight.out_features,
            relative_error=error,
            error_of="weights" if found is None else "outputs",
            bytes_before=wanted.numel() * self.dtype.itemsize,
            bytes_after=_packed_bytes(weight),
            alpha=self.alphas.get(name),
            seconds=0.0,  # set after the layer is done
        )


@torch.no_grad()
def install(layer: nn.Module, result: LayerResult, device: torch.device) -> None:
    """Make a layer compute with its quantized weights, and with rounded inputs if the formats require it."""
    for name, value in result.parameters.items():
        layer.get_parameter(name).copy_(value)
    for name, weight in result.weights.items():
        linear = linear_at(layer, name)
        linear.weight.copy_(weight.to(device).dequantize())
        if weight.fmt.inputs is not Inputs.FULL:
            linear.register_forward_pre_hook(
                lambda _, args, kind=weight.fmt.inputs: rounded_inputs(args[0], kind)
            )


def _packed_bytes(weight: QuantizedWeight) -> int:
    """Return a weight's size in bytes in a file, where 3-bit codes occupy 3 bits."""
    codes = weight.in_features * weight.out_features * weight.fmt.code.bits // 8
    return codes + sum(x.nbytes for x in (weight.scale, weight.zero, weight.order) if x is not None)
