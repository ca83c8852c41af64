"""What commands share whose engine runs in a process of its own."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import click

from kvq.commands.options import Finite, ModelOptions, Size, gathered
from kvq.errors import ConfigError
from kvq.sizing.pools import CPU_FRACTION, CPU_MOST, GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How a command was told to build its engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory: str | None
    memory_fraction: float | None
    num_blocks: int | None
    swap_memory: str
    itl_slo: float | None
    ttft_slo: float | None


_OPTIONS = (
    click.option(
        "--max-num-seqs",
        default=MAX_NUM_SEQS,
        show_default=True,
        type=click.IntRange(1, 1 << 24),
        help="Sequences that run side by side.",
    ),
    click.option(
        "--max-num-batched-tokens",
        default=MAX_NUM_BATCHED_TOKENS,
        show_default=True,
        type=click.IntRange(1, 1 << 24),
        help="New tokens of a step.",
    ),
    click.option(
        "--kv-memory", type=Size(), help="Bytes of the block pool, such as 2GiB; default: what is free."
    ),
    click.option(
        "--gpu-memory-utilization",
        "memory_fraction",
        type=Finite(0, 1, min_open=True),
        help="Share for the pool of what is free once the weights are loaded.  "
        f"[default: {GPU_FRACTION}; {CPU_FRACTION} of a host's memory, {CPU_MOST >> 30} GiB at most]",
    ),
    click.option(
        "--num-blocks", type=click.IntRange(1, 1 << 31), help="Blocks of the pool, instead of --kv-memory."
    ),
    click.option(
        "--swap-memory",
        type=Size(),
        default="0",
        show_default=True,
        help="Host memory for preempted requests.",
    ),
    click.option(
        "--itl-slo",
        type=Finite(min=0, min_open=True),
        help="Seconds between tokens that steps shall not exceed.",
    ),
    click.option(
        "--ttft-slo",
        type=Finite(min=0, min_open=True),
        help="Seconds to the first token that prefill is hurried for.",
    ),
)

tool_call_option = click.option(
    "--tool-call-parser",
    default="auto",
    show_default=True,
    help="How the model writes tool calls: a format such as hermes or mistral, auto, or none.",
)


strict_option = click.option(
    "--strict-requests",
    is_flag=True,
    help="Refuse requests with unknown fields, instead of ignoring those; labels such as user pass.",
)


def engine_options(command: _Command) -> _Command:
    """Add the options of `EngineOptions`; the command gets them as `engine_options`, for `engine_of`."""
    command = gathered(EngineOptions, "engine_options")(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engine_of(model_options: ModelOptions, engine_options: EngineOptions) -> dict[str, Any]:
    """Options of `kvq.LLM`, from those of the model and of the engine.

    Raises:
        ConfigError: one that such an engine does not take.
    """
    if model_options.calibrate_on_load:
        name = click.get_current_context().info_name
        raise ConfigError(f"kvq {name} takes scales from --scales; make them with kvq calibrate")
    load = model_options.load_options() | {"scales": model_options.scales}
    options = asdict(engine_options)
    slos = {"itl_slo_s": options.pop("itl_slo"), "ttft_slo_s": options.pop("ttft_slo")}
    return {name: value for name, value in (load | options | slos).items() if value is not None}
