"""The load-time probe refuses a model that kvq's attention does not fully describe."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from kvq.errors import ModelError
from kvq.models.prove.probe import probe, relative_error
from tests.helpers_models import load_fp32, save_model

FORWARD = modeling_llama.LlamaAttention.forward
EAGER = modeling_llama.eager_attention_forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=3)


def test_an_ordinary_model_passes(folder):
    assert probe(load_fp32(folder).weights) is None


def test_a_layer_that_does_not_call_the_registered_attention_is_refused(folder, monkeypatch):
    def own_way(self, hidden_states, **options):
        if self.layer_idx == 1:
            return self.o_proj(self.q_proj(hidden_states)), None
        return FORWARD(self, hidden_states, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", own_way)
    with pytest.raises(ModelError, match=r"llama: its 3 layers called .* for \[0, 2\], not once each"):
        load_fp32(folder)


def test_a_layer_that_calls_the_registered_attention_twice_is_refused(folder, monkeypatch):
    """Harmless as arithmetic, but the second call would write the same slots again."""

    def twice(self, hidden_states, **options):
        if self.layer_idx == 2:
            FORWARD(self, hidden_states, **options)
        return FORWARD(self, hidden_states, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", twice)
    with pytest.raises(ModelError, match=r"for \[0, 1, 2, 2\], not once each"):
        load_fp32(folder, backend="reference")  # whose layers run their own code


def test_a_layer_that_claims_another_layers_index_is_refused(folder, monkeypatch):
    model = load_fp32(folder, backend="reference")  # whose layers run their own code
    model.weights.model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(ModelError, match=r"for \[0, 1, 1\], not once each"):
        probe(model.weights)


def test_a_model_that_leaks_between_packed_sequences_is_refused(folder, monkeypatch):
    """Token shift, as in RWKV or a convolution: the first token of one sequence sees another's last."""

    def shifted(self, hidden_states, **options):
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return FORWARD(self, hidden_states + 0.1 * before, **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", shifted)
    with pytest.raises(ModelError, match=r"llama: a batch neighbour changes its results"):
        load_fp32(folder)


def test_a_model_whose_own_attention_does_something_else_is_refused(folder, monkeypatch):
    def biased(module, query, key, value, attention_mask, **options):
        distance = torch.arange(key.shape[2]).float()
        return EAGER(module, query, key, value, attention_mask + 0.05 * distance, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", biased)
    with pytest.raises(ModelError, match=r"llama: its own attention differs \(relative error"):
        load_fp32(folder)


def test_a_model_that_gives_nan_is_refused(folder):
    model = load_fp32(folder)
    with torch.no_grad():
        model.weights.model.model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match="give NaN or infinity in the logits"):
        probe(model.weights)


def test_relative_error_is_the_largest_difference_over_the_largest_reference():
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0])
    assert relative_error(a, b) == pytest.approx(0.2)
    assert relative_error(b, b) == 0.0
    assert relative_error(a, torch.tensor([float("nan"), 1.0])) != relative_error(a, a)
