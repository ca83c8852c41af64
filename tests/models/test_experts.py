"""Experts that kvq's kernels run: transformers' results, and the same bits for a token in any step."""

from pathlib import Path

import pytest
import torch

import kvq
from kvq.engine.steps.reconcile import found_weights
from kvq.errors import ConfigError, ModelError
from kvq.formats.weights import parse_weight_format
from kvq.kernels.native.library import load as load_library
from kvq.models.loading.footprint import planned_weights
from kvq.sizing.memory import EXPERTS_TERM
from kvq.weights import packed_experts, round_weight, stacked_experts
from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import build_model, load_eager, random_tokens, save_model, small_config

pytestmark = pytest.mark.skipif(isinstance(load_library(), str), reason="the C++ kernels were not built")
IDS = random_tokens(60, seed=3)
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("experts"), request.param)


@torch.inference_mode()
def test_unquantized_ones_give_transformers_results(folder: Path) -> None:
    model = kvq.load(folder, kv="fp32", device="cpu")
    experts = packed_experts(model.weights.model)
    assert experts
    own = load_eager(folder)(torch.tensor([IDS])).logits[0]
    assert (model.logits(IDS) - own).abs().max() < 1e-4 * own.abs().max()


@pytest.mark.parametrize("weights", ["auto", "int4_g8"])
def test_a_token_has_the_same_bits_in_any_step(folder: Path, weights: str) -> None:
    model = kvq.load(folder, kv="fp32", weights=weights, device="cpu")
    assert packed_experts(model.weights.model)
    whole = model.logits(IDS)
    for size in (1, 7, 23):
        assert torch.equal(model.logits(IDS, chunk=size), whole), size
    assert model.weights.step_rows(3) == 3, "nothing is padded"


@torch.inference_mode()
def test_rounded_ones_are_those_of_the_dequantized_weights(folder: Path) -> None:
    fmt = parse_weight_format("int4_g8")
    plain = load_eager(folder)
    forms = stacked_experts(plain)
    for name, form in forms.items():
        experts = plain.get_submodule(name)
        for stacked in (experts.gate_up_proj, experts.down_proj):
            for own in stacked:
                weight = own.T if form.is_transposed else own
                rounded = round_weight(weight.contiguous(), fmt).dequantize(torch.float32)
                own.copy_(rounded.T if form.is_transposed else rounded)
    for module in plain.modules():
        if type(module) is torch.nn.Linear:
            own_fmt = parse_weight_format("int8") if module is plain.lm_head else fmt
            module.weight.copy_(round_weight(module.weight, own_fmt).dequantize(torch.float32))
    wanted = plain(torch.tensor([IDS])).logits[0]
    for backend in ("auto", "reference"):
        model = kvq.load(folder, kv="fp32", weights="int4_g8", device="cpu", backend=backend)
        assert all(x.formats == {fmt} for x in packed_experts(model.weights.model).values())
        error = (model.logits(IDS) - wanted).norm() / wanted.norm()
        assert error < (1e-4 if backend == "reference" else 2e-3), backend


def test_engines_give_a_sequence_the_same_tokens_alone_and_in_a_batch(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    one_character_tokenizer().save_pretrained(tmp_path)
    llm = kvq.LLM(tmp_path, kv="int4", weights="int4_g8", kv_memory="8MiB", max_context=128)
    prompts = [random_tokens(n, seed=n) for n in (5, 31, 17, 44, 9)]
    params = kvq.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)

    def told(outputs: list) -> list:
        return [(x.outputs[0].token_ids, x.outputs[0].logprobs) for x in outputs]

    together = told(llm.generate(prompts, params))
    assert together == [told(llm.generate([prompt], params))[0] for prompt in prompts]


@pytest.mark.parametrize("weights", ["auto", "int4_g8", "int8"])
def test_bytes_are_those_of_the_plan(folder: Path, weights: str) -> None:
    model = kvq.load(folder, kv="fp32", weights=weights, device="cpu")
    planned = {term.name: term.nbytes for term in planned_weights(model.prepared)}
    found = found_weights(model.weights.model)
    assert found[EXPERTS_TERM] == pytest.approx(planned[EXPERTS_TERM], rel=0.2)  # small ones are padded
    assert found.keys() == planned.keys()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_codes_of_a_checkpoint_are_those_that_are_multiplied(family: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "model", family)
    kvq.quantize(source, tmp_path / "out", "rtn", bits=4, group_size=8)
    model = kvq.load(tmp_path / "out", kv="fp32", device="cpu")
    rounded = kvq.load(source, kv="fp32", weights="int4_g8", device="cpu")
    experts = packed_experts(model.weights.model)
    assert {fmt.name for x in experts.values() for fmt in x.formats} == {"int4_g8"}
    for name, other in packed_experts(rounded.weights.model).items():
        x, chosen = torch.randn(3, 64), torch.tensor([[0, 1], [3, 2], [1, 3]])
        assert torch.equal(experts[name](x, chosen, torch.ones(3, 2)), other(x, chosen, torch.ones(3, 2)))
    planned = {term.name: term.nbytes for term in planned_weights(model.prepared)}
    assert found_weights(model.weights.model)[EXPERTS_TERM] == pytest.approx(planned[EXPERTS_TERM], rel=0.2)
    reference = kvq.load(tmp_path / "out", kv="fp32", device="cpu", backend="reference")
    wanted = reference.logits(IDS)
    assert (model.logits(IDS) - wanted).norm() < 2e-3 * wanted.norm()


def test_a_module_that_computes_otherwise_is_left_alone() -> None:
    model = build_model(small_config("mixtral"))
    known = stacked_experts(model)
    assert len(known) == 2
    experts = model.get_submodule(next(iter(known)))

    class Otherwise(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states, chosen, weights):
            return super().forward(hidden_states, chosen, weights * weights)

    experts.__class__ = Otherwise
    assert len(stacked_experts(model)) == 1


def test_groups_that_do_not_divide_an_experts_inputs_are_named(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    with pytest.raises(ConfigError, match=r"experts.down_proj: groups of 32 don't divide 80 inputs"):
        kvq.load(tmp_path, weights="int8_g32")


def test_experts_that_are_no_numbers_are_not_rounded_away(tmp_path: Path) -> None:
    model = build_model(small_config("mixtral"))
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 5] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers.1.mlp.experts.down_proj holds NaN or infinity"):
        kvq.load(tmp_path, weights="int8")
