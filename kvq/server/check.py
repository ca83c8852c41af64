"""`kvq serve --check`: all that `kvq serve` would refuse, told without loading the weights."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from kvq.cache.memory import available_bytes
from kvq.engine.build import CheckedEngine, check_engine
from kvq.engine.memory import pool_blocks
from kvq.errors import ConfigError, KVQError, OutOfMemory
from kvq.models.prepared import PreparedModel
from kvq.models.skeleton import build_skeleton
from kvq.server.config import LOCAL, ServerConfig
from kvq.server.problems import Problem
from kvq.server.prompts import Prompts
from kvq.server.reading import Readers, Setup
from kvq.server.run import listen
from kvq.server.tools.calling import ToolCalling
from kvq.sizes import binary, parse_bytes
from kvq.weights.manifest import verify_manifest

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
    engine: CheckedEngine

    @property
    def model(self) -> PreparedModel:
        """Its files, and what they are loaded as."""
        return self.engine.model

    @property
    def weight_bytes(self) -> int:
        """As they are held."""
        model = self.model
        return model.stored_bytes if model.is_quantized else model.dtype.itemsize * model.stored_values

    @property
    def activation_bytes(self) -> int:
        """Of the largest step, estimated."""
        values = self.engine.config.max_num_batched_tokens * self.model.geometry.hidden_size
        return values * _LIVE_FLOATS * self.model.dtype.itemsize


def check_config(config: ServerConfig) -> list[Finding]:
    """Look at the address, the model's files, formats, memory and the prefill budget; try its template."""
    findings = list(_address(config))
    try:
        facts = _facts(config)
    except KVQError as error:
        what = "memory" if isinstance(error, OutOfMemory) else "model"
        return [*findings, Finding(level="error", text=f"{what}: {error}")]
    for check in (_model, _memory, _prefill, _template):
        findings += check(facts)
    return findings


def _address(config: ServerConfig) -> Iterator[Finding]:
    try:
        listen(config).close()
        yield Finding(level="ok", text=f"address: {config.host}:{config.port} is free")
    except ConfigError as error:
        yield Finding(level="error", text=f"address: {error}")
    if config.host not in LOCAL and config.tls is None:
        yield Finding(
            level="warning",
            text="address: keys and prompts cross the network in the clear; give --ssl-certfile, or put a "
            "proxy with TLS before it",
        )


def _facts(config: ServerConfig) -> _Facts:
    """What the engine would be built from, checked as it would be.

    Raises:
        KVQError: it would be refused.
    """
    engine = check_engine(config.model, config.kv, config.engine)
    verify_manifest(engine.model.folder)
    build_skeleton(engine.model)
    ToolCalling.of(engine.model.tokenizer, config.tool_call_parser)
    return _Facts(config=config, engine=engine)


def _model(facts: _Facts) -> Iterator[Finding]:
    model = facts.model
    yield Finding(level="ok", text=f"model: {model.source}, digest {model.digest[:12]}")
    yield Finding(
        level="ok",
        text=f"formats: KV in {facts.config.kv}, computed in {str(model.dtype)[6:]} on {model.device}",
    )


def _memory(facts: _Facts) -> Iterator[Finding]:
    engine, layout, context = facts.engine.config, facts.engine.layout, facts.model.max_context
    free = available_bytes(facts.model.device)
    needed = facts.weight_bytes + facts.activation_bytes
    if free is not None and needed > free:
        yield Finding(
            level="error",
            text=f"memory: weights and activations take about {binary(needed)}, {binary(free)} are free",
        )
        return
    try:  # free memory is before the weights are loaded, so they are taken off with the activations
        blocks = pool_blocks(
            layout, engine, device=facts.model.device, max_context=context, activation_bytes=needed
        )
    except (KVQError, ConfigError) as error:
        yield Finding(level="error", text=f"memory: {error}")
        return
    pool = sum(n * group.block_bytes for n, group in zip(blocks, layout.groups, strict=True))
    total = f"weights {binary(facts.weight_bytes)}, KV pool {binary(pool)}"
    if free is not None and needed + pool > free:
        yield Finding(level="error", text=f"memory: {total} are more than the {binary(free)} that are free")
    else:
        yield Finding(level="ok", text=f"memory: {total} of {'?' if free is None else binary(free)} free")
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
    engine = facts.engine.config
    budget, rows = engine.max_num_batched_tokens, engine.max_num_seqs
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
        steps = -(-facts.model.max_context // budget)
        yield Finding(level="ok", text=f"prefill: a prompt of full context takes {steps} steps at least")


def _template(facts: _Facts) -> Iterator[Finding]:
    if not getattr(facts.model.tokenizer, "chat_template", None):
        yield Finding(level="warning", text="chat template: none: /v1/chat/completions will be refused")
        return
    try:
        why = asyncio.run(_try_prompts(facts))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except (KVQError, Problem) as error:
        why = f"it could not be tried: {error}"
    if why is None:
        yield Finding(level="ok", text="chat template: found, and reads one short message")
    else:
        yield Finding(level="error", text=f"chat template: {why}")


async def _try_prompts(facts: _Facts) -> str | None:
    """Why no conversation can be read, if so; aside from this process, as the server reads them."""
    config, model = facts.config, facts.model
    tools = ToolCalling.of(model.tokenizer, config.tool_call_parser)
    setup = Setup(
        folder=str(model.folder), is_text_template=tools.is_text_template, trusts_chats=config.trusts_chats
    )
    prompts = Prompts(Readers(setup), model.tokenizer)
    trying = asyncio.current_task()
    assert trying is not None, "within a coroutine"
    for number in (signal.SIGTERM, signal.SIGINT):  # raised, they would end another task of the loop's
        asyncio.get_running_loop().add_signal_handler(number, trying.cancel)
    try:
        await prompts.start()
        return await prompts.try_one()
    finally:
        prompts.close()
