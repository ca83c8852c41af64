"""Exactness of an engine: what decides a request's bits, and digests of them for its receipt."""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch
import xxhash

from kvq.cache.backend import CacheBackend
from kvq.cache.digests import kv_digest, layout_digest
from kvq.engine.requests.marking import Marking
from kvq.engine.requests.outputs import ExactReceipt, Receipt, RequestOutput, TokenLogprobs
from kvq.engine.requests.request_state import Job
from kvq.errors import ModelError
from kvq.geometry.support import rope_types
from kvq.kernels.native.library import load
from kvq.layout import KVLayout
from kvq.models import Model
from kvq.models.loading.fused_layers import is_fused
from kvq.scheduler import Branch
from kvq.version import __version__

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "amx_int8")  # used in kernels of any variant if the CPU has them

Signer = Callable[[Job, RequestOutput], Receipt]


def engine_facts(model: Model, marking: Marking | None = None) -> dict[str, str]:
    """Return digests of the model and the recipe, and the program in words, as in `ExactReceipt`.

    `marking`: of texts, by a watermark. Waits for the digest of the model's tensors.
    """
    prepared, config = model.prepared, dict(model.prepared.config)
    depends = {"dynamic", "longrope"} & set(rope_types(config))  # angles depend on the maximum context
    with suppress(ModelError):  # without a tokenizer, prompts are token ids
        own = getattr(prepared.tokenizer, "backend_tokenizer", None)
        config["tokenizer"] = own.to_str() if own else sorted(prepared.tokenizer.get_vocab().items())
    return {
        "model": _digest(prepared.digest, config, prepared.max_context if depends else None),
        "recipe": _digest(model.recipe.digest(), layout_digest(model.layout)),
        "program": ", ".join(_program(model, marking)),
    }


def make_signer(model: Model, marking: Marking | None) -> Signer:
    """Return a function that adds digests to the receipt of a job's output."""
    known = engine_facts(model, marking)

    def sign(job: Job, output: RequestOutput) -> Receipt:
        limit = job.max_tokens or 0  # known, also if the request leaves it open
        own = known if job.adapter is None else known | {"model": _digest(known["model"], job.adapter.digest)}
        params = replace(job.params, max_tokens=limit or None, most_tokens=None)
        request = _digest(output.prompt_token_ids, params, sorted(job.end_ids))
        exact = ExactReceipt(
            digest=_digest(*own.values(), request),
            **own,
            request=request,
            seed=job.seed,
            max_tokens=limit,
            kv=[one.kv_digest for one in output.outputs],
            tokens=[_trace(one.token_ids, one.logprobs) for one in output.outputs],
            prompt=_trace(output.prompt_token_ids, output.prompt_logprobs or []),
        )
        return replace(output.receipt, exact=exact)

    return sign


def keep_kv_digest(cache: CacheBackend, layout: KVLayout, job: Job, branch: Branch) -> None:
    """Store the digest of a result's K and V in its output, while the ended result still has its blocks."""
    output, sequence = job.results[job.index_of(branch)].output, branch.sequence
    assert sequence is not None, "it ran"
    length = job.prompt_length + len(output.token_ids) - 1  # the last token's K and V are never computed
    output.kv_digest = kv_digest(cache, layout, sequence, length)


def _program(model: Model, marking: Marking | None) -> Iterator[str]:
    """Yield what computes the results: versions, kernels and instructions, dtypes, formats of weights."""
    prepared, library, cpu = model.prepared, load(), torch.cpu.get_capabilities()
    yield f"kvq {__version__}"
    for name in ("tokenizers", "llguidance"):
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
    yield f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    if not is_fused(model.weights.model):  # layers in transformers' code, with products of torch's libraries
        yield f"transformers {version('transformers')} on {cpu.get('cpu_name')}"
    variant = "none" if isinstance(library, str) else library.variant
    yield " ".join(["kernels", prepared.backend, variant, *(x for x in _INSTRUCTIONS if cpu.get(x))])
    yield str(prepared.dtype).removeprefix("torch.")
    if prepared.rounded_to is not None:
        yield f"weights {prepared.rounded_to.name}"
    if prepared.is_gguf:
        yield f"inputs {prepared.block_inputs.name}"
    if marking is not None:
        yield f"watermark {marking.mode} {marking.scheme} key {marking.key.word(b'receipt', []):016x}"


def _trace(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> str:
    """Return 8 hex digits per token, each over the token and all before it.

    Log-probabilities count, too; tokens without an entry among them are left out. None: none were requested.
    """
    hasher, found = xxhash.xxh3_64(), []
    for token, entry in zip(tokens, [None] * len(tokens) if logprobs is None else logprobs, strict=False):
        hasher.update(token.to_bytes(4, "little"))
        if entry is not None:
            for other, logprob in ((entry.token, entry.logprob), *entry.top):
                hasher.update(struct.pack("<Id", other, logprob))
        found.append(hasher.hexdigest()[:8])
    return "".join(found)


def _digest(*parts: object) -> str:
    """Return the xxh3-128 digest, in hex, of values as Python writes them."""
    return xxhash.xxh3_128(repr(parts).encode()).hexdigest()
