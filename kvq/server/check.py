"""`kvq serve --check`: whether a configuration can work, told from the model's headers alone."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch

from kvq.cache.memory import available_bytes
from kvq.engine.config import EngineConfig, parse_bytes
from kvq.engine.memory import pool_blocks
from kvq.errors import ConfigError, KVQError
from kvq.formats import KVRecipe
from kvq.geometry import ModelGeometry
from kvq.layout import KVLayout, plan_layout
from kvq.models.checkpoint import read_header, read_json, weight_files
from kvq.models.resolve import resolve_model
from kvq.models.support import check_supported
from kvq.models.weights import pick_device
from kvq.server.config import LOCAL, ServerConfig

_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_LIVE_FLOATS = 6  # values a token and hidden dimension that a layer's step holds at once, roughly


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at."""

    level: str  # ok, warning, error
    text: str

    @property
    def is_error(self) -> bool:
        """True if the server would not start, or refuse what it is for."""
        return self.level == "error"

    def __str__(self) -> str:
        return f"{self.level:<8}{self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What the files and the options say."""

    config: ServerConfig
    engine: EngineConfig
    folder: Path
    geometry: ModelGeometry
    layout: KVLayout
    device: torch.device
    weight_bytes: int
    activation_bytes: int  # estimated

    @property
    def max_context(self) -> int:
        """Tokens."""
        return min(self.engine.max_context or self.geometry.max_context, self.geometry.max_context)


def check_config(config: ServerConfig) -> list[Finding]:
    """Look at the address, the model, memory, the prefill budget and the context. Loads no weights."""
    findings = list(_address(config))
    try:
        facts = _facts(config)
    except KVQError as error:
        return [*findings, Finding(level="error", text=f"model: {error}")]
    for check in (_context, _memory, _prefill, _template):
        findings += check(facts)
    return findings


def _address(config: ServerConfig) -> Iterator[Finding]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
        yield Finding(level="ok", text=f"address: {config.host}:{config.port} is free")
    except OSError as error:
        yield Finding(level="error", text=f"address: can't listen on {config.host}:{config.port}: {error}")
    if config.host not in LOCAL and config.tls is None:
        yield Finding(
            level="warning",
            text="address: keys and prompts cross the network in the clear; give --ssl-certfile, or put a "
            "proxy with TLS before it",
        )


def _facts(config: ServerConfig) -> _Facts:
    options = dict(config.engine)
    names = {field.name for field in fields(EngineConfig)}
    engine = EngineConfig(**{name: value for name, value in options.items() if name in names})
    folder = resolve_model(config.model, revision=options.get("revision"), token=options.get("token"))
    geometry = check_supported(read_json(folder / "config.json"), max_context=engine.max_context)
    device = pick_device(options.get("device", "auto"))
    entries = [entry for path in weight_files(folder) for entry in read_header(path)]
    stored = max((_BYTES[entry.dtype] for entry in entries if entry.dtype in _BYTES), default=2)
    size = _DTYPE_BYTES.get(options.get("dtype", "auto"), 4 if device.type == "cpu" else stored)
    recipe = _recipe(config.kv, size, geometry)
    hidden = int(read_json(folder / "config.json").get("hidden_size", 4096))
    return _Facts(
        config=config,
        engine=engine,
        folder=folder,
        geometry=geometry,
        layout=plan_layout(geometry, recipe, block_size=options.get("block_size", 32)),
        device=device,
        weight_bytes=size * sum(prod(entry.shape) for entry in entries),
        activation_bytes=engine.max_num_batched_tokens * hidden * _LIVE_FLOATS * size,
    )


def _recipe(kv: str, size: int, geometry: ModelGeometry) -> KVRecipe:
    name = ("fp32" if size == 4 else "bf16") if kv == "auto" else kv
    return KVRecipe.load(name) if name.endswith(".json") else KVRecipe.uniform(name, geometry.head_dims)


def _context(facts: _Facts) -> Iterator[Finding]:
    asked, most = facts.engine.max_context, facts.geometry.max_context
    if asked is not None and asked > most:
        text = f"context: --max-model-len {asked} is above the model's {most}, which counts"
        yield Finding(level="warning", text=text)


def _memory(facts: _Facts) -> Iterator[Finding]:
    engine, layout, context = facts.engine, facts.layout, facts.max_context
    free = available_bytes(facts.device)
    needed = facts.weight_bytes + facts.activation_bytes
    if free is not None and needed > free:
        yield Finding(
            level="error",
            text=f"memory: weights and activations take about {_gib(needed)}, {_gib(free)} are free",
        )
        return
    try:  # free memory is before the weights are loaded, so they are taken off with the activations
        blocks = pool_blocks(
            layout, engine, device=facts.device, max_context=context, activation_bytes=needed
        )
    except (KVQError, ConfigError) as error:
        yield Finding(level="error", text=f"memory: {error}")
        return
    pool = sum(n * group.block_bytes for n, group in zip(blocks, layout.groups, strict=True))
    total = f"weights {_gib(facts.weight_bytes)}, KV pool {_gib(pool)}"
    if free is not None and needed + pool > free:
        yield Finding(level="error", text=f"memory: {total} are more than the {_gib(free)} that are free")
    else:
        yield Finding(level="ok", text=f"memory: {total} of {'?' if free is None else _gib(free)} free")
    asked = engine.kv_memory
    if asked is not None and pool < 0.9 * parse_bytes(asked, "kv_memory"):
        text = f"memory: of --kv-memory {asked} no more could be used by {engine.max_num_seqs} sequences"
        yield Finding(level="ok", text=text)
    tokens = min(blocks) * layout.block_size
    if tokens < context:
        yield Finding(
            level="warning",
            text=f"context: the pool holds {tokens} tokens, the context is {context}: longer requests are "
            f"refused; raise --kv-memory, take a smaller --kv format, or set --max-model-len {tokens}",
        )
    else:
        yield Finding(
            level="ok", text=f"context: {tokens // context} requests of {context} tokens fit at once"
        )
    if min(blocks) < engine.max_num_seqs:
        yield Finding(
            level="warning",
            text=f"memory: {min(blocks)} blocks for --max-num-seqs {engine.max_num_seqs}: requests will take "
            f"blocks from one another; lower it to {max(1, min(blocks) // 2)}",
        )


def _prefill(facts: _Facts) -> Iterator[Finding]:
    budget, rows = facts.engine.max_num_batched_tokens, facts.engine.max_num_seqs
    if budget < rows:
        yield Finding(
            level="warning",
            text=f"prefill: --max-num-batched-tokens {budget} is below --max-num-seqs and counts as {rows}",
        )
    elif budget < rows + 64:
        yield Finding(
            level="warning",
            text=f"prefill: beside {rows} streams a step has {budget - rows} tokens left for new prompts; "
            f"raise --max-num-batched-tokens to {rows + 512}",
        )
    else:
        steps = -(-facts.max_context // budget)
        yield Finding(level="ok", text=f"prefill: a prompt of full context takes {steps} steps at least")


def _template(facts: _Facts) -> Iterator[Finding]:
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    found = any(_has_template(facts.folder / name) for name in names)
    level, what = ("ok", "found") if found else ("warning", "none: /v1/chat/completions will be refused")
    yield Finding(level=level, text=f"chat template: {what}")


def _has_template(path: Path) -> bool:
    if not path.is_file():
        return False
    return path.suffix == ".jinja" or bool(read_json(path).get("chat_template"))


def _gib(nbytes: Any) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
