"""Unquantized Linear layers on CPUs: packed weights, and results that don't depend on the batch.

kvq's own products sum a row in the same order in any batch. oneDNN's products, used where kvq has none, may
sum few rows in a different order than many, and one differing bit can flip a code of the KV cache. The number
of rows from which the order stays the same is measured when a model is first run.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvq.kernels import PlainWeight
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.library import load
from kvq.weights.experts import install_experts, stacked_experts
from kvq.weights.install import Weights, install
from kvq.weights.linear import (
    ROUTERS,
    PackedEmbedding,
    PackedLinear,
    QuantizedLinear,
    is_plain_lookup,
    replace_linear,
    runs_library_code,
    scale_of,
)
from kvq.weights.routers import batch_invariant_routers, is_batch_invariant

_CANDIDATES = (1, 2, 4, 8, 16)  # rows; beyond 16, padding would cost more than it gains
_MANY = 48  # number of rows that are summed in the same order as any larger number of rows
_VALUES = 1 << 16  # results to compare in 16 bits, where another order of summation rarely shows
_MAX_TIMES = 256
_OWN = ("auto", "cpu", "cpu-fp32")  # backends with kvq's own products
_FAST = ("avx512vnni", "avx512", "avx2")  # variants whose products are as fast as oneDNN's
# D160: 27 row counts: oneDNN keeps a kernel for each
_PIECE = 256  # rows of one product: larger products are 2 to 4% faster, but padding them costs as much


def padded_rows(rows: int) -> int:
    """Return the number of rows to pad `rows` rows to: 4 to 8 sizes per power of two."""
    if rows > _PIECE:
        pieces, rest = divmod(rows, _PIECE)
        return pieces * _PIECE + (padded_rows(max(rest, _CANDIDATES[-1])) if rest else 0)
    if rows <= 8:
        return 1 << max(0, rows - 1).bit_length()
    step = max(8, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


class OneDNNLinear(nn.Linear):  # D159: oneDNN without AVX2: MKL is slow elsewhere
    """A Linear layer for inference on CPUs, in fp32 or bf16.

    `weight` is a packed oneDNN tensor, or the plain [out, in] tensor if an embedding shares it.
    """

    def __init__(self, linear: nn.Linear, *, packs: bool) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight
        if packs:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            weight = nn.Parameter(packed, requires_grad=False)
        self.weight = weight
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = input.numel() // self.in_features
        size = padded_rows(rows)
        if size == rows or not rows:
            return self._product(input)
        padded = functional.pad(input.reshape(rows, self.in_features), (0, 0, 0, size - rows))
        return self._product(padded)[:rows].view(*input.shape[:-1], self.out_features)

    def _product(self, input: Tensor) -> Tensor:
        pieces = input.reshape(-1, self.in_features).split(_PIECE)
        linear = torch.ops.mkldnn._linear_pointwise
        outputs: list[Tensor] = [linear(piece, self.weight, self.bias, "none", [], "") for piece in pieces]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.view(*input.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, *, backend: str = "auto") -> None:
    """Replace a model's Linear layers on a CPU with kvq's own or oneDNN's, one at a time.

    Layers that neither supports stay unchanged. If a head shares its weight with an embedding, rows are
    looked up in kvq's panels; oneDNN's blocks don't allow this, so for oneDNN the weight stays unpacked.
    """
    _unfold_convolutions(model)
    for dtype in (torch.float32, torch.bfloat16):
        if has_own_products(dtype, backend):
            _pack_own(model, dtype)
    if has_own_products(torch.float32, backend):
        batch_invariant_routers(model)
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or is_batch_invariant(child) or not runs_library_code(child):
                continue
            if is_supported(child.weight.dtype):
                setattr(parent, name, OneDNNLinear(child, packs=id(child.weight) not in looked_up))


def _unfold_convolutions(model: nn.Module) -> None:
    """Replace GPT-2's layers y = x W + b, which transformers calls convolutions, with Linear layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Conv1D" and runs_library_code(child):
                weight = child.get_parameter("weight").detach().t().contiguous()
                linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
                linear.weight = nn.Parameter(weight, requires_grad=False)
                linear.bias = child.get_parameter("bias")
                setattr(parent, name, linear)


def has_own_products(dtype: torch.dtype, backend: str) -> bool:
    """Return True if Linear layers of this dtype run in kvq's own kernels on this CPU."""
    library = load()
    is_fast = not isinstance(library, str) and library.variant in _FAST
    return dtype in (torch.float32, torch.bfloat16) and backend in _OWN and is_fast


Lookups = dict[str, dict[str, nn.Embedding]]  # head name -> embeddings, by name, that share its weight


