"""Exactness of an engine: what decides a request's bits, and digests of them for its receipt."""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import transformers
import xxhash

from kvq.cache.backend import CacheBackend
from kvq.cache.digests import layout_digest
from kvq.cache.kv_digest import kv_digest
from kvq.engine.params import SamplingParams
from kvq.engine.requests.outputs import ExactReceipt, Receipt, RequestOutput, TokenLogprobs
from kvq.engine.requests.request_state import Job
from kvq.kernels.native.library import load
from kvq.models import Model
from kvq.models.loading.fused_layers import is_fused
from kvq.scheduler import Branch
from kvq.version import __version__


class Exactness:
    """Digests for the receipts of one engine."""

    def __init__(self, model: Model, watermark: str) -> None:
        """`watermark`: which texts are marked. Waits for the digest of the model's tensors."""
        prepared = model.prepared
        self._layout = model.layout
        self._model = _digest(prepared.digest, dict(prepared.config))
        self._recipe = _digest(model.recipe.digest(), layout_digest(model.layout))
        library = load()
        own = isinstance(library, str) or not is_fused(
            model.weights.model
        )  # transformers' code and torch's functions
        parts = [
            f"kvq {__version__}",
            f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
            f"kernels {prepared.backend} {'none' if isinstance(library, str) else library.variant}",
            str(prepared.dtype).removeprefix("torch."),
            *([f"transformers {transformers.__version__}"] if own else []),
            *([f"weights {prepared.rounded_to.name}"] if prepared.rounded_to is not None else []),
            *([f"inputs {prepared.block_inputs.name}"] if prepared.is_gguf else []),
            *([f"watermark {watermark}"] if watermark != "off" else []),
        ]
        self._program = ", ".join(parts)

    def keep(self, cache: CacheBackend, job: Job, branch: Branch) -> None:
        """Store the digest of a result's K and V, while the result that just ended still has its blocks."""
        output, sequence = job.results[job.index_of(branch)].output, branch.sequence
        assert sequence is not None, "it ran"
        length = job.prompt_length + len(output.token_ids) - 1  # the last token's K and V are never computed
        output.kv_digest = kv_digest(cache, self._layout, sequence, length)

    def signed(self, params: SamplingParams, output: RequestOutput) -> Receipt:
        """Return the output's receipt with digests. `params`: with the seed."""
        request = _digest(output.prompt_token_ids, asdict(params))
        return replace(
            output.receipt,
            exact=ExactReceipt(
                digest=_digest(self._model, self._recipe, self._program, request),
                model=self._model,
                recipe=self._recipe,
                program=self._program,
                request=request,
                seed=params.seed or 0,
                kv=[one.kv_digest for one in output.outputs],
                tokens=[_trace(one.token_ids, one.logprobs) for one in output.outputs],
                prompt=_trace(output.prompt_token_ids, output.prompt_logprobs or []),
            ),
        )


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
    """Return the xxh3-128 digest, in hex, of values of JSON's types."""
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()
