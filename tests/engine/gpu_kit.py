"""Real models on the imaginary GPU, and runners over them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kvq.engine.device.runner import Runner
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.models import Model
from kvq.models.describe.modules import load_module
from kvq.models.loading import fused_layers, layer_parts
from kvq.models.loading.fused_layers import fuse_layers
from kvq.models.loading.prepared import PreparedModel, prepare
from kvq.models.loading.weights import LoadedWeights, place
from kvq.sizing.pools import PoolPlan
from tests.engine.imaginary_gpu import ImaginaryGPU
from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import save_model


@cache
def prepared(family: str) -> PreparedModel:
    """The embedded model, or a random one of a family."""
    return prepare("tiny", device="cpu") if family == "tiny" else _random(family, {})


def _random(family: str, options: Mapping[str, Any]) -> PreparedModel:
    folder = save_model(Path(mkdtemp(prefix=f"kvq-{family}-")), family, **options)
    one_character_tokenizer().save_pretrained(folder)
    return prepare(folder, device="cpu")


def model_on(
    gpu: ImaginaryGPU, family: str, kv: str = "int4", options: Mapping[str, Any] | None = None, **changes: Any
) -> Model:
    """A model in bf16, placed on the GPU as any is that was loaded for one. `options`: of its config."""
    known = prepared(family) if options is None else _random(family, options)
    found = replace(known, device=gpu.device, dtype=torch.bfloat16, **changes)
    with unset_fake_temporarily():
        module = load_module(found.folder, found.dtype)
    module = place(module, found)
    windows = [layer.window for layer in found.geometry.layers]
    with (  # no number of the GPU can be looked at
        patch.object(layer_parts, "norm_weight", _taken_as_is),
        patch.object(fused_layers, "norm_weight", _taken_as_is),
    ):
        assert fuse_layers(module, windows, in_triton=True)
    return Model(LoadedWeights(found, module), found.recipe(kv, whole_blocks=False))


def _taken_as_is(norm: Any) -> NormWeight:
    return NormWeight(weight=norm.weight.detach(), eps=getattr(norm, "variance_epsilon", 1e-5))


def runner_on(
    gpu: ImaginaryGPU, family: str, kv: str = "int4", *, max_num_seqs: int = 5, **options: Any
) -> Runner:
    """A runner over such a model."""
    model = model_on(gpu, family, kv)
    num_blocks = [9] * len(model.layout.groups)
    pools = PoolPlan(num_blocks=num_blocks, step_tokens=100, sequences=max_num_seqs)
    return Runner(model, pools, 100, **options)
