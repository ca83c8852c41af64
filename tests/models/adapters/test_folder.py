"""Adapters in folders: what is read, and what is refused, with the adapter, the file and the reason."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.errors import ModelError
from kvq.models.adapters.folder import read_adapter
from tests.helpers_adapters import CONFIG, PREFIX, WEIGHTS, save_adapter

SHAPES = {
    "model.layers.0.self_attn.q_proj": (60, 63),
    "model.layers.0.mlp.down_proj": (76, 60),
    "model.layers.1.self_attn.q_proj": (60, 63),
}
Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q0_B = Q0.replace("lora_A", "lora_B")


@pytest.fixture
def folder(tmp_path):
    return save_adapter(tmp_path / "adapter", SHAPES, rank=3)


def read(folder):
    return read_adapter("sql", folder, SHAPES)


def change(folder, **config):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_tensors_and_scales_are_those_of_the_files(folder):
    change(folder, alpha_pattern={"down_proj": 9})
    stored, tensors = read(folder), load_file(folder / WEIGHTS)
    assert set(stored.factors) == set(SHAPES)
    for layer, factors in stored.factors.items():
        assert torch.equal(factors.a.float(), tensors[f"{PREFIX}{layer}.lora_A.weight"])
        assert torch.equal(factors.b.float(), tensors[f"{PREFIX}{layer}.lora_B.weight"])
        assert factors.scale == (3.0 if layer.endswith("down_proj") else 2.0)
    change(folder, use_rslora=True)
    assert read(folder).factors["model.layers.1.self_attn.q_proj"].scale == pytest.approx(6 / math.sqrt(3))


@pytest.mark.parametrize("targets", ["all-linear", r".*(q|down)_proj", "(((a+)+)+)$"])
def test_a_pattern_of_targets_is_not_run(folder, targets):
    change(folder, target_modules=targets)
    assert set(read(folder).factors) == set(SHAPES)


def test_ranks_may_differ_by_layer(tmp_path):
    ranks = {"down_proj": 5, "layers.1.self_attn.q_proj": 1}
    folder = save_adapter(tmp_path, SHAPES, rank=3, rank_pattern=ranks)
    assert [len(factors.a) for factors in read(folder).factors.values()] == [5, 3, 1]


def test_layers_may_be_chosen(tmp_path):
    first = dict(list(SHAPES.items())[:2])
    folder = save_adapter(tmp_path, first, layers_to_transform=[0])
    assert set(read(folder).factors) == set(first)


def test_numbers_are_kept_in_16_bits_where_that_is_exact(tmp_path):
    folder = save_adapter(tmp_path, SHAPES)
    tensors = {name: x.bfloat16().float() for name, x in load_file(folder / WEIGHTS).items()}
    assert {factors.a.dtype for factors in read(folder).factors.values()} == {torch.float32}
    save_file(tensors, folder / WEIGHTS)
    assert {factors.a.dtype for factors in read(folder).factors.values()} == {torch.bfloat16}


def test_the_digest_tells_weights_and_scales_apart(folder):
    first = read(folder).digest
    assert read(folder).digest == first
    change(folder, lora_alpha=7)
    second = read(folder).digest
    change(folder, lora_alpha=6)
    tensors = load_file(folder / WEIGHTS)
    tensors[Q0][0, 0] += 1
    save_file(tensors, folder / WEIGHTS)
    assert len({first, second, read(folder).digest}) == 3


def rewritten(change_tensors):
    def apply(folder):
        tensors = load_file(folder / WEIGHTS)
        change_tensors(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


def configured(**config):
    return lambda folder: change(folder, **config)


def cut(folder):
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-7])


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def huge(folder):
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 30)


def renamed(old, new):
    return rewritten(lambda tensors: tensors.update({new: tensors.pop(old)}))


def valued(tensor, value):
    return rewritten(lambda tensors: tensors[tensor].view(-1)[5].fill_(value))


BROKEN = {
    "no folder": (lambda folder: folder.rename(folder.with_name("gone")), CONFIG, "is it a folder"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG, "there is no"),
    "config is no JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG, "not JSON"),
    "config is a list": (lambda folder: (folder / CONFIG).write_text("[]"), CONFIG, "a JSON object"),
    "config is huge": (lambda folder: (folder / CONFIG).write_text(" " * (2 << 20)), CONFIG, "bytes"),
    "another kind": (configured(peft_type="IA3"), CONFIG, "peft_type"),
    "rank 0": (configured(r=0), CONFIG, "1 to 256"),
    "rank 257": (configured(r=257), CONFIG, "1 to 256"),
    "alpha is NaN": (configured(lora_alpha="much"), CONFIG, "lora_alpha"),
    "DoRA": (configured(use_dora=True), CONFIG, "use_dora"),
    "trained embeddings": (configured(modules_to_save=["lm_head"]), CONFIG, "modules_to_save"),
    "trained biases": (configured(bias="all"), CONFIG, "bias"),
    "transposed weights": (configured(fan_in_fan_out=True), CONFIG, "fan_in_fan_out"),
    "a base of PiSSA": (configured(init_lora_weights="pissa_niter_4"), CONFIG, "init_lora_weights"),
    "unknown settings": (configured(use_next_thing={"a": 1}), CONFIG, "use_next_thing"),
    "a pattern of ranks": (configured(rank_pattern={"(q|k)_proj": 3}), CONFIG, "rank_pattern"),
    "no targets": (configured(target_modules=None), CONFIG, "target_modules"),
    "bad invocation": (configured(alora_invocation_tokens=["a"]), CONFIG, "alora_invocation_tokens"),
    "pickled": (pickled, WEIGHTS, "pickled"),
    "cut off": (cut, WEIGHTS, "damaged"),
    "too large": (huge, WEIGHTS, "bytes"),
    "not safetensors": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x80\x04pickle"), WEIGHTS, "damaged"),
    "empty": (lambda folder: save_file({}, folder / WEIGHTS), WEIGHTS, "no tensors"),
    "no A": (rewritten(lambda tensors: tensors.pop(Q0)), WEIGHTS, Q0),
    "no B": (rewritten(lambda tensors: tensors.pop(Q0_B)), WEIGHTS, Q0_B),
    "a layer is missing": (
        rewritten(lambda tensors: (tensors.pop(Q0), tensors.pop(Q0_B))), WEIGHTS, Q0,
    ),
    "another base model": (
        rewritten(lambda tensors: tensors.update({Q0: torch.zeros(3, 61)})), WEIGHTS, Q0,
    ),
    "another rank": (rewritten(lambda tensors: tensors.update({Q0: torch.zeros(4, 60)})), WEIGHTS, Q0),
    "one dimension": (rewritten(lambda tensors: tensors.update({Q0: torch.zeros(180)})), WEIGHTS, Q0),
    "integers": (
        rewritten(lambda tensors: tensors.update({Q0: torch.zeros(3, 60, dtype=torch.int64)})), WEIGHTS, Q0,
    ),
    "NaN": (valued(Q0, math.nan), WEIGHTS, Q0),
    "infinity": (valued(Q0_B, math.inf), WEIGHTS, Q0_B),
    "an unknown layer": (
        lambda folder: [renamed(x, x.replace("q_proj", "z_proj"))(folder) for x in (Q0, Q0_B)],
        WEIGHTS, "z_proj",
    ),
    "embeddings": (renamed(Q0, f"{PREFIX}model.embed_tokens.lora_embedding_A"), WEIGHTS, "embed_tokens"),
    "a trained head": (
        rewritten(lambda tensors: tensors.update({f"{PREFIX}lm_head.weight": torch.zeros(2, 2)})),
        WEIGHTS, "lm_head",
    ),
    "no prefix": (renamed(Q0, "q_proj.lora_A.weight"), WEIGHTS, "q_proj"),
    "beside the targets": (configured(target_modules=["q_proj"]), WEIGHTS, "down_proj"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_and_foreign_adapters_are_refused_by_name(folder, kind):
    breaks, file, word = BROKEN[kind]
    read(folder)
    breaks(folder)
    with pytest.raises(ModelError) as refused:
        read(folder)
    said = str(refused.value)
    assert said.startswith("adapter 'sql': ")
    assert str(Path(folder.name) / file) in said
    assert word in said.partition(file)[2]


def test_a_file_that_changes_while_it_is_read_is_refused(folder, monkeypatch):
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path)[:-4])
    with pytest.raises(ModelError, match="changed while it was read"):
        read(folder)


def test_settings_of_training_do_not_matter(folder):
    change(folder, lora_dropout=0.1, task_type="CAUSAL_LM", inference_mode=True, init_lora_weights="gaussian")
    assert replace(read(folder).config, targets=None).rank == 3
