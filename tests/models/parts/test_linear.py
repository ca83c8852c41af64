"""Packed Linear layers: the results of PyTorch's, the same for a row in any batch, few kernels."""

import copy
import sys

import pytest
import torch
from torch import nn

from kvq.kernels.native.library import load
from kvq.models.parts.linear import OneDNNLinear, invariant_rows, pack_linears, padded_rows
from kvq.weights import PackedLinear, packed_layers, weight_bytes
from kvq.weights.linear import PackedEmbedding

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN here")


BACKENDS = ["reference"] if isinstance(load(), str) or load().variant == "portable" else ["reference", "cpu"]


def packed(linear: nn.Linear, backend: str = "reference") -> nn.Module:
    model = nn.Sequential(linear)
    pack_linears(model, backend=backend)
    return model[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(33, 17), (1, 1), (96, 64)])
@torch.inference_mode()
def test_results_are_those_of_linear_for_inputs_of_any_shape(dtype, bias, shape, backend):
    plain = nn.Linear(*shape, bias=bias).to(dtype)
    layer = packed(plain, backend)
    assert isinstance(layer, PackedLinear) == (backend == "cpu" and dtype is not torch.float16)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for lead in [(), (1,), (5,), (2, 5), (0,), (1, 0), (3, 1, 7), (70,)]:
        x = torch.randn(*lead, shape[0]).to(dtype)
        torch.testing.assert_close(layer(x), plain(x), rtol=tolerance, atol=tolerance)
    wide = torch.randn(6, 2 * shape[0]).to(dtype)[:, ::2]
    torch.testing.assert_close(layer(wide), plain(wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 40), (333, 97), pytest.param((768, 256), marks=pytest.mark.long)])
@torch.inference_mode()
def test_from_the_measured_number_of_rows_on_a_row_is_the_same_in_any_batch(dtype, shape):
    layer = packed(nn.Linear(*shape, bias=False).to(dtype))
    fewest, _ = invariant_rows(nn.Sequential(layer), None)
    for _ in range(5):
        x = torch.randn(200, shape[0]).to(dtype)
        whole = layer(x)
        differing = {n for n in [*range(1, 70), 100, 128, 199] if not torch.equal(layer(x[:n]), whole[:n])}
        if any(n > 16 for n in differing):
            pytest.skip("padding a few rows to 16 would not help on this CPU")
        assert all(n < fewest for n in differing)


class ScaledEmbedding(nn.Embedding):
    """As Gemma 3's."""

    def __init__(self, rows, dim):
        super().__init__(rows, dim)
        self.embed_scale = torch.tensor(dim**0.5)

    def forward(self, input):
        return super().forward(input) * self.embed_scale


class CappedEmbedding(nn.Embedding):
    """One that does more than look rows up."""

    def forward(self, input):
        return super().forward(input).clamp(max=0.5)


def tied(embedding):
    """A model whose head has the embedding's weight, of 16 bits in fp32, with a bias of its own."""
    embedding.weight.data = embedding.weight.bfloat16().float()
    head = nn.Linear(24, 40)
    head.weight = embedding.weight
    return nn.ModuleDict({"head": head, "embedding": embedding, "other": nn.Linear(24, 24)})


@torch.inference_mode()
def test_weights_that_are_embeddings_too_are_not_copied():
    model = tied(nn.Embedding(40, 24))
    weight = model["embedding"].weight
    pack_linears(model, backend="reference")
    assert isinstance(model["head"], OneDNNLinear)
    assert model["head"].weight is model["embedding"].weight is weight
    x = torch.randn(3, 24)
    torch.testing.assert_close(model["head"](x), x @ weight.T + model["head"].bias)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernels with AVX2 here")
