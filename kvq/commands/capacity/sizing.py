"""Options shared by `kvq plan` and `kvq simulate`: models, GPUs, engines, and paths of results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.capacity.plan.catalogue import is_known, known_models
from kvq.capacity.plan.gpus import Gpu, Prices, find_gpu, known_gpus, read_gpus
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.step_time import Efficiency, read_efficiency
from kvq.capacity.plan.target import Target, make_target, read_config
from kvq.commands.shared.declare import gathered, option, path_option, picked
from kvq.commands.shared.options import model_argument
from kvq.commands.shared.param_types import (
    AT_LEAST_0,
    AT_LEAST_1,
    BLOCK_SIZES,
    FILE,
    GPUS,
    PLANNED_MODEL,
    SHARE,
    SIZE,
    TOKENS,
    Finite,
    TokenCount,
)
from kvq.errors import ConfigError
from kvq.extras import PLOTS, require
from kvq.geometry.families import FAMILIES, SIZED
from kvq.layout import BLOCK_SIZE
from kvq.sizing.memory import Split
from kvq.sizing.parameters import ModelShape, is_counted
from kvq.sizing.pools import GPU_FRACTION

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OWN_GPUS = "File of GPUs instead of kvq's own list."


@dataclass(frozen=True, kw_only=True, slots=True)
class SizingOptions:
    """Options for a model on GPUs, and for engine settings that affect memory."""

    weights: str = option(
        "auto", "fp32, bf16, fp16, fp8, int8, int4, int3 or nf4; auto: as config.json says, else bf16."
    )
    tensor_parallel: int = option(1, "GPUs that split each layer.", names="--tensor-parallel -tp")
    pipeline_parallel: int = option(1, "GPUs that divide the layers.", names="--pipeline-parallel -pp")
    sequences: int | None = option(
        None,
        "Most sequences at a time.  [default: plan: as many as fit, which is then an option of the server; "
        "simulate: 256]",
        names="--max-num-seqs",
        type=AT_LEAST_1,
    )
    max_context: int | None = option(
        None,
        "Longest context of a request; layer groups divide memory for it.  [default: the model's]",
        names="--max-model-len",
        type=TokenCount(min=2),
    )
    runtime_gb: float = option(0.6, "GB of the process on the GPU before it holds a tensor.", type=AT_LEAST_0)
    memory_fraction: float = option(
        GPU_FRACTION,
        "Share for KV of the memory that weights leave free, as for kvq serve.",
        names="--gpu-memory-utilization",
        type=SHARE,
    )
    block_size: int = option(BLOCK_SIZE, "Tokens per block.", type=BLOCK_SIZES)
    gpu_file: Path | None = option(None, _OWN_GPUS, names="--gpus", type=FILE)
    calibrate: Path | None = option(None, "Results of kvq bench engine, for efficiency.", type=FILE)
    json_path: str | None = path_option("--json", "Write the rows as JSON.")
    html_path: str | None = path_option("--html", "Write a report with plots.")
    model: str
    gpu: str | None

    def check_paths(self) -> None:
        """Raise ConfigError if --html is given but the packages that draw plots are missing."""
        if self.html_path is not None:
            require("--html", PLOTS)

    def gpus(self) -> list[Gpu]:
        """Return the GPUs named by --gpu."""
        if self.gpu is None:
            raise ConfigError(
                "a GPU is needed: give --gpu, one or several names of kvq gpus; on this machine, kvq plan "
                "--verify counts without one"
            )
        known = gpus_of(self.gpu_file)
        return [find_gpu(name, known) for name in dict.fromkeys(map(str.strip, self.gpu.split(",")))]

    def target(self, weights_gb: float | None = None) -> Target:
        """Return the model split over GPUs. `weights_gb`: size of the weights, or None to calculate it."""
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

    def engine(self, step_tokens: int, sequences: int | None = None) -> Engine:
        """Return the engine settings that affect memory, for at most `step_tokens` new tokens per step.

        `sequences`: maximum number of concurrent sequences if --max-num-seqs is not given.
        """
        return Engine(
            step_tokens=step_tokens,
            sequences=self.sequences or sequences,
            runtime_bytes=round(self.runtime_gb * 1e9),
            **picked(self, "block_size", "max_context", "memory_fraction"),
        )

    def efficiency(self, gpu: Gpu, kv: str) -> Efficiency | None:
        """Return the efficiency for a KV format from the --calibrate file, or None without --calibrate."""
        return None if self.calibrate is None else read_efficiency(self.calibrate, gpu, kv)


sizing_options = gathered(SizingOptions, "sizing")
gpu_file_option = click.option("--gpus", "gpu_file", type=FILE, help=_OWN_GPUS)


def target_options(command: _Command) -> _Command:
    """Decorate a command with --model and --gpu; place this decorator above `sizing_options`."""
    command = click.option(
        "--gpu", type=GPUS, help="Names of `kvq gpus`, with commas between; to simulate, one."
    )(command)
    what = "A name of `kvq models`, a folder, a GGUF file, or a hub name; the same as MODEL."
    return model_argument(None, what, kind=PLANNED_MODEL)(command)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceOptions:
    """Options for the prices of an API."""

    api_input: float | None = option(None, "$ a million prompt tokens at an API.", type=AT_LEAST_0)
    api_output: float | None = option(None, "$ a million output tokens at an API.", type=AT_LEAST_0)

    def prices(self) -> Prices | None:
        """Return both prices, or None if neither is given."""
        if self.api_input is None and self.api_output is None:
            return None
        if self.api_input is None or self.api_output is None:
            raise ConfigError("an API has two prices: give --api-input and --api-output")
        return Prices(input=self.api_input, output=self.api_output)


def gpus_of(file: Path | None) -> Mapping[str, Gpu]:
    """Return the GPU specifications in `file`, or the built-in ones if it is None."""
    return known_gpus() if file is None else read_gpus(file)


def _name_or_folder(name: str) -> Path | str:
    """Return the name of a catalogue model, or a folder for any other: local, embedded or from the hub."""
    is_here = Path(name).exists()
    if name.lower() in known_models() or (is_known(name) and not is_here):
        return name
    from kvq.models.describe.resolve import EMBEDDED, resolve_model

    if not (is_here or "/" in name or name in EMBEDDED):
        return name  # rejected later, with the name in the message

    return resolve_model(name, weights=False).folder


def _observed(model: Path | str, *, counted: bool) -> ModelShape | None:
    """Return the observed shape of a model folder, or None if its config.json determines the shape."""
    if isinstance(model, str):
        return None

    family = str(read_config(model).get("model_type", ""))
    if family in FAMILIES | SIZED and (is_counted(family) or not counted):
        return None
    from kvq.models.observe.counted import read_shape

    return read_shape(model)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options for the lengths and rate of requests, the engine, and verification on this machine."""

    context: int | None = option(None, "Tokens of each request when it ends.", type=TOKENS)
    output: int | None = option(None, "Generated tokens among these.  [default: an eighth]", type=TOKENS)
    lognormal: str | None = option(None, "MEDIAN,SIGMA of the tokens of requests, instead of --context.")
    trace: Path | None = option(
        None,
        "JSON lines with prompt_tokens and output_tokens, or CSV with TIMESTAMP, ContextTokens and "
        "GeneratedTokens, instead of --context.",
        type=FILE,
    )
    prefix_share: float = option(0.0, "Share of the prompts that all requests have in common.")
    slot: int | None = option(
        None,
        "Tokens that an engine without blocks reserves for each request.  [default: with --context the "
        "longest that the server takes, else the longest request]",
        type=TOKENS,
    )
    users: int | None = option(None, "Number of users, to find how many GPUs they need.", type=AT_LEAST_1)
    active: float = option(1.0, "Share of --users with a request at any time.", type=SHARE)
    rate: float | None = option(None, "Requests a second, for utilization and concurrency.", type=Finite())
    engine: str = option(
        "kvq",
        "Engine: kvq, or vllm with kvq's plug-in; bf16, fp16 and fp32 are then vLLM's own cache. vllm has "
        "vLLM's defaults: --block-size 16, --gpu-memory-utilization 0.92 (of the whole GPU), and its "
        "--max-num-batched-tokens for that GPU.",
        type=click.Choice(["kvq", "vllm"]),
    )
    verify: bool = option(False, "Start engines on this machine, and compare their memory.")
    kv_memory: str | None = option(
        None,
        "With --verify: size of the pools, such as 512MiB; with --engine vllm: its "
        "--kv-cache-memory-bytes.  [default: the engine's]",
        type=SIZE,
    )
    weights_gb: float | None = option(None, "GB of all weights, instead of counting them.", type=Finite())
    step_tokens: int = option(
        2048, "Most new tokens of a step.", names="--max-num-batched-tokens", type=TOKENS
    )
