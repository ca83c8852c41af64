"""Decoder layers run in few calls, for models whose steps Python and small operations would dominate.

A decoder layer in transformers takes some forty tensor operations and a dozen module calls. If kvq recognizes
every layer of a model, the model's steps run here, in C++ on CPUs and in Triton on GPUs, as one loop over the
same layer descriptions. The model's own code stays in place for any call that is not a kvq step, and the
load-time probe compares the two.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from kvq.errors import ConfigError
from kvq.kernels.decoder.cpu import runs_in_cpp
from kvq.kernels.decoder.parts import DecoderParts
from kvq.kernels.decoder.whole import CpuPass, ReadyPass
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.models.loading.cpu_layers import CpuLayers
from kvq.models.loading.layer_parts import describe
from kvq.models.parts.angles import Angles
from kvq.models.parts.norms import FusedRMSNorm, norm_weight
from kvq.models.parts.step import PackedStep
from kvq.weights import PackedLinear, hooks_of, runs_library_code
from kvq.weights.linear import PackedEmbedding, is_plain_lookup, scale_of

Layers = Callable[[Tensor, dict[str, tuple[Tensor, Tensor]], PackedStep], Tensor]


def fuse_layers(model: Any, windows: Sequence[int | None], *, in_triton: bool) -> bool:
    """Make a model run steps in few calls; return False and change nothing if a layer is not recognized.

    `windows`: the attention window of every layer, in tokens.
    """
    inner = model.base_model
    own: Iterable[nn.Module] = getattr(inner, "layers", ())
    layers = [describe(layer, inner, window) for layer, window in zip(own, windows, strict=False)]
    known = [layer for layer in layers if layer is not None]
    norm = norm_weight(getattr(inner, "norm", None))
    if len(known) < len(windows) or norm is None:
        return False
    if not in_triton and not all(map(runs_in_cpp, known)):
        return False
    run: Layers
    if in_triton:
        from kvq.models.loading.gpu_layers import gpu_layers  # which imports Triton

        run = gpu_layers(known, norm)
    else:
        run = CpuLayers(known, inner.norm)
    inner.forward = _FusedForward(inner, run, known)
    return True


def is_fused(model: Any) -> bool:
    """Return True if all layers run in compiled kernels; on CPUs, this makes rows' results independent."""
    return isinstance(model.base_model.__dict__.get("forward"), _FusedForward)


def runs_adapters(model: Any) -> bool:
    """Return True if a model's next pass applies a step's adapters itself, in compiled layers."""
    own = model.base_model.__dict__.get("forward")
    return isinstance(own, _FusedForward) and own.is_compiled and not own.is_hooked


def unfuse_layers(model: Any) -> None:
    """Restore the model's own forward pass."""
    if is_fused(model):
        del model.base_model.forward


def _ends_of(inner: Any, head: nn.Module, scale: float) -> CpuPass | None:
    """Return compiled code for a model's embedding, final norm and head, or None if not supported.

    `scale`: the factor by which embeddings are multiplied.
    """
    embedding, norm = inner.embed_tokens, inner.norm
    known = isinstance(norm, FusedRMSNorm) and isinstance(head, PackedLinear) and head.bias is None
    if not known or not isinstance(head.kernel, CpuLinear):
        return None
    table: Tensor | CpuLinear
    if isinstance(embedding, PackedEmbedding):
        own, table, dtype = embedding.scale, embedding.kernel, embedding.dtype
    elif isinstance(embedding, nn.Embedding) and is_plain_lookup(embedding):
        own, table, dtype = scale_of(embedding), embedding.weight.detach(), embedding.weight.dtype
    else:
        return None
    if own is not None and scale != 1.0:  # rows are rounded between two factors
        return None
    scale = scale if own is None else float(own.to(dtype))
    try:
        weight = NormWeight(weight=norm.weight.detach(), eps=norm.eps)
        return CpuPass(table, weight, head.kernel, dtype, scale)
    except ConfigError:
        return None


def _numbers_of(embedding: nn.Module, norm: Any) -> tuple[Any, ...]:
    """Return the data pointers of these modules' weights and the norm's epsilon."""
    own = embedding.weight.data_ptr() if isinstance(embedding, nn.Embedding) else None
    return own, norm.weight.data_ptr(), norm.eps


class _Inputs(TypedDict, total=False):
    """Keyword arguments of a causal language model's layers; others are passed on to the model's own code."""

    input_ids: Tensor
    position_ids: Tensor
    use_cache: bool
    kvq_step: PackedStep


