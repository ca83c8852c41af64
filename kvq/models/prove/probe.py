"""Load-time probe: a check that a model run by kvq gives the same results as its own code."""

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from kvq.cache.transformers.attention import PACKED_NAME
from kvq.errors import ModelError
from kvq.formats import KVRecipe
from kvq.formats.weights import Inputs
from kvq.layout import plan_layout
from kvq.models.loading.fused_layers import is_fused
from kvq.models.loading.weights import LoadedWeights
from kvq.models.observe.support import is_listed
from kvq.models.run.session import Session
from kvq.weights import weight_formats

_log = logging.getLogger("kvq")
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # max|a-b| / max|b|
_SIXTEEN_BITS = 2e-3  # inputs of quantized layers on CPUs have 16 bits
_ROUNDED_INPUTS = 1e-1  # attention's last bit can move an input to the next of 256 codes
OF_NOISE = 4.0  # kvq may differ from the model's own attention by this many times its rounding noise
_LENGTHS = (7, 5)  # tokens of the two probed sequences


def probe(weights: LoadedWeights) -> None:
    """Compare the results of two short sequences, run packed, with the model's own eager attention.

    Raises:
        ModelError: a layer did not call kvq's attention exactly once, a sequence's results depend on
            its batch neighbour, or the model's own attention gives other results.
    """
    geometry = weights.geometry
    length = min(max(_LENGTHS), weights.max_context)
    session = Session(
        weights,
        plan_layout(geometry, KVRecipe.uniform("fp32", geometry.head_dims)),
        max_tokens=length,
        max_sequences=2,
        backend=weights.prepared.backend,
    )
    tokens = [
        [(31 * i + 977 * s + 5) % geometry.vocab_size for i in range(min(n, length))]
        for s, n in enumerate(_LENGTHS)
    ]
    ways = _observed(session, tokens)
    own = [eager_logits(weights, ids) for ids in tokens]
    limit = _TOLERANCE.get(weights.prepared.dtype, 1e-1)  # some norms are in fp32
    for fmt in weight_formats(weights.model):
        limit = max(limit, _SIXTEEN_BITS if fmt.inputs is Inputs.FULL else _ROUNDED_INPUTS)
    worst = max(_furthest(weights, way, own) for way in ways)
    if worst <= limit or worst <= OF_NOISE * _logged_noise(weights, tokens, own):
        return
    what, alone = "its own attention differs", [_run(session, [ids])[0] for ids in tokens]
    if (changed := max(_furthest(weights, way, alone) for way in ways)) > limit:
        what, worst = "a batch neighbour changes its results", changed
    raise ModelError(
        f"kvq does not run {geometry.model_type}: {what} (relative error {worst:.1e}, allowed {limit:.0e})"
    )


def _observed(session: Session, tokens: list[list[int]]) -> list[list[Tensor]]:
    """Return the packed sequences' logits for every execution path, checking that each layer attends once.

    Raises:
        ModelError: a layer did not attend exactly once.
    """
    geometry, layers = session.weights.geometry, list[int]()
    session.observer = lambda layer, k, v: layers.append(layer)
    packed = _run(session, tokens)
    session.observer = None
    if sorted(layers) != list(range(len(geometry.layers))):
        raise ModelError(
            f"kvq does not run {geometry.model_type}: its {len(geometry.layers)} layers called the "
            f"registered attention for {sorted(layers)}, not once each"
        )
    # Fused layers take another path when no observer is set.
    return [packed, _run(session, tokens)] if is_fused(session.weights.model) else [packed]


def _furthest(weights: LoadedWeights, found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest relative error over all sequences.

    Raises:
        ModelError: an error is NaN.
    """
    worst = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
    if math.isnan(worst):
        raise ModelError(
            f"{weights.prepared.folder}: its weights or config give NaN or infinity in the logits"
        )
    return worst


def _logged_noise(weights: LoadedWeights, tokens: list[list[int]], own: list[Tensor]) -> float:
    """Log and return the model's rounding noise; for listed families, which need no tiny copy, return 0."""
    if is_listed(weights.geometry):
        return 0.0
    found = noise(weights, tokens, own)
    _log.warning(
        "%s: roundings grow in it: its own attention gives results %.0e apart for embeddings that differ in "
        "their last bit; --dtype fp32 has less",
        weights.prepared.folder,
        found,
    )
    return found


def noise(weights: LoadedWeights, tokens: list[list[int]], own: list[Tensor]) -> float:  # D192
    """Return the change of the model's own logits if some embedding values change by one rounding step.

    `own`: the model's logits for these tokens.
    """
    hook = weights.model.get_input_embeddings().register_forward_hook(_rounded_otherwise)
    try:
        return max(map(relative_error, (eager_logits(weights, ids) for ids in tokens), own))
    finally:
        hook.remove()


def _rounded_otherwise(module: nn.Module, args: object, embeddings: Tensor) -> Tensor:
    """Increase two of every five values by one rounding step of their dtype."""
    larger = torch.arange(embeddings.numel(), device=embeddings.device).view(embeddings.shape) * 7 % 5 < 2
    return torch.where(larger, embeddings * (1 + torch.finfo(embeddings.dtype).eps), embeddings)


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b|."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _run(session: Session, tokens: list[list[int]]) -> list[Tensor]:
    work = [(session.new_sequence(), ids) for ids in tokens]
    logits = [result.logits for result in session.forward(work, all_rows=True)]
    for sequence, _ in work:
        session.free(sequence)
    return logits


@torch.inference_mode()
def eager_logits(  # D193: also the model's own eager attention
    weights: LoadedWeights,
    ids: list[int],
    counts: Sequence[int] = (),
    *,
    told: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the logits, fp32 [tokens, vocab], of the model's own attention over an entire sequence.

    `counts`: chunk sizes, for a run over the model's own cache. `told`: additional keyword arguments.
    """
    model, tokens = weights.model, torch.tensor([ids], device=weights.device)
    model.set_attn_implementation("eager")
    parts, cache = [], None
    try:
        for part in tokens.split(list(counts) or len(ids), dim=1):
            output = model(input_ids=part, use_cache=bool(counts), past_key_values=cache, **(told or {}))
            parts.append(output.logits[0])
            cache = output.past_key_values if counts else None
    finally:
        model.set_attn_implementation(PACKED_NAME)
    return torch.cat(parts).float()
