"""Quantizing one decoder layer, given what its inputs look like."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kvq.calib.quantize.settings import Method, QuantizeSettings
from kvq.formats.weights import Inputs
from kvq.kernels import QuantizedWeight
from kvq.kernels.linear.inputs import rounded_inputs
from kvq.weights.awq import ChannelScales, awq_scales
from kvq.weights.clipping import clip_weight
from kvq.weights.folding import Fold, Folds, apply_fold, find_folds, is_same, trace_inputs, undoing
from kvq.weights.gptq import gptq
from kvq.weights.rounding import round_weight
from kvq.weights.smoothquant import ALPHAS, smooth_scales
from kvq.weights.statistics import InputStatistics

_ROWS = 512  # tokens kept where the rounding of inputs has to be seen


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReport:
    """What quantizing did to one Linear layer. Fields are the JSON keys of `kvq quantize --json`."""

    layer: int
    module: str  # its name in the model
    method: str
    format: str
    in_features: int
    out_features: int
    relative_error: float  # |(W - Q) X| / |W X| over the calibration tokens; without data |W - Q| / |W|
    error_of: str  # "outputs" or "weights"
    bytes_before: int
    bytes_after: int
    alpha: float | None  # of the scales on its inputs; None: it has none
    seconds: float


@dataclass(kw_only=True, slots=True)
class LayerResult:
    """One decoder layer, quantized; names are those inside it."""

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # that scales were folded into
    rows: list[ModuleReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # Linear layer -> why its inputs are not scaled


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """One decoder layer in fp32, and where it stands in the model."""

    layer: nn.Module
    index: int
    prefix: str  # of its own name in the model, dot included
    names: tuple[str, ...]  # of the Linear layers to quantize, inside it
    dtype: torch.dtype  # of the checkpoint's weights
    head_dim: int  # of V

    def linear(self, name: str) -> nn.Linear:
        """One of its Linear layers."""
        return _linear(self.layer, name)


class LayerQuantizer:
    """One decoder layer on its way to codes."""

    def __init__(self, place: Place, settings: QuantizeSettings, run: Callable[[], Tensor]) -> None:
        """`run` computes the layer's output on a few tokens."""
        self.place, self.settings, self.run = place, settings, run
        self.layer, self.names, self.dtype = place.layer, place.names, place.dtype
        self.folds = self._folds()
        self.alphas: dict[str, float] = {}
        self.statistics: dict[str, InputStatistics] = {}
        self._handles = [hook for group in self.folds.shared for hook in self._listen(group.names)]

    def quantize(self) -> LayerResult:
        """Codes for every chosen Linear layer; the layer itself computes with them from now on."""
        for handle in self._handles:
            handle.remove()
        result = LayerResult(skipped=dict(self.folds.skipped))
        original = {name: self.place.linear(name).weight.detach().clone() for name in self.names}
        before = {name: p.detach().clone() for name, p in self.layer.named_parameters()}
        for fold in self.folds.folds:
            if not self._fold(fold):
                result.skipped |= dict.fromkeys(fold.names, "scales changed the layer's output; left out")
        for name in self.names:
            began = time.perf_counter()
            weight = self._codes(name)
            result.weights[name] = weight
            result.rows.append(self._row(name, weight, original[name], time.perf_counter() - began))
        quantized = {f"{name}.weight" for name in self.names}
        result.parameters = {
            name: p.detach().to(self.dtype).cpu()
            for name, p in self.layer.named_parameters()
            if name not in quantized and not torch.equal(p, before[name])
        }
        return result

    def _folds(self) -> Folds:
        if not self.settings.method.needs_text:
            return Folds()
        if self.settings.method.folds:
            return find_folds(self.layer, self.run, head_dim=self.place.head_dim)
        return Folds(shared=trace_inputs(self.layer, self.run))

    def _listen(self, names: tuple[str, ...]) -> list[torch.utils.hooks.RemovableHandle]:
        """Collect statistics of the inputs that these layers share."""
        chosen = [name for name in names if name in self.names]
        if not chosen:
            return []
        first = self.place.linear(chosen[0])
        rows = _ROWS if self.settings.method is Method.SMOOTHQUANT else 0
        full = self.place.prefix + chosen[0]
        found = InputStatistics(full, first.in_features, first.weight.device, rows=rows)
        self.statistics |= dict.fromkeys(chosen, found)
        return [first.register_forward_pre_hook(lambda _, args: found.add(args[0]))]

    def _fold(self, fold: Fold) -> bool:
        """Choose scales, fold them, prove it; undone and False if outputs change."""
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
        weights = [self.place.linear(name).weight.detach() for name in fold.names if name in self.names]
        found = next(self.statistics[name] for name in fold.names if name in self.statistics)
        fmt, dtype, alpha = self.settings.fmt, self.dtype, self.settings.alpha
        if self.settings.method is Method.AWQ:
            return awq_scales(weights, found, fmt, dtype, tied=fold.tied)
        alphas = ALPHAS if alpha is None else (alpha,)
        return smooth_scales(weights, found, fmt, dtype, alphas=alphas, tied=fold.tied)

    def _codes(self, name: str) -> QuantizedWeight:
        settings, weight = self.settings, self.place.linear(name).weight.detach()
        full = self.place.prefix + name
        if settings.method is Method.GPTQ:
            gram = self.statistics[name].gram
            return gptq(weight, gram, settings.fmt, options=settings.gptq, dtype=self.dtype, name=full)
        if settings.method is Method.AWQ:
            return clip_weight(weight, settings.fmt, self.dtype, self.statistics[name].gram)
        return round_weight(weight, settings.fmt, dtype=self.dtype)

    def _row(self, name: str, weight: QuantizedWeight, original: Tensor, seconds: float) -> ModuleReport:
        found = self.statistics.get(name)
        wanted, stored = self.place.linear(name).weight.detach(), weight.dequantize().float()
        if found is None:
            error = float((stored - wanted).norm() / wanted.norm().clamp_min(1e-30))
        else:
            error = found.relative_error(wanted, stored)
        return ModuleReport(
            layer=self.place.index,
            module=self.place.prefix + name,
            method=self.settings.method.value,
            format=weight.fmt.name,
            in_features=weight.in_features,
            out_features=weight.out_features,
            relative_error=error,
            error_of="weights" if found is None else "outputs",
            bytes_before=original.numel() * self.dtype.itemsize,
            bytes_after=_packed_bytes(weight),
            alpha=self.alphas.get(name),
            seconds=seconds,
        )


@torch.no_grad()
def install(layer: nn.Module, weights: dict[str, QuantizedWeight], parameters: dict[str, Tensor]) -> None:
    """Let a layer compute with quantized weights, and inputs rounded as their formats ask."""
    for name, value in parameters.items():
        layer.get_parameter(name).copy_(value)
    for name, weight in weights.items():
        linear = _linear(layer, name)
        linear.weight.copy_(weight.dequantize())
        if weight.fmt.inputs is not Inputs.FULL:
            linear.register_forward_pre_hook(_rounding(weight.fmt.inputs))


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear), f"{name} was chosen as a Linear layer"
    return linear


def _rounding(inputs: Inputs) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    return lambda _, args: rounded_inputs(args[0], inputs)


def _packed_bytes(weight: QuantizedWeight) -> int:
    """Bytes in a file: 3-bit codes take 3 bits there."""
    codes = weight.in_features * weight.out_features * weight.fmt.code.bits // 8
    return codes + sum(x.nbytes for x in (weight.scale, weight.zero, weight.order) if x is not None)
