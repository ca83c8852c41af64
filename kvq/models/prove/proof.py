"""Proof that kvq runs a model from an unlisted family correctly.

A tiny copy of the model, run over kvq's blocks with tokens split and packed in many ways, must give the same
results as with its own attention. For listed families, a tiny copy is used to check their windows.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq.errors import KVQError, ModelError, first_lines
from kvq.formats import KVRecipe
from kvq.geometry import ModelGeometry, parse_geometry
from kvq.geometry.parse import WINDOW_KEYS
from kvq.layout import plan_layout
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.weights import LoadedWeights, adapt, place
from kvq.models.observe.geometry import observe
from kvq.models.observe.support import is_listed
from kvq.models.observe.tiny_copy import CONTEXT, WINDOW, build_tiny_copy
from kvq.models.prove.probe import OF_NOISE, eager_logits, noise, relative_error
from kvq.models.run.session import Session

TOLERANCE = 1e-5  # max|a - b| / max|b|, of logits in fp32
_ROUNDING = 1e-3  # the same measure, for a model's own code that continues from a state
_SHALLOW = 2  # layers of a tiny copy, or more to cover all kinds
# D191: eight layers: code may depend on a layer's number
_DEEP = 8  # layers of a second copy: code may depend on their numbers if the config lists no kinds
_OF_DEPTH = 1e-3  # the same measure: rounding errors grow with depth; real differences are far larger
_SHOWS = 1e-2  # the same measure: the minimum change in the last logits if early tokens are dropped
# Tokens of two sequences in every step: chunks that end within blocks and windows, and single tokens.
# The total exceeds 64, the chunk size of recurrences.
_STEPS = ((WINDOW - 3, 1), (1, 1), (5 * WINDOW + 5, 2 * WINDOW), (1, 1), (1, 1), (WINDOW + 9, 1), (1, 1))
_BLOCK = 8  # tokens

_log = logging.getLogger("kvq")


def prove(prepared: PreparedModel) -> None:  # D188: unlisted families: observed, then proven on a copy
    """Check the code of a prepared model or, for a listed family, the windows of its config.

    Raises:
        ModelError: the model's own attention gives other results, or no tiny copy can be built or run.
    """
    family = prepared.geometry.model_type
    if is_listed(prepared.geometry):
        if any(prepared.config.get(name) for name in WINDOW_KEYS):
            _check_windows(prepared)
        return
    try:
        found = _error_of(_tiny_copy(prepared))
        if (deep := _deep_tiny_copy(prepared)) is not None:
            _check_whole(deep, _DEEP, "of more layers")
    except _Unproven as why:
        raise ModelError(
            f"kvq does not run {family}: it is not among the families that were checked, and {why}"
        ) from why
    except KVQError:
        raise
    except Exception as error:  # code that was never tried may raise anything
        raise ModelError(
            f"kvq does not run {family}: it is not among the families that were checked, and a small copy "
            f"can't be run ({first_lines(error)})"
        ) from error
    _log.warning(
        "%s is not among the checked families; it agrees with its own attention to %.0e", family, found
    )


def _check_windows(prepared: PreparedModel) -> None:
    """Compare a listed family's windows with those of its own code, over more tokens than they span.

    Raises:
        ModelError: the results differ, or no tiny copy can be built.
    """
    model = build_tiny_copy(prepared.config, _SHALLOW)
    small = _loaded(prepared, model, parse_geometry(model.config.to_dict()))
    try:
        _check_whole(small, _SHALLOW, "with short windows")
    except _Unproven as why:
        named = ", ".join(name for name in WINDOW_KEYS if prepared.config.get(name))
        raise ModelError(
            f"kvq does not run {prepared.geometry.model_type} with what its config.json says of windows "
            f"({named}): {why}"
        ) from why


class _Unproven(Exception):
    """Raised with the reason why a tiny copy proves nothing."""


def _error_of(weights: LoadedWeights) -> float:
    """Return the largest relative error of a tiny copy's logits.

    Raises:
        _Unproven: the error is too large or can't be measured.
    """
    ids = [_tokens(s, sum(step[s] for step in _STEPS), weights.geometry.vocab_size) for s in (0, 1)]
    far = [layer.window for layer in weights.geometry.layers if (layer.window or 0) >= len(ids[0])]
    if far:
        raise _Unproven(
            f"its window of {far[0]} tokens is none that its config names, so no small one shows it"
        )
    wanted = [eager_logits(weights, own) for own in ids]
    without = eager_logits(weights, ids[0][-3:])[-1]  # only the last few tokens
    if not relative_error(without, wanted[0][-1]) >= _SHOWS:
        raise _Unproven("a small one doesn't look at its context, so it shows nothing")
    cut = max(map(relative_error, _in_steps(weights, ids), wanted))
    whole = relative_error(_in_steps(weights, ids[:1], ((len(ids[0]),),))[0], wanted[0])
    if max(cut, whole) <= TOLERANCE:
        return max(cut, whole)
    if whole <= TOLERANCE and weights.geometry.states:
        return _error_in_steps(weights, ids, wanted)
    if whole > TOLERANCE and relative_error(eager_logits(weights, ids[0]), wanted[0]) > TOLERANCE:
        raise _Unproven("its own code gives something else each time: it carries something from call to call")
    if whole > TOLERANCE and not _counts_from_0(weights, ids[0], wanted[0]):
        raise _Unproven("its code doesn't number positions 0, 1, 2")
    if max(cut, whole) <= OF_NOISE * min(TOLERANCE, noise(weights, ids, wanted)):
        return max(cut, whole)
    what = "how it is cut and packed changes it" if whole <= TOLERANCE else "its own attention differs"
    raise _Unproven(
        f"in a small one, over {len(ids[0])} tokens, {what} (relative error {max(cut, whole):.1e}, allowed "
        f"{TOLERANCE:.0e})"
    )


def _error_in_steps(weights: LoadedWeights, ids: list[list[int]], whole: list[Tensor]) -> float:  # D199
    """Return the error of a model that keeps states, compared with its own code run in the same chunks.

    Continuing from a state causes rounding differences from a single pass that exceed the tolerance.

    Raises:
        _Unproven: the error is too large, or the model's own code can't run in chunks.
    """
    cuts = [[step[s] for step in _STEPS] for s in range(len(ids))]
    own = [eager_logits(weights, *pair) for pair in zip(ids, cuts, strict=True)]
    if (apart := max(map(relative_error, own, whole))) > _ROUNDING:
        raise _Unproven(
            f"its own code doesn't continue correctly from a state over several tokens (relative error in a "
            f"small copy: {apart:.1e})"
        )
    if (found := max(map(relative_error, _in_steps(weights, ids), own))) > TOLERANCE:
        raise _Unproven(
            f"in a small one, over {len(ids[0])} tokens, its own code over its own cache differs (relative "
            f"error {found:.1e}, allowed {TOLERANCE:.0e})"
        )
    return found


def _check_whole(weights: LoadedWeights, fewest: int, kind: str) -> None:
    """Compare a tiny copy of at least `fewest` layers, run by kvq, with the same copy run by its own code.

    Raises:
        _Unproven: the results differ.
    """
    ids = _tokens(0, sum(step[0] for step in _STEPS), weights.geometry.vocab_size)
    [found] = _in_steps(weights, [ids], ((len(ids),),))
    untouched = adapt(build_tiny_copy(weights.prepared.config, fewest), weights.prepared)
    own = LoadedWeights(weights.prepared, untouched)
    if (error := relative_error(found, eager_logits(own, ids))) > _OF_DEPTH:
        raise _Unproven(
            f"in a small one {kind}, over {len(ids)} tokens, its own code differs (relative error "
            f"{error:.1e}, allowed {_OF_DEPTH:.0e})"
        )


def _deep_tiny_copy(prepared: PreparedModel) -> LoadedWeights | None:
    """Return a deeper tiny copy, or None if impossible, as for Gemma 4 Unified with its per-layer sizes."""
    try:
        return _tiny_copy(prepared, _DEEP)
    except ModelError:
        return None


def _tiny_copy(prepared: PreparedModel, layers: int = _SHALLOW) -> LoadedWeights:
    model = build_tiny_copy(prepared.config, layers)
    return _loaded(prepared, model, observe(model))


def _loaded(prepared: PreparedModel, model: Any, geometry: ModelGeometry) -> LoadedWeights:
    small = replace(
        prepared,
        geometry=geometry,
        device=torch.device("cpu"),
        dtype=torch.float32,
        rounded_to=None,
        max_context=CONTEXT,
        block_size=_BLOCK,
        backend="auto",
        cache="kvq",
    )
    return LoadedWeights(small, place(model, small))


def _tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    ids = torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids[count // 3 : count // 3 + 2] = [2, 1]  # end and begin tokens, which code may look for
    return list(ids)


@torch.inference_mode()
def _counts_from_0(weights: LoadedWeights, ids: list[int], wanted: Tensor) -> bool:
    """Return True if the model's own code returns the same result when passed positions from 0."""
    told = {"position_ids": torch.arange(len(ids), device=weights.device)[None]}
    return relative_error(eager_logits(weights, ids, told=told), wanted) <= TOLERANCE


def _in_steps(
    weights: LoadedWeights, ids: list[list[int]], steps: tuple[tuple[int, ...], ...] = _STEPS
) -> list[Tensor]:
    """Return each sequence's logits, fp32 [tokens, vocab]; `steps`: tokens of each sequence per step."""
    geometry = weights.geometry
    layout = plan_layout(geometry, KVRecipe.uniform("fp32", geometry.head_dims), block_size=_BLOCK)
    session = Session(weights, layout, max_tokens=CONTEXT, max_sequences=len(ids))
    sequences, done = [session.new_sequence() for _ in ids], [0] * len(ids)
    rows: list[list[Tensor]] = [[] for _ in ids]
    for counts in steps:
        work = []
        for i, count in enumerate(counts):
            work.append((sequences[i], ids[i][done[i] : done[i] + count]))
            done[i] += count
        for own, result in zip(rows, session.forward(work, all_rows=True), strict=True):
            own.append(result.logits)
    return [torch.cat(own) for own in rows]
