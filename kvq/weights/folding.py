"""Scale folding: places where a decoder layer absorbs scales of Linear inputs without changing its output.

A Linear layer's columns are multiplied by s and its inputs divided by s; the division is applied to the
source of the inputs: a norm's weight, or the rows of an earlier Linear layer. The places are not inferred
from names: the layer's own forward pass is traced, and every fold is proven by running the layer before and
after it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvq.weights.linear import linear_at

Run = Callable[[], Tensor]  # the layer's output on a sample, fp32
# Names of Linear layers in the decoder layer that share an input, and of the norm that computed the input, or
# None if no norm did
SharedInput = tuple[tuple[str, ...], str | None]

_PROOF = 1e-5  # relative difference, max|a - b| / max|b| of a token


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fold:
    """A place into which scales can be folded."""

    names: tuple[str, ...]  # Linear layers whose inputs are divided
    source: str  # the norm or Linear layer whose weight is divided
    offset: float = 0.0  # a norm multiplies by weight + offset: 1 in Gemma's form
    tied: Tensor | None = None  # int64 [in]: each input's row of a Linear source; None for norms


def trace_inputs(layer: nn.Module, run: Run) -> list[SharedInput]:
    """Return groups of Linear layers that share an input, and each input's norm, in call order."""
    made: dict[int, str] = {}
    users: dict[int, list[str]] = {}
    kept: list[Tensor] = []  # kept alive, so that ids stay unique
    handles = []

    def hook(name: str, module: nn.Module) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            if isinstance(module, nn.Linear):
                kept.append(args[0])
                users.setdefault(id(args[0]), []).append(name)
            elif isinstance(output, Tensor):
                kept.append(output)
                made[id(output)] = name

        return note

    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) or _is_norm(module):
            handles.append(module.register_forward_hook(hook(name, module)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [(tuple(names), made.get(at)) for at, names in users.items()]


def find_folds(  # D178
    layer: nn.Module, run: Run, shared: Iterable[SharedInput], *, head_dim: int | None = None
) -> tuple[list[Fold], dict[str, str]]:
    """Return all folds of a decoder layer that are proven exact, and why other Linear layers have none.

    `run` computes the layer's output on a sample in fp32. `shared`: the result of `trace_inputs`. `head_dim`:
    the head dimension of V, used to recognize the heads of grouped-query attention.
    """
    folds: list[Fold] = []
    skipped: dict[str, str] = {}
    before: list[str] = []
    for names, norm in shared:
        if norm is not None:
            candidates = [Fold(names=names, source=norm, offset=offset) for offset in (0.0, 1.0)]
        elif len(names) == 1:
            candidates = list(_linear_sources(layer, names[0], before, head_dim))
        else:
            candidates = []
        before += names
        if (proven := next((fold for fold in candidates if _try(layer, run, fold)), None)) is not None:
            folds.append(proven)
        else:
            why = "no place before it takes scales without changing the layer's output"
            skipped |= dict.fromkeys(names, why)
    return folds, skipped


def apply_fold(layer: nn.Module, fold: Fold, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiply columns by `scale` and divide the inputs' source by `scale`, in place and in fp32.

    A norm's parameters are rounded to `dtype`, the checkpoint's dtype, and the columns are multiplied by the
    rounded divisors, so that rounding does not change the output.

    Returns the scales in effect, fp32 [in].
    """
    source = layer.get_submodule(fold.source)
    with torch.no_grad():
        if fold.tied is None:
            scale = _divide_norm(source, scale, fold.offset, dtype)
        else:
            _divide_rows(source, scale, fold.tied, dtype)
        for name in fold.names:
            linear_at(layer, name).weight *= scale
    return scale


def undoing(layer: nn.Module, fold: Fold) -> Callable[[], None]:
    """Return a function that undoes a fold applied after this call."""
    modules = [layer.get_submodule(name) for name in (fold.source, *fold.names)]
    parameters = {p for module in modules for p in module.parameters(recurse=False)}
    saved = [(p, p.detach().clone()) for p in parameters]

    def undo() -> None:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)

    return undo


def is_same(output: Tensor, before: Tensor) -> bool:
    """Return True if two outputs [..., hidden] agree at every token within a fold's tolerance.

    Tokens are compared separately, since a few tokens with huge values would hide the others' errors.
    """
    largest = before.abs().amax(-1).clamp_min(1e-30)
    return bool(((output - before).abs().amax(-1) <= _PROOF * largest).all())


def _try(layer: nn.Module, run: Run, fold: Fold) -> bool:
    """Return True if folding uneven scales keeps the layer's output; undo the fold in any case."""
    first = linear_at(layer, fold.names[0])
    source = layer.get_submodule(fold.source)
    if fold.tied is None and source.weight.shape != (first.in_features,):  # such as a norm of each head
        return False
    generator = torch.Generator().manual_seed(0)
    width = first.in_features if fold.tied is None else int(fold.tied.max()) + 1
    exponents = torch.rand(width, generator=generator, dtype=torch.float32) * 2 - 1
    scale = torch.exp2(exponents).to(first.weight.device)
    undo, before = undoing(layer, fold), run()
    try:
        apply_fold(layer, fold, scale if fold.tied is None else scale[fold.tied])
        return is_same(run(), before)
    finally:
        undo()


def _linear_sources(layer: nn.Module, name: str, before: list[str], head_dim: int | None) -> Iterator[Fold]:
    """Yield folds into earlier Linear layers whose outputs may be the inputs of `name`, latest first."""
    user = linear_at(layer, name)
    for source in reversed(before):
        maker = linear_at(layer, source)
        rows, device = maker.out_features, maker.weight.device
        if rows == user.in_features:
            yield Fold(names=(name,), source=source, tied=torch.arange(rows, device=device))
        elif head_dim and user.in_features % rows == 0 and rows % head_dim == 0:
            heads = torch.arange(rows, device=device).view(-1, 1, head_dim)
            tied = heads.expand(-1, user.in_features // rows, -1).flatten()
            yield Fold(names=(name,), source=source, tied=tied)


def _divide_norm(norm: nn.Module, scale: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """Divide a norm's weight by scales; return the scales in effect after rounding."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor), "a norm has a weight"
    old = weight + offset
    weight.copy_((old / scale - offset).to(dtype))
    now = weight + offset
    divided = torch.where((old != 0) & (now != 0), old / now, 1.0)
    weight.copy_(torch.where((old != 0) & (now != 0), weight, old - offset))
    if isinstance(bias, Tensor):
        bias.copy_((bias / divided).to(dtype))
    return divided


def _divide_rows(linear: nn.Module, scale: Tensor, tied: Tensor, dtype: torch.dtype) -> None:
    assert isinstance(linear, nn.Linear), "rows are a Linear layer's"
    rows = torch.ones(linear.out_features, device=scale.device, dtype=torch.float32)
    rows.index_copy_(0, tied, scale)
    linear.weight /= rows[:, None]
    if linear.bias is not None:
        linear.bias.copy_((linear.bias / rows).to(dtype))


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.ndim == 1