def own_linears(  # D157: own panels; 16-bit weights stay in 16 bits
    model: nn.Module, dtype: torch.dtype
) -> tuple[dict[str, nn.Linear], Lookups]:
    """Return Linear layers of `dtype` to replace with kvq's own, by name, and lookups in heads' weights."""
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and runs_library_code(module)
        and module.weight.dtype is dtype
        and name.rpartition(".")[2] not in ROUTERS
    }
    lookups = _lookups_of(model, linears)
    return {name: module for name, module in linears.items() if lookups.get(name, True)}, lookups


def install_own(model: nn.Module, weights: Weights, lookups: Lookups, dtype: torch.dtype) -> None:
    """Replace the layers that `own_linears` returned with packed ones; `weights`: one per layer, by name."""
    install(model, weights, torch.device("cpu"), backend="cpu", dtype=dtype)
    for name, embeddings in lookups.items():
        for own, module in embeddings.items():
            kernel = model.get_submodule(name).kernel
            assert isinstance(kernel, CpuLinear), "it shares its input with no other layer"
            replace_linear(model, own, PackedEmbedding(kernel, module.weight.dtype, scale_of(module)))


def _pack_own(model: nn.Module, dtype: torch.dtype) -> None:
    linears, lookups = own_linears(model, dtype)

    def weight(name: str) -> PlainWeight:
        return PlainWeight.narrowest(linears.pop(name).weight.detach())

    install_own(model, {name: partial(weight, name) for name in linears}, lookups, dtype)
    if dtype is not torch.float32:
        return
    experts = {
        name: form
        for name, form in stacked_experts(model).items()
        if model.get_submodule(name).down_proj.dtype is torch.float32
    }
    install_experts(model, experts, lambda name, expert, values: PlainWeight.narrowest(values), in_cpp=True)


def _lookups_of(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Lookups:
    """Return the embeddings that share a head's weight, keyed by head name, then by embedding name.

    The inner dictionary is empty, and the weight stays unpacked, if an embedding does more than look up rows
    or several layers share the weight.
    """
    shared: dict[int, dict[str, nn.Embedding]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding):
            shared.setdefault(id(module.weight), {})[name] = module
    users = Counter(id(module.weight) for module in linears.values())
    found = {}
    for name, linear in linears.items():
        if (embeddings := shared.get(id(linear.weight))) is not None:
            is_plain = users[id(linear.weight)] == 1 and all(map(is_plain_lookup, embeddings.values()))
            found[name] = embeddings if is_plain else {}
    return found


def is_supported(dtype: torch.dtype) -> bool:
    """Return True if oneDNN supports products with packed weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def invariant_rows(model: nn.Module, head: nn.Module | None) -> tuple[int, int]:  # D85
    """Return the minimum numbers of rows of a step, and of its logits, for batch-independent results.

    A value is 0 if no padding is needed, as the number of rows never affects the results.

    `head`: the layer that computes the logits. Shapes whose results depend on the number of rows even at 16
    rows are ignored, as padding would not help.
    """
    body: dict[tuple[int, int, str], nn.Linear | PackedLinear] = {}
    for module in model.modules():
        if _may_vary(module) and module is not head:
            fmt = module.fmt.name if isinstance(module, QuantizedLinear) else ""
            body.setdefault((module.in_features, module.out_features, fmt), module)
    heads = [head] if _may_vary(head) else []
    return _fewest(list(body.values())) if body else 0, _fewest(heads) if heads else 0


def _may_vary(module: nn.Module | None) -> TypeGuard[nn.Linear | PackedLinear]:
    """Return True if results may depend on the number of rows; in compiled kernels they never do."""
    if isinstance(module, nn.Linear):
        return not is_batch_invariant(module)
    return isinstance(module, PackedLinear) and module.backend != "cpu"


@torch.inference_mode()
def _fewest(layers: list[nn.Linear | PackedLinear]) -> int:
    fewest = 1
    for layer in layers:
        generator = torch.Generator().manual_seed(0)
        tried = sorted({padded_rows(n) if isinstance(layer, OneDNNLinear) else n for n in range(1, _MANY)})
        same = set(tried)
        dtype = layer.weight.dtype if isinstance(layer, nn.Linear) else torch.float32
        is_exact = dtype == torch.float32
        for _ in range(1 if is_exact else min(_MAX_TIMES, -(-_VALUES // layer.out_features))):
            x = torch.randn(_MANY, layer.in_features, generator=generator, dtype=torch.float32).to(dtype)
            many = _product(layer, x)
            same = {n for n in same if torch.equal(_product(layer, x[:n]), many[:n])}
        fits = [n for n in _CANDIDATES if same.issuperset(m for m in tried if m >= n)]
        if fits:
            fewest = max(fewest, fits[0])
    return fewest


def _product(layer: nn.Linear | PackedLinear, x: Tensor) -> Tensor:
    """Return a layer's matrix product alone; some routers are Linear layers that return more."""
    out = layer(x)
    if isinstance(out, Tensor):
        return out
    assert isinstance(layer, nn.Linear), "packed layers give what they multiply"
    return nn.Linear.forward(layer, x)
