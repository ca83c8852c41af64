"""Decoder layers in Triton: transformers' results, and transformers' code where it must run."""

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.cache.backend import with_stores
from kvq.cache.stores.plain import PlainStore
from kvq.models.loading import gpu_layers
from kvq.models.loading.fused_layers import is_fused, unfuse_layers
from kvq.models.prove.probe import relative_error
from kvq.models.run.session import Session
from tests.helpers_models import Decoded, eager_greedy, load_eager, random_tokens, run_step, save_model
from tests.models.gpu_kit import as_on_gpu, load_as_on_gpu

TOLERANCE = 1e-5  # max|a - b| / max|b|
FAMILIES = [
    "arcee", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "llama",
    "ministral", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3",
]  # fmt: skip
QUICK = {"mixtral", "qwen3"}


@pytest.fixture(autouse=True)
def on_gpu():
    with as_on_gpu():
        yield


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES]
)
def test_every_family_gives_transformers_results_alone_and_beside_others(family, tmp_path):
    folder = save_model(tmp_path, family)
    reference = load_eager(folder)
    prompt = random_tokens(19, seed=1)
    want, tokens = eager_greedy(reference, prompt, 3)
    model = load_as_on_gpu(folder)
    assert is_fused(model.weights.model)
    session = model.session(max_tokens=24, max_sequences=2)
    first, other = Decoded(session, prompt, chunks=[11]), Decoded(session, random_tokens(9, seed=2))
    for step in range(5):
        run_step(session, [first] if step else [other, first])
    assert relative_error(first.logits, want) <= TOLERANCE
    assert first.tokens == tokens


def _scaled(monkeypatch):
    right = gpu_layers.AddNorm
    monkeypatch.setattr(
        gpu_layers, "AddNorm", lambda norm, **options: right(norm, **options | {"scale": 1.1})
    )


def _turned_back(monkeypatch):
    """Keys and queries turn the wrong way on their way into the blocks, which no observer of K sees."""
    right = PlainStore.write_joined

    def wrong(store, joined, angles, *others):
        return right(store, joined, (angles[0], -angles[1]), *others)

    monkeypatch.setattr(PlainStore, "write_joined", wrong)


def _out_of_resources(monkeypatch):
    def wrong(norm, x, residual):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(gpu_layers.AddNorm, "__call__", wrong)


@pytest.mark.parametrize("spoil", [_scaled, _turned_back, _out_of_resources])
def test_layers_that_would_be_wrong_get_their_own_code_back(spoil, tmp_path, monkeypatch, caplog):
    spoil(monkeypatch)
    assert not is_fused(load_as_on_gpu(save_model(tmp_path, "llama")).weights.model)
    assert "layers run in the model's own code: " in caplog.text


@pytest.mark.long
def test_weights_in_codes_are_joined_too(tmp_path):
    model = load_as_on_gpu(save_model(tmp_path, "llama"), weights="int8_g16")
    assert is_fused(model.weights.model)
    fused = _logits(model)
    unfuse_layers(model.weights.model)
    assert relative_error(fused, _logits(model)) < 1e-5


def test_what_is_observed_or_stored_elsewhere_takes_the_same_heads(tmp_path):
    model = load_as_on_gpu(save_model(tmp_path, "qwen3"))
    plain, seen = _logits(model), []
    watched = model.session(max_tokens=7)
    watched.observer = lambda layer, k, v: seen.append(layer)
    session = Session(model.weights, model.layout, max_tokens=7)
    session.cache = with_stores(Foreign(session.cache))
    for other in (watched, session):
        [result] = other.forward([(other.new_sequence(), [3, 1, 4, 1, 5, 9, 2])], all_rows=True)
        assert relative_error(result.logits, plain) < TOLERANCE
    assert seen == [0, 1]


class Foreign:
    """A cache backend of somebody else, without kvq's own methods."""

    def __init__(self, cache: KVCache) -> None:
        self.group_of, self.write, self.attend = cache.group_of, cache.write, cache.attend
        self.carry_out = cache.carry_out


def test_a_hook_brings_the_models_own_code_back(tmp_path):
    model = load_as_on_gpu(save_model(tmp_path, "llama"))
    plain = _logits(model)
    layer = model.weights.model.model.layers[1].mlp.down_proj
    seen = []
    handle = layer.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    assert relative_error(_logits(model), plain) < TOLERANCE
    assert seen == [(1, 7, 64)]
    handle.remove()


def _logits(model: kvq.Model) -> torch.Tensor:
    return model.logits([3, 1, 4, 1, 5, 9, 2])
