"""What commands share whose engine runs in a process of its own."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.blockmgr.states import SNAPSHOT_EVERY
from kvq.commands.shared.options import (
    ACCEPT,
    GENERATION_CONFIG,
    POSITIVE,
    SPECULATION,
    TO_READ,
    Finite,
    ModelOptions,
    Size,
    TextOrMapping,
    Tokens,
    adapted,
    gathered,
    kv_option,
    model_options,
    option,
    path_option,
)
from kvq.errors import ConfigError
from kvq.formats.own import Own
from kvq.sizing.pools import CPU_FRACTION, CPU_MOST, GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from kvq.watermark.schemes import MODES

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How a command was told to build its engine."""

    max_num_seqs: int = option(
        MAX_NUM_SEQS, "Sequences that run side by side.", type=click.IntRange(1, 1 << 24)
    )
    max_num_batched_tokens: int = option(
        MAX_NUM_BATCHED_TOKENS, "New tokens of a step.", type=Tokens(1, 1 << 24)
    )
    kv_memory: str | None = option(
        None, "Bytes of the block pool, such as 2GiB; default: what is free.", type=Size()
    )
    memory_fraction: float | None = option(
        None,
        "Share for the pool of what is free once the weights are loaded.  "
        f"[default: {GPU_FRACTION}; {CPU_FRACTION} of a host's memory, {CPU_MOST >> 30} GiB at most]",
        names="--gpu-memory-utilization",
        type=Finite(0, 1, min_open=True),
    )
    num_blocks: int | None = option(
        None, "Blocks of the pool, instead of --kv-memory.", type=click.IntRange(1, 1 << 31)
    )
    swap_memory: str = option("0", "Host memory for preempted requests.", type=Size())
    speculation: str | None = option(None, SPECULATION, type=TextOrMapping())
    snapshot_every: int = option(
        SNAPSHOT_EVERY,
        "Tokens from one kept state to the next, for prefixes of hybrid models.",
        type=Tokens(1, 1 << 24),
    )
    itl_slo_s: float | None = option(
        None, "Seconds between tokens that steps shall not exceed.", names="--itl-slo", type=POSITIVE
    )
    ttft_slo_s: float | None = option(
        None, "Seconds to the first token that prefill is hurried for.", names="--ttft-slo", type=POSITIVE
    )
    accept_divergence: bool = option(False, ACCEPT)
    watermark: str = option(
        "off",
        "Texts to mark: off (none), asked (by their requests), unless-declined, or always; see "
        "kvq detect-watermark.",
        type=click.Choice([*MODES]),
    )
    watermark_key_file: str | None = path_option(
        "--watermark-key-file", "Its secret key, readable by its owner only.", type=TO_READ
    )
    watermark_scheme: str = option(
        "green", "green or tournament, and numbers that differ: green,gamma=0.25,delta=2,context=2."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """How a command was told to read requests."""

    served_model_name: tuple[str, ...] = option(
        (),
        "The model's name for clients, several times for several, of which answers have the first; default: "
        "the last part of its path.",
        multiple=True,
    )
    chat_template: str | None = option(
        None, "A file of Jinja, or such a text, instead of the model's own chat template.", type=TO_READ
    )
    tool_call_parser: str = option(
        "auto", "How the model writes tool calls: a format such as hermes or mistral, auto, or none."
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its thoughts, told apart in answers: think, mistral, seed_oss, auto, or none.",
    )
    strict_requests: bool = option(
        False, "Refuse requests with unknown fields, instead of ignoring those; labels such as user pass."
    )
    generation_config: str = option("auto", GENERATION_CONFIG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What is served, to which requests, by which engine."""

    model: ModelOptions
    kv: str
    requests: RequestOptions
    engine: EngineOptions

    def fields(self) -> dict[str, Any]:
        """Those of `ServerConfig`; `engine` are options of `kvq.LLM`.

        Raises:
            ConfigError: an option that such an engine does not take.
        """
        if self.model.calibrate_on_load:
            name = click.get_current_context().info_name
            raise ConfigError(f"kvq {name} takes scales from --scales; make them with kvq calibrate")
        if own := Own.registered.keys() & set(re.split("[/+]", self.kv.lower())):
            told = f"{min(own)} is registered in this process, and the engine of this command runs in another"
            raise ConfigError(f"{told}; kvq.LLM and kvq generate take it")
        options = self.model.load_options() | {"scales": self.model.scales} | asdict(self.engine)
        return {
            "model": self.model.model,
            "kv": self.kv,
            "engine": {name: value for name, value in options.items() if value is not None},
            **asdict(self.requests),
            "chat_template": _template(self.requests.chat_template),
        }


def _template(given: str | None) -> str | None:
    """What a file holds, or a template that was given itself."""
    from kvq.evals.text import decoded

    return given if given is None or given.startswith("{") else decoded(Path(given))


def service_options(command: _Command) -> _Command:
    """Add --kv and the options of a model, of requests and of an engine; the command gets a `service`."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        (kv,), model = values.pop("kv"), values.pop("model_options")
        requests, engine = values.pop("requests"), values.pop("engine")
        return values | {"service": Service(model=model, kv=kv, requests=requests, engine=engine)}

    command = gathered(EngineOptions, "engine")(adapted(command, change))
    command = model_options(gathered(RequestOptions, "requests")(command))
    return kv_option("auto", many=False)(command)
