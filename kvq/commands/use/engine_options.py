"""Options for commands that run the engine in a separate process."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from kvq.blockmgr.states import SNAPSHOT_EVERY
from kvq.commands.shared.declare import adapted, gathered, option, path_option
from kvq.commands.shared.options import (
    ACCEPT,
    GENERATION_CONFIG,
    SPECULATION,
    ModelOptions,
    kv_option,
    model_options,
)
from kvq.commands.shared.param_types import (
    POSITIVE,
    SHARE,
    SIZE,
    TEMPLATE,
    TEXT_OR_MAPPING,
    TO_READ,
    Finite,
    TokenCount,
)
from kvq.errors import ConfigError
from kvq.formats.spec import Own
from kvq.models.describe.pooling import CHOICES
from kvq.scheduler.config import MAX_ADAPTERS
from kvq.sizing.pools import CPU_FRACTION, CPU_MOST, GPU_FRACTION, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from kvq.watermark.schemes import MODES

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class _EngineOptions:
    max_num_seqs: int = option(MAX_NUM_SEQS, "Most sequences at a time.", type=click.IntRange(1, 1 << 24))
    max_num_batched_tokens: int = option(
        MAX_NUM_BATCHED_TOKENS, "Most new tokens of a step.", type=TokenCount(1, 1 << 24)
    )
    adapters: tuple[str, ...] = option(
        (),
        "LoRA adapter, NAME=FOLDER as PEFT saves it, for requests with that model name; may be repeated.",
        names="--adapter",
        multiple=True,
    )
    max_adapters: int = option(MAX_ADAPTERS, "Most adapters in memory.", type=click.IntRange(1, 1 << 24))
    kv_memory: str | None = option(
        None, "Size of the block pool, such as 2GiB; default: all free memory.", type=SIZE
    )
    memory_fraction: float | None = option(
        None,
        "Share of the memory that is free after loading the weights, for the pool.  "
        f"[default: {GPU_FRACTION}; {CPU_FRACTION} of a host's memory, {CPU_MOST >> 30} GiB at most]",
        names="--gpu-memory-utilization",
        type=SHARE,
    )
    num_blocks: int | None = option(
        None, "Blocks of the pool, instead of --kv-memory.", type=click.IntRange(1, 1 << 31)
    )
    kv_host: str = option("0", "Host memory for KV that leaves the pool, such as 8GiB.", type=SIZE)
    kv_disk: str = option("0", "Space in --kv-dir for KV that outlives the process.", type=SIZE)
    kv_dir: str | None = path_option(
        "--kv-dir", "Folder for KV; engines of one machine may share it.", type=click.Path()
    )
    kv_key_file: str | None = path_option(
        "--kv-key-file", "Secret key that encrypts --kv-dir, readable by its owner only.", type=TO_READ
    )
    kv_max_age_s: float | None = option(
        None,
        "Seconds after which unused KV in --kv-host and --kv-dir is dropped.",
        names="--kv-max-age",
        type=POSITIVE,
    )
    kv_tenant_share: float = option(1.0, "Most of --kv-host and --kv-disk for one API key.", type=SHARE)
    kv_tier_format: str | None = option(
        None, "Format of fewer bits, such as int4, of KV in --kv-host and --kv-dir."
    )
    kv_ladder: str | None = option(
        None,
        "Formats of fewer bits, such as int4,int3, for KV in the pool that no running request reads; it is "
        "rewritten in them before it leaves the pool.",
    )
    kv_cold_share: float = option(
        1.0, "Most of a prompt that may have been in fewer bits.", type=Finite(0, 1)
    )
    hand_over_listen: str | None = option(
        None, "Take over requests and prefixes of other engines at a port, HOST:PORT or unix:PATH."
    )
    hand_over_to: str | None = option(
        None, "Engine that takes over the requests at shutdown, as they listen."
    )
    hand_over_key_file: str | None = path_option(
        "--hand-over-key-file", "Secret key of hand-overs, the same on both sides.", type=TO_READ
    )
    hand_over_prefilled: bool = option(False, "Hand over each request once its prompt is computed.")
    guard: float = option(
        0.0,
        "Share of requests, such as 0.01, to compute again without quantized KV when there is time; alerts "
        "in the log and the metrics.",
        type=Finite(0, 1),
    )
    guard_tokens: int = option(
        2048, "Tokens of such a request, from its beginning.", type=TokenCount(1, 1 << 24)
    )
    speculation: str | None = option(None, SPECULATION, type=TEXT_OR_MAPPING)
    snapshot_every: int = option(
        SNAPSHOT_EVERY,
        "Tokens between two snapshots of the recurrent state, for prefixes of hybrid models.",
        type=TokenCount(1, 1 << 24),
    )
    itl_slo_s: float | None = option(
        None, "Goal in seconds between tokens.", names="--itl-slo", type=POSITIVE
    )
    ttft_slo_s: float | None = option(
        None, "Goal in seconds to the first token.", names="--ttft-slo", type=POSITIVE
    )
    accept_divergence: bool = option(False, ACCEPT)
    pooling: str = option(
        "auto",
        "What embeddings and scores are made from: auto (as the model's files say), the last or first hidden "
        "state, their mean, or yes-no (the logits of these answers).",
        type=click.Choice([*CHOICES]),
    )
    watermark: str = option(
        "off",
        "Texts to mark: off (none), asked (if the request asks for it), unless-declined, or always; see "
        "kvq detect-watermark.",
        type=click.Choice([*MODES]),
    )
    watermark_key_file: str | None = path_option(
        "--watermark-key-file", "Secret key of the watermark, readable by its owner only.", type=TO_READ
    )
    watermark_scheme: str = option(
        "green", "green or tournament, with parameters to change: green,gamma=0.25,delta=2,context=2."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RequestOptions:
    served_model_name: tuple[str, ...] = option(
        (),
        "The model's name for clients; may be repeated, responses have the first; default: the last part of "
        "its path.",
        multiple=True,
    )
    chat_template: str | None = option(
        None, "Jinja file or text, instead of the model's own chat template.", type=TEMPLATE
    )
    tool_call_parser: str = option(
        "auto", "Format of the model's tool calls: a name such as hermes or mistral, auto, or none."
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning, separated in responses: think, mistral, seed_oss, auto, or none.",
    )
    strict_requests: bool = option(
        False, "Refuse requests with unknown fields instead of ignoring those; labels such as user pass."
    )
    generation_config: str = option("auto", GENERATION_CONFIG)


def service_options(command: _Command) -> _Command:
    """Add --kv and options for a model, its requests and its engine.

    The command receives a function `service` that returns fields of `ServerConfig`, including `engine` with
    options of `kvq.LLM`. The function raises ConfigError for options that an engine in a separate process
    can't support.
    """

    def change(values: dict[str, Any]) -> dict[str, Any]:
        (kv,), model = values.pop("kv"), values.pop("model_options")
        return values | {"service": partial(_fields, model, kv, values.pop("requests"), values.pop("engine"))}

    command = gathered(_EngineOptions, "engine")(adapted(command, change))
    command = model_options(gathered(_RequestOptions, "requests")(command))
    return kv_option("auto", many=False)(command)


def _fields(
    model: ModelOptions, kv: str, requests: _RequestOptions, engine: _EngineOptions
) -> dict[str, Any]:
    if model.calibrate_on_load:
        name = click.get_current_context().info_name
        raise ConfigError(f"kvq {name} takes scales from --scales; make them with kvq calibrate")
    if own := Own.registered.keys() & set(re.split("[/+]", kv.lower())):
        raise ConfigError(
            f"{min(own)} is registered in this process, and the engine of this command runs in another; "
            f"kvq.LLM and kvq generate take it"
        )
    options = model.load_options() | {"scales": model.scales} | asdict(engine)
    options["adapters"] = _adapters(engine.adapters) or None
    template = requests.chat_template
    if template is not None and not template.startswith("{"):  # a file, not the template itself
        from kvq.evals.text import decoded

        template = decoded(Path(template))
    return {
        "model": model.model,
        "kv": kv,
        "engine": {name: value for name, value in options.items() if value is not None},
        **asdict(requests),
        "chat_template": template,
    }


def _adapters(given: tuple[str, ...]) -> dict[str, str]:
    """Return absolute folders by name; raise ConfigError unless each is NAME=FOLDER, with its own name."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder or name in found:
            raise ConfigError(f"--adapter takes NAME=FOLDER, each name once, got {one!r}")
        found[name] = str(Path(folder).absolute())
    return found
