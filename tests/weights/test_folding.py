"""Folding: found in every family by running it, proven, and undone where it would change anything."""

import pytest
import torch

from kvq.calib.quantize.walk import Walk
from kvq.weights.folding import apply_fold, find_folds
from tests.helpers_models import FAMILY_OPTIONS, build_model, random_tokens, small_config

DENSE = sorted(set(FAMILY_OPTIONS) - {"gpt2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"})


def walk_of(family, **changes):
    config = small_config(family, **changes)
    config._attn_implementation = "eager"
    model = build_model(config)
    return config, Walk(model, [random_tokens(32, seed=1)], torch.device("cpu"))


@pytest.mark.parametrize("family", DENSE)
def test_random_scales_fold_into_every_family_without_a_trace(family):
    config, walk = walk_of(family)
    layer = walk.layers[0]
    folds = find_folds(layer, lambda: walk.probe(0), head_dim=getattr(config, "head_dim", None)).folds
    before = walk.probe(0)
    for number, fold in enumerate(folds):
        width = layer.get_submodule(fold.names[0]).in_features
        scale = torch.rand(width, generator=torch.Generator().manual_seed(number)) + 0.5
        if fold.tied is not None:
            scale = scale[: int(fold.tied.max()) + 1][fold.tied]
        weight = layer.get_submodule(fold.names[0]).weight.clone()
        apply_fold(layer, fold, scale)
        assert not torch.equal(layer.get_submodule(fold.names[0]).weight, weight)
    assert (walk.probe(0) - before).abs().max() <= 3e-5 * before.abs().max()
