"""What `kvq plan` and `kvq simulate` have in common: models, GPUs, engines, and where results go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.shared.names import GPUS, PLANNED_MODEL
from kvq.commands.shared.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    BLOCK_SIZES,
    FILE,
    Finite,
    Tokens,
    gathered,
    model_argument,
    option,
    path_option,
    picked,
)
from kvq.errors import ConfigError
from kvq.layout import BLOCK_SIZE
from kvq.sizing.pools import GPU_FRACTION

if TYPE_CHECKING:
    from kvq.capacity.plan.cost import Prices
    from kvq.capacity.plan.engine import Engine
    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.step_time import Efficiency
    from kvq.capacity.plan.target import Target
    from kvq.sizing.parameters import ModelShape

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OWN_GPUS = "A file of GPUs instead of kvq's own."


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingOptions:
    """A model on GPUs, and what of an engine's settings takes memory."""

    weights: str = option(
        "auto", "fp32, bf16, fp16, fp8, int8, int4, int3 or nf4; auto: as config.json says, else bf16."
    )
    tensor_parallel: int = option(1, "GPUs that share each layer.", names="--tensor-parallel -tp")
    pipeline_parallel: int = option(1, "GPUs that share the layers out.", names="--pipeline-parallel -pp")
    sequences: int | None = option(
        None,
        "Sequences side by side.  [default: to plan, as many as fit, which the server has to be told; "
        "to simulate, 256]",
        names="--max-num-seqs",
        type=AT_LEAST_1,
    )
    max_context: int | None = option(
        None,
        "Longest context that it takes, for which layer groups share memory.  [default: the model's]",
        names="--max-model-len",
        type=Tokens(min=2),
    )
    runtime_gb: float = option(0.6, "Of the process on the GPU before it holds a tensor.", type=AT_LEAST_0)
    memory_fraction: float = option(
        GPU_FRACTION,
        "Share for KV of what the weights leave free, as of kvq serve.",
        names="--gpu-memory-utilization",
        type=Finite(0, 1, min_open=True),
    )
    block_size: int = option(BLOCK_SIZE, "Tokens.", type=BLOCK_SIZES)
    gpu_file: Path | None = option(None, _OWN_GPUS, names="--gpus", type=FILE)
    calibrate: Path | None = option(
        None, "Results of kvq bench engine on this GPU, for the efficiencies.", type=FILE
    )
    json_path: str | None = path_option("--json", "Write the rows as JSON.")
    html_path: str | None = path_option("--html", "Write a report with plots.")
    model: str
    gpu: str | None

    def check_paths(self) -> None:
        """Raise ConfigError unless a report can be drawn, if one is asked for."""
        from kvq.extras import PLOTS, require

        if self.html_path is not None:
            require("--html", PLOTS)

    def gpus(self) -> "list[Gpu]":
        """Those that --gpu names."""
        if self.gpu is None:
            raise ConfigError(
                "users are counted, and loads served, on a GPU: give --gpu, one or several names of "
                "kvq gpus; kvq plan takes --verify instead"
            )
        from kvq.capacity.plan.gpus import find_gpu

        known = gpus_of(self.gpu_file)
        return [find_gpu(name, known) for name in dict.fromkeys(map(str.strip, self.gpu.split(",")))]

    def target(self, weights_gb: float | None = None) -> "Target":
        """The model, as it is spread over GPUs; `weights_gb` of all weights, instead of counting them."""
        from kvq.capacity.plan.target import make_target
        from kvq.sizing.memory import Split

        if weights_gb is not None and not weights_gb > 0:
            raise ConfigError(f"--weights-gb must be above 0, got {weights_gb}")
        model = _name_or_folder(self.model)
        target = make_target(
            model,
            shape=_observed(model, counted=weights_gb is None),
            weights=self.weights,
            weight_bytes=None if weights_gb is None else round(weights_gb * 1e9),
            split=Split(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel),
            max_context=self.max_context,
        )
        return replace(target, name=self.model)

    def engine(self, step_tokens: int, sequences: int | None = None) -> "Engine":
        """What of the engine's settings takes memory, at most `step_tokens` new tokens a step.

        `sequences`: side by side, where --max-num-seqs says nothing.
        """
        from kvq.capacity.plan.engine import Engine

        return Engine(
            step_tokens=step_tokens,
            sequences=self.sequences or sequences,
            runtime_bytes=round(self.runtime_gb * 1e9),
            **picked(self, "block_size", "max_context", "memory_fraction"),
        )

    def efficiency(self, gpu: "Gpu", kv: str) -> "Efficiency | None":
        """What --calibrate has measured with a KV format; None without it."""
        from kvq.capacity.plan.step_time import read_efficiency

        return None if self.calibrate is None else read_efficiency(self.calibrate, gpu, kv)


sizing_options = gathered(SizingOptions, "sizing")
gpu_file_option = click.option("--gpus", "gpu_file", type=FILE, help=_OWN_GPUS)


def target_options(command: _Command) -> _Command:
    """Add --model and --gpu; goes above `sizing_options`."""
    command = click.option(
        "--gpu", type=GPUS, help="Names of `kvq gpus`, with commas between; to simulate, one."
    )(command)
    what = "A name of `kvq models`, a folder, or a hub name; the same as MODEL."
    return model_argument(None, what, kind=PLANNED_MODEL)(command)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceOptions:
    """Of an API."""

    api_input: float | None = option(
        None, "$ a million tokens that an API takes for prompts.", type=AT_LEAST_0
    )
    api_output: float | None = option(None, "$ a million tokens that it takes for answers.", type=AT_LEAST_0)

    def prices(self) -> "Prices | None":
        """Both, or none."""
        from kvq.capacity.plan.cost import Prices

        if self.api_input is None and self.api_output is None:
            return None
        if self.api_input is None or self.api_output is None:
            raise ConfigError("an API has two prices: give --api-input and --api-output")
        return Prices(input=self.api_input, output=self.api_output)


def gpus_of(file: Path | None) -> "Mapping[str, Gpu]":
    """Those of a file, or those that kvq knows."""
    from kvq.capacity.plan.gpus import known_gpus, read_gpus

    return known_gpus() if file is None else read_gpus(file)


def _name_or_folder(name: str) -> Path | str:
    """A model's name if its shape is known by it, else its folder: here, embedded, or from the hub."""
    from kvq.capacity.plan.catalogue import is_known, known_models

    is_here = Path(name).exists()
    if name.lower() in known_models() or (is_known(name) and not is_here):
        return name
    from kvq.models.describe.resolve import EMBEDDED, resolve_model

    if not (is_here or "/" in name or name in EMBEDDED):
        return name  # that nobody knows

    return resolve_model(name, weights=False).folder


def _observed(model: Path | str, *, counted: bool) -> "ModelShape | None":
    """Of a folder whose config.json does not say the shape by itself; None where it does."""
    if isinstance(model, str):
        return None
    from kvq.capacity.plan.target import read_config
    from kvq.geometry.families import FAMILIES, SIZED
    from kvq.sizing.parameters import is_counted

    family = str(read_config(model).get("model_type", ""))
    if family in FAMILIES | SIZED and (is_counted(family) or not counted):
        return None
    from kvq.models.observe.counted import read_shape

    return read_shape(model)
