"""What the commands that size things have in common: models, weights, GPUs, and how models are spread."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq.commands.options import Finite
from kvq.errors import ConfigError
from kvq.sizing.pools import GPU_FRACTION

if TYPE_CHECKING:
    from kvq.capacity.plan.gpus import Gpu
    from kvq.capacity.plan.plan import Engine, Target
    from kvq.capacity.plan.roofline import Efficiency

_Command = TypeVar("_Command", bound=Callable[..., Any])


def sizing_options(command: _Command) -> _Command:
    """Add the options that the functions below read."""
    options = [
        click.option(
            "--weights",
            default="auto",
            show_default=True,
            help="fp32, bf16, fp16, fp8, int8, int4, int3 or nf4; auto: as config.json says, else bf16.",
        ),
        click.option(
            "--tensor-parallel", "-tp", default=1, show_default=True, help="GPUs that share each layer."
        ),
        click.option(
            "--pipeline-parallel", "-pp", default=1, show_default=True, help="GPUs that share the layers out."
        ),
        click.option(
            "--runtime-gb",
            default=0.6,
            show_default=True,
            type=Finite(min=0),
            help="Of the process on the GPU before it holds a tensor.",
        ),
        click.option(
            "--gpu-memory-utilization",
            default=GPU_FRACTION,
            show_default=True,
            type=Finite(0, 1, min_open=True),
            help="Share for KV of what the weights leave free, as of kvq serve.",
        ),
        click.option(
            "--block-size", type=click.IntRange(1, 4096), default=32, show_default=True, help="Tokens."
        ),
        click.option(
            "--gpus", "gpu_file", type=click.Path(path_type=Path), help="A file of GPUs instead of kvq's own."
        ),
        click.option(
            "--calibrate",
            type=click.Path(path_type=Path),
            help="Results of kvq bench engine on this GPU, for the efficiencies.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given_options(context: click.Context) -> set[str]:
    """Names of the options that somebody typed."""
    return {
        name
        for name in context.params
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }


def make_target(options: dict[str, Any]) -> "Target":
    """The model, as it is spread over GPUs."""
    from kvq.capacity.plan import planner
    from kvq.sizing.memory import Split

    given = options.get("weights_gb")
    if given is not None and not given > 0:
        raise ConfigError(f"--weights-gb must be above 0, got {given}")
    target = planner.make_target(
        _shape_or_folder(options["model"]),
        weights=options["weights"],
        weight_bytes=None if given is None else round(given * 1e9),
        split=Split(tensor=options["tensor_parallel"], pipeline=options["pipeline_parallel"]),
    )
    return replace(target, name=options["model"])


def _shape_or_folder(name: str) -> Path | str:
    """A model's name if its shape is known by it, else its folder: here, embedded, or from the hub."""
    from kvq.capacity.plan.known import known_models

    if name.lower() in known_models() or not (Path(name).exists() or "/" in name or name == "tiny"):
        return name
    from kvq.models.resolve import resolve_model

    return resolve_model(name, weights=False).folder


def make_engine(options: dict[str, Any], *, step_tokens: int) -> "Engine":
    """What of the engine's settings takes memory."""
    from kvq.capacity.plan.plan import Engine

    return Engine(
        block_size=options["block_size"],
        step_tokens=step_tokens,
        sequences=options["max_num_seqs"],
        max_context=options["max_model_len"],
        runtime_bytes=round(options["runtime_gb"] * 1e9),
        memory_fraction=options["gpu_memory_utilization"],
    )


def find_gpus(options: dict[str, Any]) -> "list[Gpu]":
    """Those that --gpu names."""
    from kvq.capacity.plan.gpus import find_gpu, read_gpus

    own = None if options["gpu_file"] is None else read_gpus(options["gpu_file"])
    return [find_gpu(name, own) for name in dict.fromkeys(map(str.strip, options["gpu"].split(",")))]


def find_efficiency(options: dict[str, Any], gpu: "Gpu", kv: str) -> "Efficiency | None":
    """What --calibrate has measured with a KV format; None without it."""
    from kvq.capacity.plan.calibration import read_efficiency

    return None if options["calibrate"] is None else read_efficiency(options["calibrate"], gpu, kv)
