"""Quantized layers in a model's place: joined products, one-call MLPs, and when they are left apart."""

import copy
import sys
import threading

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from kvq.formats.weights import parse_weight_format
from kvq.kernels.linear.cpu import CpuLinear
from kvq.kernels.native.library import load
from kvq.weights import QuantizedLinear, install, round_weight
from kvq.weights.install import GatedMLP, JoinedPart, _Joined

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
CPU = torch.device("cpu")


class MLP(LlamaMLP):
    """Llama's, with an activation of choice."""

    def __init__(self, act: nn.Module, *, bias: bool = False) -> None:
        super().__init__(LlamaConfig(hidden_size=64, intermediate_size=96, mlp_bias=bias))
        self.act_fn = act


class Swapped(MLP):
    """Looks alike and gates the other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    forward.__module__ = LlamaMLP.forward.__module__  # as if a library's: the trial tells


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 48)
        self.k_proj = nn.Linear(64, 16)
        self.v_proj = nn.Linear(64, 17, bias=False)


def rounded(model: nn.Module, name: str) -> dict:
    """What `install` takes, for all of a model's layers."""
    fmt = parse_weight_format(name)
    return {
        own: lambda linear=linear: round_weight(linear.weight.detach(), fmt)
        for own, linear in model.named_modules()
        if isinstance(linear, nn.Linear)
    }


def quantize(model: nn.Module, name: str = "int8_g32", backend: str = "auto") -> nn.Module:
    install(model, rounded(model, name), CPU, backend=backend, dtype=torch.float32)
    return model


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")])
@torch.inference_mode()
def test_a_gated_mlp_becomes_one_call_with_the_results_of_three(act: nn.Module) -> None:
    if isinstance(act, nn.GELU):
        act = type("GELUTanh", (nn.GELU,), {})(approximate="tanh")
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": MLP(act)})
    apart = quantize(copy.deepcopy(model), backend="reference")
    fused = quantize(model)
    assert isinstance(fused["mlp"], GatedMLP)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(fused["mlp"](x), apart["mlp"](x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mlp", [Swapped(nn.SiLU()), MLP(nn.ReLU()), MLP(nn.SiLU(), bias=True)], ids=["swapped", "relu", "bias"]
)
@torch.inference_mode()
def test_what_computes_something_else_stays_three_layers(mlp: MLP) -> None:
    x = torch.randn(3, 64)
    model = nn.ModuleDict({"mlp": mlp})
    apart = quantize(copy.deepcopy(model), backend="reference")
    found = quantize(copy.deepcopy(model))
    assert not isinstance(found["mlp"], GatedMLP)
    assert isinstance(found["mlp"].gate_proj.kernel, JoinedPart)
    torch.testing.assert_close(found["mlp"](x), apart["mlp"](x), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_queries_keys_and_values_share_a_product_and_keep_their_biases() -> None:
    model = nn.ModuleDict({"attn": Attention()})
    apart = quantize(copy.deepcopy(model), backend="reference")["attn"]
    joined = quantize(model)["attn"]
    x = torch.randn(4, 3, 64)
    for name in ("q_proj", "v_proj", "k_proj"):
        torch.testing.assert_close(getattr(joined, name)(x), getattr(apart, name)(x), rtol=1e-4, atol=1e-4)
    assert joined.q_proj.kernel.joined is joined.v_proj.kernel.joined
    shares = sum(getattr(joined, name).nbytes for name in ("q_proj", "k_proj", "v_proj"))
    assert 0 <= joined.q_proj.kernel.joined.kernel.nbytes - shares < 3


@torch.inference_mode()
def test_a_part_asked_for_twice_or_with_another_input_is_computed_anew() -> None:
    fmt = parse_weight_format("int8")
    weights = [round_weight(torch.randn(n, 64), fmt) for n in (16, 7)]
    joined = _Joined(weights, CpuLinear(*weights))
    first, second = joined.parts
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    wanted = {id(z): z @ weights[0].dequantize().T for z in (x, y)}
    for z in (x, y, y, x):
        torch.testing.assert_close(first(z), wanted[id(z)], rtol=1e-3, atol=1e-3)
    before = first(x).clone()
    x.mul_(2)
    torch.testing.assert_close(first(x), 2 * before, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(second(x[:2]), x[:2] @ weights[1].dequantize().T, rtol=1e-3, atol=1e-3)


def test_layers_of_different_formats_are_not_joined() -> None:
    model = nn.ModuleDict({"attn": Attention()})
    weights = rounded(model, "int8")
    linear = model["attn"].k_proj
    weights["attn.k_proj"] = lambda: round_weight(linear.weight.detach(), parse_weight_format("int4_g32"))
    install(model, weights, CPU, backend="auto", dtype=torch.float32)
    assert not any(
        isinstance(m.kernel, JoinedPart) for m in model.modules() if isinstance(m, QuantizedLinear)
    )
    assert model["attn"].k_proj.fmt.name == "int4_g32"


@torch.inference_mode()
def test_threads_that_share_a_model_get_their_own_results() -> None:
    model = quantize(nn.ModuleDict({"attn": Attention()}))["attn"]
    inputs = [torch.randn(3, 64) for _ in range(4)]
    wanted = [[getattr(model, name)(x).clone() for name in ("q_proj", "k_proj", "v_proj")] for x in inputs]
    wrong: list[object] = []

    def work(i: int) -> None:
        with torch.inference_mode():
            for _ in range(400):
                for name, own in zip(("q_proj", "k_proj", "v_proj"), wanted[i], strict=True):
                    try:
                        if not torch.equal(getattr(model, name)(inputs[i]), own):
                            wrong.append((i, name))
                    except Exception as error:  # noqa: BLE001 - counted, whatever it is
                        wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
