"""Perplexity, KL divergence and top-1 agreement of KV formats, over the path that serves.

Every window's tokens go through the session's own write-then-read path: quantized into blocks
first, attended from there. All formats see the same chunk before any sees the next, so that only
one chunk of baseline logits is ever kept, and their times are taken side by side.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvq.blockmgr import Sequence
from kvq.errors import RequestError
from kvq.evals.windows import token_windows
from kvq.formats import Code, KVRecipe
from kvq.models import Model, Session

Progress = Callable[[int, int], None]  # (steps done, steps in all)

INSTRUMENT_WINDOW = 64  # tokens
INSTRUMENT_LIMIT = 0.05  # an instrument that can see must lose this much, relatively
_LARGEST_LOSS = 700.0  # nats per token; exp of more overflows
_LOGITS_BYTES = 256 << 20  # of one chunk's logits, which sets the default chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityRow:
    """What one format costs. Fields are the JSON keys of `kvq perplexity`."""

    kv: str
    bits_per_element: float  # scales included
    kv_bytes_per_token: float
    compression: float  # bf16 bytes / these bytes
    tokens: int  # predicted
    perplexity: float
    perplexity_change: float  # relative to the baseline: 0.01 is 1% worse
    kl_mean: float  # nats per token, of this format from the baseline
    kl_p999: float
    top1_agreement: float  # share of tokens with the baseline's likeliest token
    seconds: float
    attention_window: int | None = None  # tokens, when attention was cut short on purpose
    instrument: str = ""  # "window" or "int2": the rows that check the instrument


@dataclass(kw_only=True, slots=True)
class _Candidate:
    """One format on its way through the text."""

    label: str
    model: Model
    session: Session
    kl: Tensor  # fp32 [tokens to predict], on the CPU; one buffer, small pieces would fragment the heap
    window_limit: int | None = None
    role: str = ""  # see PerplexityRow.instrument
    sequence: Sequence | None = None
    seconds: float = 0.0
    nll: float = 0.0  # nats, summed
    tokens: int = 0
    agree: int = 0


def measure_perplexity(
    model: Model,
    kv: str | list[str | KVRecipe],
    text: str,
    *,
    context: int = 1024,
    chunk: int | None = None,
    max_windows: int | None = None,
    attention_window: int | None = None,
    instrument: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[PerplexityRow]:
    """Measure formats against the first unquantized one among them.

    If all are quantized, the weights' own type goes first as the baseline. `context`: tokens per
    window. `chunk`: tokens per prefill step. `attention_window` shortens attention for all rows;
    `instrument` appends two rows that must look bad if the model and text can show damage at all:
    the baseline with a 64-token attention window, and 2-bit KV.

    Raises:
        RequestError: text shorter than a window, or a context beyond the model's.
        ConfigError: a format that is unknown, doesn't fit, or lacks its scales.
    """
    if isinstance(kv, str):
        kv = [kv]
    if not kv:
        raise RequestError("no KV format was named; try fp32,int8,int4")
    if context > model.weights.max_context:
        raise RequestError(
            f"--context {context} is beyond this model's context of {model.weights.max_context} tokens"
        )
    if attention_window is not None and attention_window < 1:
        raise RequestError(f"the attention window must be at least 1 token, got {attention_window}")
    windows = token_windows(model.tokenizer, text, context=context, max_windows=max_windows)
    candidates = _candidates(
        model, kv, context, attention_window, instrument, tokens=len(windows) * (context - 1)
    )
    baseline = next(c for c in candidates if not c.model.recipe.is_quantized)
    candidates.sort(key=lambda c: c is not baseline)  # stable: the baseline runs first
    size = _chunk_size(model, context, chunk)
    total = len(windows) * -(-context // size) * len(candidates)
    done = 0
    for ids in windows:
        for candidate in candidates:
            candidate.sequence = candidate.session.new_sequence()
        for at in range(0, len(ids), size):
            reference: Tensor | None = None
            for candidate in candidates:
                log_probs = _run_chunk(candidate, ids[at : at + size])
                reference = log_probs if reference is None else reference
                _account(candidate, log_probs, reference, ids[at + 1 : at + size + 1])
                done += 1
                progress(done, total)
        for candidate in candidates:
            assert candidate.sequence is not None, "opened above"
            candidate.session.free(candidate.sequence)
    base = _perplexity(baseline)
    return [_row(c, base) for c in candidates]


def instrument_check(rows: list[PerplexityRow]) -> dict[str, object]:
    """Say whether the model and text of these rows can see damage; see `measure_perplexity`.

    Returns JSON: the relative changes with a short window and with 2-bit KV, the limit, and `passed`.
    """
    window = next(r for r in rows if r.instrument == "window")
    int2 = next(r for r in rows if r.instrument == "int2")
    changes = (window.perplexity_change, int2.perplexity_change)
    return {
        "window_tokens": INSTRUMENT_WINDOW,
        "window_change": changes[0],
        "int2_format": int2.kv,
        "int2_change": changes[1],
        "limit": INSTRUMENT_LIMIT,
        "passed": min(changes) >= INSTRUMENT_LIMIT,
    }


def _candidates(
    model: Model,
    kv: list[str | KVRecipe],
    context: int,
    window: int | None,
    instrument: bool,
    tokens: int,
) -> list[_Candidate]:
    models = [model.with_kv(name) for name in kv]
    if all(m.recipe.is_quantized for m in models):
        models.insert(0, model.with_kv("auto"))
    wanted = [(m, window, "int2" if instrument and _is_int2(m) else "") for m in models]
    if instrument:
        unquantized = next(m for m in models if not m.recipe.is_quantized)
        wanted.append((unquantized, INSTRUMENT_WINDOW, "window"))
        if not any(map(_is_int2, models)):
            wanted.append((model.with_kv("int2"), window, "int2"))
    made = []
    for m, limit, role in wanted:
        session = m.session(max_tokens=context)
        session.window_limit = limit
        kl = torch.zeros(tokens)
        made.append(
            _Candidate(label=m.recipe.name, model=m, session=session, kl=kl, window_limit=limit, role=role)
        )
    return made


def _is_int2(model: Model) -> bool:
    """True if K and V of every layer are stored in 2 bits."""
    return all(layer.k.code is layer.v.code is Code.INT2 for layer in model.recipe.layers)


def _chunk_size(model: Model, context: int, chunk: int | None) -> int:
    if chunk is not None:
        if chunk < 1:
            raise RequestError(f"chunk must be at least 1 token, got {chunk}")
        return min(chunk, context)
    return max(1, min(context, _LOGITS_BYTES // (4 * model.geometry.vocab_size)))


def _run_chunk(candidate: _Candidate, ids: list[int]) -> Tensor:
    """Log-probabilities after each token of a chunk, fp32 [tokens, vocab]."""
    assert candidate.sequence is not None, "opened by measure_perplexity"
    start = time.perf_counter()
    result = candidate.session.forward([(candidate.sequence, ids)], all_rows=True)[0]
    candidate.seconds += time.perf_counter() - start
    return torch.log_softmax(result.trusted_logits(), dim=-1)


def _account(candidate: _Candidate, log_probs: Tensor, reference: Tensor, targets: list[int]) -> None:
    rows = len(targets)  # one less than the chunk at a window's end
    if not rows:
        return
    log_probs, reference = log_probs[:rows], reference[:rows]
    target = torch.tensor(targets, device=log_probs.device)
    candidate.nll -= float(log_probs.gather(1, target[:, None]).double().sum())
    candidate.agree += int((log_probs.argmax(-1) == reference.argmax(-1)).sum())
    divergence = (reference.exp() * (reference - log_probs)).sum(-1)
    candidate.kl[candidate.tokens : candidate.tokens + rows] = divergence
    candidate.tokens += rows


def _perplexity(candidate: _Candidate) -> float:
    """exp of the mean negative log-likelihood."""
    mean = candidate.nll / candidate.tokens
    if not mean < _LARGEST_LOSS:  # NaN too
        raise RequestError(
            f"{candidate.label}: the loss is {mean:.3g} nats a token, which no perplexity can express; "
            f"the weights or the dtype overflow, or the tokenizer is another model's"
        )
    return math.exp(mean)


def _row(candidate: _Candidate, baseline_perplexity: float) -> PerplexityRow:
    model = candidate.model
    kl = candidate.kl.double()
    perplexity = _perplexity(candidate)
    nbytes = model.kv_bytes_per_token
    return PerplexityRow(
        kv=candidate.label,
        bits_per_element=model.bits_per_element,
        kv_bytes_per_token=nbytes,
        compression=2 * model.geometry.elements_per_token / nbytes,
        tokens=candidate.tokens,
        perplexity=perplexity,
        perplexity_change=perplexity / baseline_perplexity - 1,
        kl_mean=float(kl.mean()),
        kl_p999=float(np.quantile(kl.numpy(), 0.999)),
        top1_agreement=candidate.agree / candidate.tokens,
        seconds=candidate.seconds,
        attention_window=candidate.window_limit,
        instrument=candidate.role,
    )
