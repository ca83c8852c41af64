"""Proof that a family may be served which is on no list.

A tiny copy of the model has to compute over kvq's blocks, cut and packed in many ways, what its own attention
computes. For families on the list a tiny copy shows their windows.
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
_ROUNDING = 1e-3  # in the same measure, of a model's own code that goes on from a state
_SHALLOW = 2  # layers of a tiny copy, or more where these are of further kinds
# D191: eight layers: code may go by a layer's number
_DEEP = 8  # layers of a second copy: code may go by their numbers where no list in the config tells kinds
_OF_DEPTH = 1e-3  # in the same measure: roundings grow with layers, what is computed otherwise shows by far
_SHOWS = 1e-2  # what all but the last tokens have to change in the last logits, in the same measure
# Tokens of two sequences in every step: pieces that end within blocks and windows, and one by one.
# More than 64 in all, which recurrences are computed in chunks of.
_STEPS = ((WINDOW - 3, 1), (1, 1), (5 * WINDOW + 5, 2 * WINDOW), (1, 1), (1, 1), (WINDOW + 9, 1), (1, 1))
_BLOCK = 8  # tokens

_log = logging.getLogger("kvq")


def prove(prepared: PreparedModel) -> None:  # D188: families on no list: observed, then proven on a twin
    """Check the code of a prepared model; for a family on the list, the windows of its config.

    Raises:
        ModelError: its own attention gives something else, or no tiny copy can be made or run.
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
    """Hold the windows of a listed family against its own code, over more tokens than they span.

    Raises:
        ModelError: they differ, or no tiny copy can be made.
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
    """The reason why a tiny copy proves nothing."""


def _error_of(weights: LoadedWeights) -> float:
    """Return the largest relative error of a tiny copy's logits.

    Raises:
        _Unproven: it is too large, or could not be seen.
    """
    ids = [_tokens(s, sum(step[s] for step in _STEPS), weights.geometry.vocab_size) for s in (0, 1)]
    far = [layer.window for layer in weights.geometry.layers if (layer.window or 0) >= len(ids[0])]
    if far:
        raise _Unproven(
            f"its window of {far[0]} tokens is none that its config names, so no small one shows it"
        )
    wanted = [eager_logits(weights, own) for own in ids]
    without = eager_logits(weights, ids[0][-3:])[-1]  # what came before the last few tokens
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
    """Return the error of a model that keeps states, against its own code cut alike.

    Going on from a state rounds otherwise than computing all at once, by more than is allowed.

    Raises:
        _Unproven: it is too large, or its own code can't be cut.
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
    """Hold a tiny copy of at least `fewest` layers, without kvq's modules, against its own code.

    Raises:
        _Unproven: there are some.
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
    """Return a deeper copy, or None if layers can't be cut there: Gemma 4 Unified has sizes by layer."""
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
    ids[count // 3 : count // 3 + 2] = [2, 1]  # an end and a beginning, which code may look for
    return list(ids)


@torch.inference_mode()
def _counts_from_0(weights: LoadedWeights, ids: list[int], wanted: Tensor) -> bool:
    """True if the model's own code gives the same result when it gets positions."""
    told = {"position_ids": torch.arange(len(ids), device=weights.device)[None]}
    return relative_error(eager_logits(weights, ids, told=told), wanted) <= TOLERANCE


def _in_steps(
    weights: LoadedWeights, ids: list[list[int]], steps: tuple[tuple[int, ...], ...] = _STEPS
) -> list[Tensor]:
    """fp32 [tokens, vocab] of each sequence, run together, so many tokens of each a step."""
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
