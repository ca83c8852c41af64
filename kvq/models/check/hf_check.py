"""`kvq.check`: the load check for a model run by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.cache.transformers.attention import NAME, register_attention
from kvq.cache.transformers.cache import KvqCache
from kvq.cache.transformers.config import read_config, read_recipe
from kvq.cache.transformers.layer import KvqLayer
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.models.check.compared import Errors
from kvq.models.check.load_check import LoadCheck, judge, measure, token_ids
from kvq.models.loading.tokenizer import load_tokenizer
from kvq.models.model import Model
from kvq.models.parts.device import DTYPE_NAMES


@torch.inference_mode()
def check(
    model: Any, kv: str | Path | KVRecipe = "int4", *, tokenizer: Any = None, scales: str | Path | None = None
) -> LoadCheck:
    """Measure how much a KV format, as stored by a `KvqCache`, changes a transformers model: see `LoadCheck`.

    `model`: a causal language model from transformers or `kvq.load`; it runs twice over a short text.
    `tokenizer`: the model's tokenizer; None loads it from the model's folder. `scales`: as in `KvqCache`.
    Nothing is stored, and no format is rejected: read `verdict`.

    Raises:
        ConfigError: there is no tokenizer, or `KvqCache` rejects the format.
        RequestError: K or V are not finite.
    """
    if isinstance(model, Model):
        return measure(model.with_kv(kv))
    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"kvq.check takes a loaded model of transformers or of kvq.load, got {model!r:.80}")
    vocab_size, weights = model.get_input_embeddings().weight.shape[0], model.num_parameters()
    longest = model.config.get_text_config().max_position_embeddings
    ids = token_ids(tokenizer or _tokenizer(model.name_or_path), longest, vocab_size, weights)
    batch = torch.tensor([ids], device=model.device)
    with _attending_from_blocks(model):
        config = read_config(model.config)
        recipe = read_recipe(kv, scales, config)
        aged = replace(recipe, exact=replace(recipe.exact, recent=0))
        exact, beside, own = (KvqCache(model.config, x) for x in (DTYPE_NAMES[model.dtype], aged, aged))
        errors = [] if config.latent else _compare(exact, beside)
        reference, stored = (model(batch, past_key_values=x).logits[0].float() for x in (exact, own))
    found = LoadCheck(kv=recipe.name, verdict="unjudgeable", tokens=len(ids), passes=2)
    found = replace(found, layer_errors=tuple(one.mean for one in errors))
    return judge(found, reference, stored, ids)


def _tokenizer(folder: str) -> Any:
    if not folder or not Path(folder).is_dir():
        raise ConfigError("the model was not loaded from a folder; give its tokenizer: tokenizer=...")
    return load_tokenizer(Path(folder))


@contextmanager
def _attending_from_blocks(model: Any) -> Iterator[None]:
    """Switch the model to "kvq" attention and evaluation mode, and restore both afterwards."""
    before, was_training = model.config._attn_implementation, model.training
    register_attention()
    model.set_attn_implementation(NAME)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)


def _compare(exact: KvqCache, other: KvqCache) -> list[Errors]:
    """Make the layers of `exact` also attend over `other`; return errors that the next run fills in."""
    errors = [Errors() for _ in exact.layers]
    for layer, beside, found in zip(exact.layers, other.layers, errors, strict=True):
        layer.attend = partial(_attend_both, layer.attend, beside, found)
    return errors


def _attend_both(attend: Any, beside: KvqLayer, found: Errors, *given: Any) -> Tensor:
    """Attend like `KvqLayer.attend`, and also over another cache's layer to record its error."""
    out: Tensor = attend(*given)
    beside.lazy_initialization(*given[1:3])
    found.update(beside.attend(*given)[0], out[0])
    return out
