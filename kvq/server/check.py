"""Checks for `kvq serve --check`: detect all that `kvq serve` would refuse, without loading weights."""

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from kvq.cache.memory import available_bytes
from kvq.engine.build import CheckedEngine, check_engine
from kvq.engine.device.memory import LENGTHS, describe_pools
from kvq.engine.requests.defaults import read_defaults
from kvq.errors import ConfigError, KVQError, OutOfMemory
from kvq.models.check.load_check import is_to_check, recalled
from kvq.models.describe.ends import NO_END
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.skeleton import build_skeleton
from kvq.models.loading.tokenizer import check_knows_text
from kvq.models.prove.proof import prove
from kvq.server.admission.config import LOCAL, ServerConfig
from kvq.server.admission.prompts import Prompts
from kvq.server.engine.formats import other_recipes
from kvq.server.http.problems import Problem
from kvq.server.http.protocol import listen
from kvq.server.models.config import ModelsConfig
from kvq.server.models.planning import plan_memory
from kvq.server.reading import Readers, Setup
from kvq.server.tools.calling import ToolCalling
from kvq.sizes import binary, parse_bytes
from kvq.sizing.needs import bytes_of
from kvq.sizing.pools import at_once, longest_context
from kvq.weights.manifest import verify_manifest


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result of one check."""

    level: str  # ok, warning, error
    text: str

    @property
    def is_error(self) -> bool:
        """True if the server would not start, or would refuse all requests."""
        return self.level == "error"

    def __str__(self) -> str:
        return f"{self.level:<8}{self.text}"


_ok, _warning, _error = (partial(_Finding, level) for level in ("ok", "warning", "error"))


def check_models(config: ModelsConfig) -> list[_Finding]:
    """Check the address, the memory of all models together, and each model as `check_config` does."""
    findings = [*_address(config.server)]
    try:
        plans = plan_memory(config.models)
    except KVQError as error:
        return [*findings, _error(f"memory: {error}")]
    for one, plan in zip(config.models, plans, strict=True):
        findings.append(_ok(f"memory: {plan}"))
        own = _check_model(plan.applied(one).config)
        findings += (_Finding(finding.level, f"{plan.name}: {finding.text}") for finding in own)
    return findings


def check_config(config: ServerConfig) -> list[_Finding]:
    """Check the address, model files, formats, memory and prefill budget, and try the chat template."""
    return [*_address(config), *_check_model(config)]


def _check_model(config: ServerConfig) -> list[_Finding]:
    findings = [*_events(config)]
    try:
        also, share = config.kv_also, config.kv_also_share
        engine = check_engine(config.model, config.kv, {**config.engine, "kv_share": 1 - share * len(also)})
        recipes = other_recipes(engine.model, engine.recipe, also, engine.scales)
        size = replace(engine.config, kv_share=share)
        others = {name: replace(engine, recipe=one, config=size) for name, one in recipes.items()}
        if config.chat_template is not None:
            engine.model.tokenizer.chat_template = config.chat_template
        verify_manifest(engine.model.folder)
        build_skeleton(engine.model)
        prove(engine.model)
        check_knows_text(engine.model.tokenizer, engine.model.folder)
        ToolCalling.of(engine.model.tokenizer, config.tool_call_parser, config.reasoning_parser)
    except KVQError as error:
        what = "memory" if isinstance(error, OutOfMemory) else "model"
        return [*findings, _error(f"{what}: {error}")]
    model = engine.model
    return [
        *findings,
        _ok(f"model: {model.source}, digest {model.digest[:12]}"),
        _ok(
            f"formats: KV in {', '.join((config.kv, *config.kv_also))}, computed in {str(model.dtype)[6:]} "
            f"on {model.device}"
        ),
        *([_ok(text)] if (text := str(read_defaults(model.folder, config.generation_config))) else []),
        *([] if model.end_ids else [_warning(f"ends of texts: {NO_END}")]),
        *_checked(engine),
        *_memory(engine),
        *(
            _Finding(finding.level, f"{name}: {finding.text}")
            for name, other in others.items()
            for finding in (*_checked(other), *_memory(other))
        ),
        *_prefill(engine),
        *_template(config, model),
    ]


def _address(config: ServerConfig) -> Iterator[_Finding]:
    try:
        listen(config.host, config.port).close()
        yield _ok(f"address: {config.host}:{config.port} is free")
    except ConfigError as error:
        yield _error(f"address: {error}")
    if config.host not in LOCAL and config.tls is None:
        yield _warning(
            "address: keys and prompts cross the network in the clear; give --ssl-certfile, or put a "
            "proxy with TLS before it"
        )


def _events(config: ServerConfig) -> Iterator[_Finding]:
    if config.kv_events is None:
        return
    from kvq.server.kv_events.publisher import Publisher  # imports pyzmq, needed only here

    try:
        Publisher(config.kv_events, block_size=1).close()
        yield _ok(f"block events: {config.kv_events.address} is free")
    except ConfigError as error:
        yield _error(f"block events: {error}")
    if not config.kv_events.is_local:
        yield _warning(f"block events: {config.kv_events.warning}")


def _checked(engine: CheckedEngine) -> Iterator[_Finding]:
    """Report the result of an earlier load check of the formats, if any; a new check needs the weights."""
    if not is_to_check(engine.model, engine.recipe):
        return
    found = recalled(engine.model, engine.recipe)
    if found is None:
        yield _warning("formats: what they cost this model will be checked when it is first loaded")
    elif found.verdict == "broken" and not engine.config.accept_divergence:
        yield _error(f"formats: {found.refusal}")
    else:
        yield (_ok if found.verdict == "harmless" else _warning)(f"formats: {found}")


def _memory(checked: CheckedEngine) -> Iterator[_Finding]:
    model, config, layout = checked.model, checked.config, checked.layout
    weights = checked.weights_bytes
    needed, free, context = checked.taken_bytes, available_bytes(model.device), model.max_context
    if free is not None and needed > free:
        yield _error(f"memory: weights and activations take about {binary(needed)}, {binary(free)} are free")
        return
    try:
        pools = checked.pools(free, needed)
    except KVQError as error:
        yield _error(f"memory: {error}")
        return
    pool = bytes_of(layout, pools.num_blocks)
    total = f"weights {binary(weights)}, KV pool {binary(pool)}"
    if free is not None and needed + pool > free:
        yield _error(f"memory: {total} are more than the {binary(free)} that are free")
    else:
        yield _ok(f"memory: {total} of {'?' if free is None else binary(free)} free")
    wanted, seqs = config.kv_memory, config.max_num_seqs
    if wanted is not None and pool < 0.9 * parse_bytes(wanted, "kv_memory"):
        yield _ok(f"memory: {seqs} sequences can use no more of --kv-memory {wanted}")
    longest = longest_context(layout, pools, context)
    if longest < context:
        yield _warning(
            f"context: the pool holds {longest} tokens, the context is {context}: longer requests are "
            f"refused; raise --kv-memory, take a smaller --kv format, or set --max-model-len {longest}"
        )
    else:
        yield _ok(
            f"context: {at_once(layout, pools, context).count} requests of {context} tokens fit at once"
        )
    short = at_once(layout, pools, min(LENGTHS[0], longest))
    requests = f"requests: at once fit, and run out of first: {describe_pools(layout, pools, context)}"
    if short.limit is None or not short.limit.is_staging:
        yield _ok(requests)
    else:
        yield _warning(
            f"{requests}: tokens wait there unquantized; raise --kv-memory, lower --max-model-len, or take a "
            f"--kv format that keeps fewer of them"
        )
    if pools.sequences < seqs:
        yield _ok(
            f"memory: {pools.sequences} sequences run at once at most, since a step has a token for each"
        )
    if (few := at_once(layout, pools, 1)).limit is not None:
        yield _warning(
            f"memory: {few.count} of {pools.sequences} sequences find a block each: requests will take "
            f"blocks from one another; lower --max-num-seqs to {max(1, few.count // 2)}"
        )


def _prefill(checked: CheckedEngine) -> Iterator[_Finding]:
    budget = checked.config.max_num_batched_tokens
    try:
        pools = checked.pools(available_bytes(checked.model.device), checked.taken_bytes)
    except KVQError:  # reported by `_memory`
        return
    staged, context = pools.step_tokens, checked.model.max_context
    rows = max(1, min(pools.sequences, at_once(checked.layout, pools, min(LENGTHS[0], context)).count))
    remedy = f"raise --max-num-batched-tokens to {rows + 512}"
    if staged < budget:
        yield _ok(f"prefill: steps take {staged} tokens, since those wait in the staging area")
        budget, remedy = staged, ("lower --max-num-seqs, or " if rows > 1 else "") + "raise --kv-memory"
    if budget < rows:
        yield _warning(
            f"prefill: --max-num-batched-tokens {budget} is below --max-num-seqs and counts as {rows}"
        )
    elif budget < rows + 64:
        yield _warning(
            f"prefill: beside {rows} streams a step has {budget - rows} tokens left for new prompts; {remedy}"
        )
    else:
        steps = -(-checked.model.max_context // budget)
        yield _ok(f"prefill: a prompt of full context takes {steps} steps at least")


def _template(config: ServerConfig, model: PreparedModel) -> Iterator[_Finding]:
    if not getattr(model.tokenizer, "chat_template", None):
        yield _warning("chat template: none: /v1/chat/completions will be refused; give --chat-template FILE")
        return
    try:
        why, lacking = asyncio.run(_try_prompts(config, model))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except (KVQError, Problem) as error:
        why, lacking = f"it could not be tried: {error}", ""
    if why is not None:
        yield _error(f"chat template: {why}")
    elif lacking:
        yield _warning(f"chat template: found; it has no place for {lacking}: the model will not see any")
    else:
        yield _ok("chat template: found; it shows all roles, tools and calls")


async def _try_prompts(config: ServerConfig, model: PreparedModel) -> tuple[str | None, str]:
    """Return why no conversation can be rendered (None if one can), and which parts the template omits."""
    setup = Setup(
        folder=str(model.folder), chat_template=config.chat_template, trusts_chats=config.trusts_chats
    )
    prompts = Prompts(Readers(setup), model.tokenizer)
    trying = asyncio.current_task()
    assert trying is not None, "within a coroutine"
    for number in (signal.SIGTERM, signal.SIGINT):  # as exceptions, they would end another task of the loop
        asyncio.get_running_loop().add_signal_handler(number, trying.cancel)
    try:
        await prompts.start()
        return await prompts.try_one(), (await prompts.forms()).lacking
    finally:
        prompts.close()