class _FusedForward:
    """A model's forward pass through its final norm; calls other than kvq steps run the model's own code.

    The layers' submodules are read once, at creation; to replace one later, unfuse the model first.
    """

    def __init__(self, inner: Any, run: Layers, layers: list[DecoderParts]) -> None:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        self._own_of: Callable[..., Any] = type(inner).forward
        # The model refers to this object: a reference cycle would keep both alive until collected.
        self._inner: Callable[[], Any] = weakref.ref(inner)
        parts = [module for module in inner.modules() if module is not inner]
        self._hooks = list(chain.from_iterable(map(hooks_of, parts)))
        self._run = run
        self._angles = Angles(inner.rotary_emb, {layer.angles for layer in layers})
        self.scale: float = getattr(inner, "embedding_multiplier", 1.0)  # Granite's
        self._output = MoeModelOutputWithPast
        self.width: int = layers[0].output.out_features

    def __call__(self, *args: Any, **given: Unpack[_Inputs]) -> Any:
        """Return hidden states [1, rows, hidden] for token ids and positions [1, rows]."""
        step = given.get("kvq_step")
        if not isinstance(step, PackedStep) or args or self.is_hooked:
            return self._own_of(self._inner(), *args, **given)
        hidden = self.hidden(given["input_ids"], given["position_ids"], step)
        return self._output(last_hidden_state=hidden[None])

    @property
    def is_compiled(self) -> bool:
        """True if the layers run in C++."""
        return isinstance(self._run, CpuLayers)

    @property
    def is_hooked(self) -> bool:
        """True if the layers' modules, which steps bypass, have hooks."""
        return any(self._hooks)

    def whole(
        self, ends: CpuPass, tokens: Tensor, positions: Tensor, wanted: Tensor, step: PackedStep
    ) -> ReadyPass | None:
        """Return an entire step as one call, or None if it requires several."""
        if not isinstance(self._run, CpuLayers):
            return None
        return self._run.whole(ends, self._angles, tokens, positions, wanted, step)

    def hidden(self, tokens: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        """Return hidden states [rows, hidden] after the final norm; tokens and positions: [1, rows]."""
        x: Tensor = self._inner().embed_tokens(tokens)  # may have been replaced with another model's
        if self.scale != 1.0:
            x = x * self.scale
        return self._run(x[0], self._angles(x, positions), step)


class FusedPass:
    """A fused model's step that computes logits with the head alone, without transformers' wrapper."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._head: nn.Module = model.get_output_embeddings()
        self._layers: _FusedForward = model.base_model.forward
        self._hooks = [*hooks_of(model), *hooks_of(self._head), *hooks_of(model.base_model)]
        self._inner: Any = model.base_model
        self._modules: tuple[nn.Module, ...] = self._inner.embed_tokens, self._inner.norm, self._head
        self._ends = _ends_of(self._inner, self._head, self._layers.scale)
        self._numbers = None if self._ends is None else _numbers_of(*self._modules[:2])

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any) -> "FusedPass | None":
        """Return a model's pass, or None if a trial shows that the model does more than apply its head."""
        head = model.get_output_embeddings()
        if not is_fused(model) or not isinstance(head, nn.Module) or not runs_library_code(model):
            return None
        own = model.base_model.forward
        weight = next(model.base_model.parameters())
        hidden = torch.randn(
            1, 3, own.width, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        ).to(weight)
        ids = torch.zeros(1, 3, dtype=torch.int64, device=weight.device)
        model.base_model.forward = lambda *_, **__: own._output(last_hidden_state=hidden)
        try:
            made = model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=ids[0, :1] + 1)
        finally:
            model.base_model.forward = own
        alone = head(hidden[:, 1:2])
        return cls(model) if torch.equal(made.logits, alone) else None

    @property
    def is_free(self) -> bool:
        """True while the modules that steps bypass have no hooks."""
        return not (any(self._hooks) or self._layers.is_hooked or "forward" in self._model.__dict__)

    @property
    def is_whole(self) -> bool:
        """True while modules have no hooks and one compiled call may suffice for a step."""
        return self._ends is not None and self.is_free

    def ready(self, tokens: Tensor, positions: Tensor, wanted: Tensor, step: PackedStep) -> ReadyPass | None:
        """Return the step of `__call__` as one call, not yet started, or None if it requires several."""
        if self._ends is None or step.keeps_hidden or not self._has_same_ends():
            return None
        return self._layers.whole(self._ends, tokens, positions, wanted, step)

    def _has_same_ends(self) -> bool:
        """Return True if embedding and norm are unchanged and no module's `forward` has been replaced."""
        ends = self._inner.embed_tokens, self._inner.norm
        is_same = all(now is before for now, before in zip(ends, self._modules, strict=False))
        is_own = not any("forward" in module.__dict__ for module in self._modules)
        return is_same and is_own and _numbers_of(*ends) == self._numbers

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor, step: PackedStep) -> Tensor:
        """Return logits [wanted, vocab]; `tokens`, `positions`: int64 [rows]; `wanted`: int64 row indices."""
        whole = self.ready(tokens, positions, wanted, step)
        if whole is not None:
            whole.run()
            step.attention_s += whole.seconds
            return whole.logits
        hidden = self._layers.hidden(tokens[None], positions[None], step)
        if step.keeps_hidden:
            step.hidden = hidden
        logits: Tensor = self._head(hidden.index_select(0, wanted))
        return logits
