"""What a program's model computes in code of its own stays that: subclasses, objects' own forwards, hooks."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

import kvq
from kvq.errors import ModelError
from kvq.kernels.native.library import load
from kvq.models.loading import weights
from kvq.models.loading.fused_layers import fuse_layers
from kvq.models.parts.linear import pack_linears
from kvq.models.parts.norms import FusedRMSNorm, fuse_norms
from kvq.weights import PackedLinear, packed_layers, runs_library_code
from kvq.weights.install import GatedMLP
from tests.helpers_models import build_model, eager_logits, load_eager, random_tokens, small_config

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
IDS = random_tokens(40, seed=3)


def before(x: Tensor) -> Tensor:
    """The previous token's row."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class MixingMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + before(x))


class CuttingMLP(llama.LlamaMLP):
    """Differs in what no trial meets."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + (x.shape[1] > 30))


class MixingNorm(llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        found = super().forward(hidden_states)
        return found + before(found) if found.dim() == 3 else found


class ScaledAttention(llama.LlamaAttention):
    def forward(self, *args: Any, **given: Any) -> Any:
        found, *rest = super().forward(*args, **given)
        return 2 * found, *rest


class ScaledLayer(llama.LlamaDecoderLayer):
    def forward(self, *args: Any, **given: Any) -> Tensor:
        return 0.5 * super().forward(*args, **given)


class CallingMLP(llama.LlamaMLP):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def turned_into(kind: type[nn.Module], name: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        layer.get_submodule(name).__class__ = kind

    return change


def with_own_forward(name: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        module = layer.get_submodule(name)
        module.forward = lambda x, own=module.forward: own(x) + before(x[..., :1])

    return change


def hooked(name: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        layer.get_submodule(name).register_forward_hook(lambda module, given, found: found + before(found))

    return change


def hooked_before(name: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        layer.get_submodule(name).register_forward_pre_hook(
            lambda module, given: (given[0] + before(given[0]),)
        )

    return change


CHANGES = {
    "mlp": turned_into(MixingMLP, "mlp"),
    "mlp of long inputs": turned_into(CuttingMLP, "mlp"),
    "mlp by its call": turned_into(CallingMLP, "mlp"),
    "norm": turned_into(MixingNorm, "input_layernorm"),
    "attention": turned_into(ScaledAttention, "self_attn"),
    "layer": turned_into(ScaledLayer, ""),
    "an mlp's own": with_own_forward("mlp"),
    "a norm's own": with_own_forward("post_attention_layernorm"),
    "a product's own": with_own_forward("mlp.up_proj"),
    "behind an mlp": hooked("mlp"),
    "behind a norm": hooked("input_layernorm"),
    "behind a product": hooked("self_attn.v_proj"),
    "before an mlp": hooked_before("mlp"),
    "before a norm": hooked_before("post_attention_layernorm"),
    "before a product": hooked_before("self_attn.o_proj"),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.inference_mode()
def test_own_code_computes_what_it_did(name: str) -> None:
    model = build_model(small_config("llama"))
    plain = eager_logits(model, IDS)
    CHANGES[name](model.model.layers[0])
    wanted = eager_logits(model, IDS)
    assert (wanted - plain).abs().max() > 1e-2 * plain.abs().max(), "it changes nothing"

    pack_linears(model)
    fuse_norms(model)

    assert isinstance(model.model.layers[1].mlp, GatedMLP)
    assert isinstance(model.model.layers[1].input_layernorm, FusedRMSNorm)
    assert len(packed_layers(model)) >= 12, "other layers are replaced"
    assert not fuse_layers(model, [None] * len(model.model.layers), in_triton=False)
    torch.testing.assert_close(eager_logits(model, IDS), wanted, rtol=1e-4, atol=1e-4)


def test_code_that_all_of_a_class_got_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear.forward

    @functools.wraps(plain)  # with the library's own names
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return plain(self, x) * 2

    assert runs_library_code(nn.Linear(2, 2))
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, found: None)
    assert not runs_library_code(nn.Linear(2, 2))
    hook.remove()
    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert not runs_library_code(nn.Linear(2, 2))


def test_a_librarys_own_modules_are_known_as_such() -> None:
    model = build_model(small_config("llama"))
    assert all(map(runs_library_code, model.modules()))
    pack_linears(model)
    fuse_norms(model)
    assert all(map(runs_library_code, model.modules()))
    assert isinstance(model.model.layers[0].self_attn.q_proj, PackedLinear)
    assert fuse_layers(model, [None] * len(model.model.layers), in_triton=False)


def test_an_mlp_that_cuts_large_numbers_off_is_no_plain_one() -> None:
    torch.manual_seed(0)
    config = small_config("llama")
    parts = nn.ModuleDict({"mlp": llama.LlamaMLP(config), "cut": llama.LlamaMLP(config)})
    own = llama.LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=10.0), self.up_proj(x).clamp(-10.0, 10.0)
        return self.down_proj(self.act_fn(gate) * up)

    forward.__module__ = own.__module__  # as of a class of transformers'
    parts["cut"].__class__ = type("CutMLP", (llama.LlamaMLP,), {"forward": forward})
    pack_linears(parts)
    assert isinstance(parts["mlp"], GatedMLP)
    assert type(parts["cut"]).__name__ == "CutMLP"


def saved(folder: Path, name: str, change: Callable[[nn.Module], None]) -> Path:
    """A small model of a family of its own, all of whose layers are changed as they are made."""

    def built(self: Any, about: Any) -> None:
        LlamaForCausalLM.__init__(self, about)
        for layer in self.model.layers:
            change(layer)

    config = type("Config", (LlamaConfig,), {"model_type": f"own_{name}"})
    model = type("OwnForCausalLM", (LlamaForCausalLM,), {"config_class": config, "__init__": built})
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    build_model(
        config(**small_config("llama").to_diff_dict() | {"model_type": f"own_{name}"})
    ).save_pretrained(folder)
    return folder


def test_a_family_whose_mlp_looks_at_the_token_before_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="how it is cut and packed changes it"):
        kvq.load(saved(tmp_path, "mixing", CHANGES["mlp"]), kv="fp32", device="cpu")


@pytest.mark.parametrize("name", ["layer", "mlp of long inputs"])
def test_a_family_with_code_of_its_own_has_its_own_logits_or_is_refused(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name.replace(" ", "_"), CHANGES[name])
    try:
        found = kvq.load(folder, kv="fp32", device="cpu").logits(IDS)
    except ModelError:
        assert name != "layer", "which computes row by row"
        return
    torch.testing.assert_close(found, eager_logits(load_eager(folder), IDS), rtol=1e-4, atol=1e-4)


def test_what_kvq_puts_in_place_of_a_familys_modules_is_compared_with_these(
    tmp_path: Path, monkeypatch
) -> None:
    def wrongly(model: nn.Module) -> None:
        fuse_norms(model)
        for norm in model.modules():
            if isinstance(norm, FusedRMSNorm):
                norm.weight.mul_(1.1)

    monkeypatch.setattr(weights, "fuse_norms", wrongly)
    with pytest.raises(ModelError, match=r"in a small one of more layers, .* its own code differs"):
        kvq.load(saved(tmp_path, "replaced", lambda layer: None), kv="fp32", device="cpu")
