"""Weights straight from their files: the model of transformers' loader, in the memory that it keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq
from kvq.models.loading import weights
from kvq.models.loading.prepared import prepare
from kvq.models.loading.skeleton import build_skeleton, by_storage, fill, source_of
from kvq.models.parts.linear import has_own_products
from kvq.weights import packed_layers
from tests.helpers_models import build_model, small_config
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(
    not has_own_products(torch.float32, "auto"), reason="no products of kvq's own"
)
IDS = [(37 * i + 11) % 199 for i in range(40)]
# Families whose tensors are all stored as the model has them: biases, norms of many kinds, buffers, queries,
# keys and values in one, weights that are no Linear layer's.
AS_STORED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("gemma2", {"tie_word_embeddings": True}),
    ("gpt2", {"tie_word_embeddings": True}),
    ("gpt_neox", {}),
    ("olmo2", {}),
    ("phi3", {}),
    ("starcoder2", {}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
]
TYPES = [torch.bfloat16, torch.float16, torch.float32]


def save(folder: Path, family: str, dtype: torch.dtype, **changes: Any) -> Path:
    """In several files."""
    build_model(small_config(family, **changes)).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, *, straight: bool) -> kvq.Model:
    """By that way alone."""
    with monkeypatch.context() as patched:
        if straight:
            patched.delattr(weights, "load_module")
        else:
            patched.setattr(weights, "fill", lambda *_, **__: None)
        return kvq.load(folder, kv="fp32", device="cpu")


def state(model: kvq.Model) -> dict[str, Tensor]:
    """Every number that a model multiplies by or adds."""
    module = model.weights.model
    packed = {f"{name} packed": layer.kernel.values() for name, layer in packed_layers(module).items()}
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **packed}


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [(*case, TYPES[i % 3]) for i, case in enumerate(AS_STORED)] + [("llama", {}, x) for x in TYPES[1:]],
    ids=str,
)
def test_a_model_is_the_one_that_transformers_loads(
    family: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, family, dtype, **changes)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ours, theirs = (load(folder, monkeypatch, straight=straight) for straight in (True, False))
    assert torch.equal(ours.logits(IDS), theirs.logits(IDS))
    mine, wanted = state(ours), state(theirs)
    assert list(mine) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(mine[name].float(), tensor.float()), name
        assert not mine[name].is_meta
    assert ours.weights.digest == theirs.weights.digest
    assert ours.end_ids == theirs.end_ids


def test_weights_keep_the_bits_that_they_are_stored_in(tmp_path: Path) -> None:
    for dtype in TYPES:
        model = kvq.load(save(tmp_path / str(dtype), "llama", dtype), device="cpu")
        kept = {layer.kernel.values().dtype for layer in packed_layers(model.weights.model).values()}
        assert kept == {dtype}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_model_with_tensors_made_of_others_is_left_to_transformers(family: str, tmp_path: Path) -> None:
    prepared = prepare(save(tmp_path, family, torch.bfloat16), device="cpu")
    skeleton = build_skeleton(prepared)
    assert skeleton is not None
    assert fill(*skeleton, prepared) is None
    assert any(parameter.is_meta for parameter in skeleton[0].parameters())
    assert kvq.load(tmp_path, device="cpu").logits(IDS).isfinite().all()


def test_only_a_tensor_taken_whole_and_as_it_is_has_a_source(tmp_path: Path) -> None:
    skeleton = build_skeleton(prepare(save(tmp_path, "llama", torch.bfloat16), device="cpu"))
    assert skeleton is not None
    name = "model.layers.1.self_attn.q_proj.weight"
    model, known = skeleton[0], by_storage(skeleton[1])
    weight = model.get_parameter(name)
    assert source_of(weight, known) == name
    assert source_of(weight.detach(), known) == name
    for other in (weight.T, weight[:32], weight.view(2, 32, 64), weight.clone(), weight.double()):
        assert source_of(other, known) is None


LOAD = """
import json, sys, threading
import torch
from kvq.models import load
from kvq.models.describe.checkpoint import read_json
from kvq.models.describe.modules import import_class

def anonymous():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

folder, first = sys.argv[1:]
load(first, device="cpu").logits([1])  # what is imported and compiled once is no model's
before, most, done = anonymous(), 0, threading.Event()

def sample():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous())

thread = threading.Thread(target=sample)
thread.start()
model = load(folder, device="cpu")
done.set()
thread.join()
print(json.dumps([before, most, anonymous()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_model_keeps(tmp_path: Path) -> None:
    first = save(tmp_path / "first", "llama", torch.bfloat16)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 8192}
    folder = save(tmp_path / "model", "llama", torch.bfloat16, **sizes)
    command = [sys.executable, "-c", LOAD, str(folder), str(first)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    before, most, after = json.loads(done.stdout)
    kept = after - before
    assert kept > 60e6, "the sizes of above, with an embedding of 32 bits"
    assert most - before < 1.1 * kept
