"""Real models on the imaginary GPU, and runners over them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kvq.engine.runner import Runner
from kvq.models import Model
from kvq.models.modules import load_module
from kvq.models.prepared import PreparedModel, prepare
from kvq.models.weights import LoadedWeights, place
from tests.engine.imaginary_gpu import ImaginaryGPU
from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import save_model


@cache
def prepared(family: str) -> PreparedModel:
    """The embedded model, or a random one of a family."""
    if family == "tiny":
        return prepare("tiny", device="cpu")
    folder = save_model(Path(mkdtemp(prefix=f"kvq-{family}-")), family)
    one_character_tokenizer().save_pretrained(folder)
    return prepare(folder, device="cpu")


def model_on(gpu: ImaginaryGPU, family: str, kv: str = "int4", **changes: Any) -> Model:
    """A model in bf16, placed on the GPU as any is that was loaded for one."""
    found = replace(prepared(family), device=gpu.device, dtype=torch.bfloat16, **changes)
    with unset_fake_temporarily():
        module = load_module(found.folder, found.dtype)
    return Model(LoadedWeights(found, place(module, found)), found.recipe(kv))


def runner_on(gpu: ImaginaryGPU, family: str, kv: str = "int4", **options: Any) -> Runner:
    """A runner over such a model."""
    model = model_on(gpu, family, kv)
    sizes = {"num_blocks": [9] * len(model.layout.groups), "max_num_seqs": 5, "max_context": 100}
    return Runner(model, **({"host_slots": None} | sizes | options))