@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
@torch.inference_mode()
def test_an_embedding_that_serves_for_the_head_lies_in_its_panels_alone(kind):
    plain = tied(kind(40, 24))
    model = copy.deepcopy(plain)
    pack_linears(model, backend="cpu")
    assert isinstance(model["embedding"], PackedEmbedding)
    assert [tuple(p.shape) for p in model.parameters()] == [(40,), (24,)]  # biases
    assert weight_bytes(model) == 48 * 32 * 2 + 32 * 24 * 4 + 4 * (40 + 24)
    x = torch.randn(3, 24)
    torch.testing.assert_close(model["head"](x), plain["head"](x))
    for ids in (torch.tensor(39), torch.tensor([[0, 16, 17], [39, 1, 1]]), torch.arange(40)[::3]):
        assert torch.equal(model["embedding"](ids), plain["embedding"](ids))
    assert torch.equal(model["embedding"].weight, plain["embedding"].weight)
    compiled = torch.compile(model["embedding"], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), plain["embedding"](ids))
    for broken in (40, -1):
        with pytest.raises(IndexError, match="a row was looked up that the weight does not have"):
            model["embedding"](torch.tensor([0, broken]))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernels with AVX2 here")
@torch.inference_mode()
def test_what_does_more_than_look_rows_up_stays_as_it_is():
    model = tied(CappedEmbedding(40, 24))
    two_heads = tied(nn.Embedding(40, 24))
    two_heads["second"] = nn.Linear(24, 40)
    two_heads["second"].weight = two_heads["embedding"].weight
    for some in (model, two_heads):
        wanted = some["embedding"](torch.arange(40))
        pack_linears(some, backend="cpu")
        assert some["head"].weight is some["embedding"].weight
        assert torch.equal(some["embedding"](torch.arange(40)), wanted)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernels with AVX2 here")
@torch.inference_mode()
def test_weights_of_16_bits_take_16_and_change_no_bit():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, 48, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    model["o_proj"] = nn.Linear(64, 64)
    for layer in model.values():
        layer.weight.data = layer.weight.to(torch.bfloat16).float()
    stored = {name: layer.weight.detach() for name, layer in model.items()}
    wanted = {name: packed(layer, "cpu") for name, layer in model.items()}
    pack_linears(model, backend="cpu")
    assert len(packed_layers(model)) == 4
    assert weight_bytes(model) == 2 * 64 * (3 * 48 + 64) + 4 * 64
    x = torch.randn(5, 64)
    for name, layer in model.items():
        assert torch.equal(layer(x), wanted[name](x))
        assert torch.equal(layer.weight, stored[name])
    assert invariant_rows(model, None) == (0, 0)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernels with AVX2 here")
@torch.inference_mode()
def test_layers_in_bf16_keep_their_type():
    torch.manual_seed(0)
    model = tied(nn.Embedding(40, 24)).bfloat16()
    plain = copy.deepcopy(model)
    pack_linears(model, backend="cpu")
    assert isinstance(model["embedding"], PackedEmbedding)
    assert model["other"].weight.dtype is torch.bfloat16
    assert torch.equal(model["other"].weight, plain["other"].weight)
    rows = model["embedding"](torch.tensor([3, 39]))
    assert torch.equal(rows, plain["embedding"](torch.tensor([3, 39])))
    torch.testing.assert_close(model["head"](rows), plain["head"](rows), rtol=2e-2, atol=2e-2)
    assert invariant_rows(model, model["head"]) == (0, 0)


def test_products_have_few_sizes():
    sizes = {padded_rows(n) for n in range(1, 2049)}
    assert len({size for size in sizes if size <= 256}) == 27
    assert {size % 256 for size in sizes if size > 256} < {0, *(size for size in sizes if size <= 256)}
    assert all(n <= padded_rows(n) < n + max(8, min(16, n / 8)) for n in range(1, 5000))
    assert all(padded_rows(size) == size for size in sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@torch.inference_mode()
def test_memory_does_not_grow_with_every_new_number_of_rows():
    def resident() -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

    layers = [packed(nn.Linear(256, 32 * i, bias=False)) for i in range(1, 9)]
    x = torch.randn(512, 256)

    def run(rows):
        for layer in layers:
            layer(x[:rows])

    for rows in sorted({padded_rows(n) for n in range(1, 513)}):
        run(rows)
    before = resident()
    for rows in range(1, 513):
        run(rows)
    assert resident() - before < 40 << 20  # one kernel for each would be 2 GiB
