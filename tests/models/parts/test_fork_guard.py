"""A model stays in the process that made it."""

import copy
import pickle

import pytest

from kvq.errors import EngineError


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_model_is_neither_pickled_nor_copied(tiny, copied):
    with pytest.raises(
        EngineError, match=r"Model can't be pickled or copied: .* pass on the model's folder or name"
    ):
        copied(tiny)


def test_another_recipe_keeps_weights_scales_and_backend(tiny):
    other = tiny.with_kv("int8")
    assert (other.weights, other.static_scales, other.prepared.backend) == (
        *(tiny.weights, tiny.static_scales, tiny.prepared.backend),
    )
    assert other.recipe != tiny.with_kv("int4").recipe
