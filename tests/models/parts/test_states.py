"""Layers that keep a state: how they are found, cut to sequences, and proven."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvq.cache.stores.recurrent import StateSlots
from kvq.errors import ModelError
from kvq.models.loading.prepared import prepare
from kvq.models.model import load
from kvq.models.observe.geometry import observe
from kvq.models.observe.support import check_supported
from kvq.models.observe.tiny_copy import build_tiny_copy
from kvq.models.prove.proof import prove
from tests.helpers_hybrids import OTHERS, QUICK, hybrid, hybrid_folder, same, tokens
from tests.helpers_models import eager_logits

CUTS = [[70], [16, 16, 38], [1] * 20 + [50], [3, 1, 1, 40, 1, 24], [31, 1, 1, 1, 36]]
every_family = pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)


@every_family
def test_logits_are_the_models_own_however_sequences_are_cut_and_packed(family: str) -> None:
    model, reference = hybrid(family)
    ids = [tokens(sum(cut), seed=i) for i, cut in enumerate(CUTS)]
    session = model.session(max_tokens=70, max_sequences=len(CUTS))
    sequences, parts = [session.new_sequence() for _ in CUTS], [[] for _ in CUTS]
    for step in range(max(map(len, CUTS))):
        turn = [i for i, cut in enumerate(CUTS) if step < len(cut)]
        work = []
        for i in turn:
            begin = sum(CUTS[i][:step])
            work.append((sequences[i], ids[i][begin : begin + CUTS[i][step]]))
        for i, result in zip(turn, session.forward(work, all_rows=True), strict=True):
            parts[i].append(result.logits)
    for own, rows in zip(ids, parts, strict=True):
        assert same(torch.cat(rows), eager_logits(reference, own)) <= 3e-5  # recurrences round by cuts


@every_family
def test_what_is_kept_is_what_the_models_own_cache_holds(family: str) -> None:
    model, reference = hybrid(family)
    ids = torch.tensor([tokens(40, seed=1)])
    with torch.inference_mode():
        cache = reference(ids, use_cache=True).past_key_values
    session = model.session(max_tokens=40)
    sequence = session.new_sequence()
    session.forward([(sequence, ids[0].tolist())])
    block = torch.tensor([sequence.tables[-1][-1]])
    for state in model.geometry.states:
        held = session.cache.states.read(state.number, block)
        assert {(x.name, x.index) for x in state.tensors} == held.keys()
        for (name, index), value in held.items():
            layer = cache.linear_cache if name == "linear" else cache.layers[state.number]
            wanted = layer[state.number] if name == "linear" else getattr(layer, f"{name}_states")[index]
            assert same(value, wanted) <= 1e-4


@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("lost", ["conv", "recurrent"])
def test_a_proof_sees_a_state_that_is_lost(family: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, read = prepare(hybrid_folder(family), device="cpu"), StateSlots.read
    if lost not in {x.name for state in prepared.geometry.states for x in state.tensors}:
        pytest.skip(f"{family} keeps no {lost} state")

    def forgetful(self: StateSlots, number: int, blocks: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        found = read(self, number, blocks)
        return {key: value * (key[0] != lost) for key, value in found.items()}

    prove(prepared)
    monkeypatch.setattr(StateSlots, "read", forgetful)
    with pytest.raises(ModelError, match="its own code over its own cache differs"):
        prove(prepared)


def test_a_modules_own_pass_is_as_before_outside_of_steps() -> None:
    model, reference = hybrid("falcon_h1")
    ids = torch.tensor([tokens(30, seed=2)])
    cut = model.weights.model
    cut.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            assert same(cut(ids, use_cache=False).logits, reference(ids, use_cache=False).logits) <= 1e-5
    finally:
        cut.set_attn_implementation("kvq_packed")


def test_the_geometry_of_a_hybrid_has_the_numbers_of_its_code() -> None:
    geometry = hybrid("qwen3_next")[0].geometry
    assert [layer.number for layer in geometry.layers] == [3]
    assert [layer.index for layer in geometry.layers] == [0]
    assert [state.number for state in geometry.states] == [0, 1, 2]
    assert geometry.place(3) == 0
    assert geometry.place(0) is None
    both = hybrid("falcon_h1")[0].geometry
    assert [layer.number for layer in both.layers] == [state.number for state in both.states] == [0, 1]
    assert observe(hybrid("falcon_h1")[0].weights.model).states == both.states


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mamba", "no KV cache"),
        ("jamba", "its own code doesn't continue correctly from a state over several tokens"),
        ("zamba2", "call attention 9 times"),
        ("recurrent_gemma", "call attention 8 times"),
    ],
)
def test_models_whose_states_cannot_be_cut_are_refused_with_the_reason(
    family: str, why: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family).to_dict()

    def serve() -> None:
        assert check_supported(config, max_context=None, folder=tmp_path).states
        build_tiny_copy(config).save_pretrained(tmp_path)
        load(tmp_path, device="cpu")

    with pytest.raises(ModelError, match=why):
        serve()
