"""Speculator construction: checks the configuration, and loads the drafting model or head."""

import logging
import re
from collections.abc import Callable

from kvq.engine.device.runner import Runner
from kvq.engine.sampling.choose import Chooser
from kvq.engine.speculation.draft_model import DraftModel, check_draft
from kvq.engine.speculation.drafter import Proposer
from kvq.engine.speculation.heads import Heads
from kvq.engine.speculation.ngram import Lookup
from kvq.engine.speculation.self_draft import SelfDraft, check_self, load_self
from kvq.engine.speculation.speculator import Speculator
from kvq.engine.speculation_config import Speculation
from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.describe.checkpoint import read_config_json
from kvq.models.describe.resolve import ModelSource, resolve_model
from kvq.models.loading.prepared import PreparedModel, find_scales, prepare
from kvq.models.loading.weights import LoadedWeights
from kvq.models.model import load_prepared
from kvq.models.mtp import MtpHead, check_mtp, load_mtp
from kvq.models.run.session import Session
from kvq.scheduler import Scheduler

_log = logging.getLogger("kvq")

# Helper that drafts, loaded before the pools are sized: a model, this model rounded, a head, or None
Helper = Model | LoadedWeights | MtpHead | None


def helper_bytes_per_token(helper: Helper) -> float:
    """Return the bytes per token of the helper's separate cache."""
    if isinstance(helper, Model):
        return helper.kv_bytes_per_token
    return helper.layout.kv_bytes_per_token if isinstance(helper, MtpHead) else 0.0


def check_speculation(
    config: Speculation | None, model: PreparedModel
) -> tuple[PreparedModel, KVRecipe] | None:
    """Check everything that needs no weights. Return the draft model and its recipe, or None without one.

    Raises:
        ModelError: the draft model is missing, damaged or refused.
        ConfigError: the draft model can't draft for this model.
    """
    if config is not None and config.method == "self":
        check_self(model, config.weights)
    if config is not None and config.method == "heads":
        check_mtp(model)
    if config is None or config.method != "draft":
        return None
    assert config.model is not None, "checked when it was made"
    weights, backend = config.weights or "auto", model.backend
    source = resolve_model(config.model)
    check_is_model(source)
    draft = prepare(source, device=str(model.device), weights=weights, backend=backend)
    recipe = draft.recipe(config.kv or "auto", find_scales(draft, None), whole_blocks=False)
    draft.check_scales(recipe)
    check_draft(model, draft, recipe)
    return draft, recipe


def load_helper(config: Speculation | None, model: Model) -> Helper:
    """Load the helper that drafts for a model, if any. Raises the same errors as `check_speculation`."""
    found = check_speculation(config, model.prepared)
    if config is not None and config.method == "self":
        _log.info("loading the model once more, rounded, to draft")
        return load_self(model, config.weights)
    if found is not None:
        _log.info("loading the draft model")
        if found[0].max_context < model.prepared.max_context:
            _log.warning(
                "the draft model takes %d tokens, the model %d: longer texts get no drafts",
                found[0].max_context,
                model.prepared.max_context,
            )
        return load_prepared(*found)
    if config is not None and config.method == "heads":
        _log.info("loading the model's multi-token-prediction layer")
        return load_mtp(model)
    return None


def make_speculator(
    config: Speculation | None,
    helper: Helper,
    scheduler: Scheduler,
    runner: Runner,
    chooser: Chooser,
    clock: Callable[[], float],
) -> Speculator | None:
    """Return an engine's speculator, or None if speculation is not configured."""
    if config is None:
        return None
    proposer: Proposer = Lookup()
    tokens = max(pool.num_blocks for pool in scheduler.manager.pools) * scheduler.manager.block_size
    if isinstance(helper, LoadedWeights):
        proposer = SelfDraft(chooser, runner, helper)
    elif isinstance(helper, MtpHead):
        proposer = Heads(chooser, helper, tokens=tokens)
    elif helper is not None:
        weights = helper.weights
        session = Session(weights, helper.layout, max_tokens=weights.max_context, pool_tokens=tokens)
        proposer = DraftModel(chooser, session)
    _log.info("tokens are drafted by %s, %d of a sequence in a step at most", config.method, config.k)
    return Speculator(config, proposer, scheduler, clock)


_HEAD = re.compile(r"eagle|medusa", re.IGNORECASE)  # in names of classes and model types
_NAMING = ("model_type", "speculators_model_type")


def check_is_model(source: ModelSource) -> None:
    """Raise ConfigError if a draft model's config.json shows that it is only a head, such as EAGLE.

    Raises:
        ModelError: config.json is missing or can't be read.
    """
    config = read_config_json(source.folder)
    classes = config.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    names += [str(config[key]) for key in _NAMING if key in config]
    if (name := next((name for name in names if _HEAD.search(name)), None)) is not None:
        raise ConfigError(
            f"{source} holds a {name}, a head that reads another model's hidden states and is no draft "
            f"model; transformers has no code for such heads, so kvq runs none: take the method ngram, self "
            f"or heads, or draft with a model of the same vocabulary"
        )
