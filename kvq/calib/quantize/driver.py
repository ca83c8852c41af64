"""Going through a model layer by layer: look at inputs, quantize, let the next layers see the result."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvq.calib.quantize.layer import LayerQuantizer, LayerResult, Place, install
from kvq.calib.quantize.partial import Partial
from kvq.calib.quantize.settings import QuantizeSettings
from kvq.calib.quantize.targets import Targets
from kvq.calib.quantize.walk import Walk

Progress = Callable[[int, int], None]  # (layers done, layers in all)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The model to quantize, as transformers has loaded it."""

    model: Any
    folder: Path
    targets: Targets
    head_dims: tuple[int, ...]  # of V, layer by layer
    device: torch.device  # that computes; the model itself lies in main memory


def quantize_layers(
    source: Source,
    settings: QuantizeSettings,
    windows: list[list[int]],
    partial: Partial,
    progress: Progress = lambda done, total: None,
) -> None:
    """Quantize every layer into `partial`, going on after those that are finished there.

    With a method that needs data every layer runs twice over all samples: once for its inputs'
    statistics, once with quantized weights for the hidden states that the next layer sees. Layers
    that were finished before run the second time only, so what comes after them is bit for bit the
    same. Finished layers leave memory.

    Raises:
        RequestError: activations that are not finite; the message names the layer.
    """
    total = len(source.targets.layers)
    finished = partial.finished
    walk = Walk(source.model, windows, source.device) if settings.method.needs_text else None
    for index in range(total):
        progress(index, total)
        if index < finished and walk is None:
            continue
        layer = _Layer(source, settings, walk, index)
        result = partial.load(index) if index < finished else layer.quantized()
        if index >= finished:
            partial.save(index, result)
        if index + 1 < total:
            layer.pass_on(result)
        layer.leave()
    progress(total, total)


def results(partial: Partial, targets: Targets) -> Iterator[tuple[int, LayerResult]]:
    """The finished layers, one in memory at a time."""
    for index in range(len(targets.layers)):
        yield index, partial.load(index)


class _Layer:
    """One decoder layer while it is its turn."""

    def __init__(self, source: Source, settings: QuantizeSettings, walk: Walk | None, index: int) -> None:
        self.source, self.settings, self.walk, self.index = source, settings, walk, index
        self.module = source.model.get_submodule(f"{source.targets.prefix}.{index}")
        self.dtype = next(self.module.parameters()).dtype
        self.module.to(source.device, torch.float32)

    @torch.no_grad()
    def quantized(self) -> LayerResult:
        """Its codes."""
        began = time.perf_counter()
        index, walk, targets = self.index, self.walk, self.source.targets
        place = Place(
            layer=self.module,
            index=index,
            prefix=targets.full_name(index, ""),
            names=targets.layers[index],
            dtype=self.dtype,
            head_dim=self.source.head_dims[index],
        )
        run = (lambda: torch.empty(0)) if walk is None else (lambda: walk.probe(index))
        quantizer = LayerQuantizer(place, self.settings, run)
        if walk is not None:
            walk.see(index)
        result = quantizer.quantize()
        spent = time.perf_counter() - began - sum(row.seconds for row in result.rows)
        share = max(0.0, spent) / max(1, len(result.rows))
        result.rows = [replace(row, seconds=row.seconds + share) for row in result.rows]
        return result

    def pass_on(self, result: LayerResult) -> None:
        """Let the samples go through the layer as it is stored."""
        if self.walk is not None:
            weights = {name: weight.to(self.source.device) for name, weight in result.weights.items()}
            install(self.module, weights, result.parameters)
            self.walk.advance(self.index)

    def leave(self) -> None:
        """Free the layer's memory."""
        self.module.to("meta")
