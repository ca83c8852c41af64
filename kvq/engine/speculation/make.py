"""The speculator that an engine was asked for."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvq.engine.choose import Chooser
from kvq.engine.runner import Runner
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.config import Speculation
from kvq.engine.speculation.draft_model import DraftModel, check_draft
from kvq.engine.speculation.lookup import Lookup
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.engine.speculation.self_draft import SelfDraft, check_self, load_self
from kvq.engine.speculation.speculator import Speculator
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.model import load_prepared
from kvq.models.prepared import PreparedModel, find_scales, prepare
from kvq.models.session import Session
from kvq.models.weights import LoadedWeights
from kvq.scheduler import Scheduler

_log = logging.getLogger("kvq")


@dataclass(frozen=True, slots=True)
class Helper:
    """What drafts, loaded before the pools are sized: a model of its own, or the model in another form."""

    model: Model | None = None
    weights: LoadedWeights | None = None


def check_speculation(
    config: Speculation | None, model: PreparedModel
) -> tuple[PreparedModel, KVRecipe] | None:
    """Check what can be without weights; returns the draft model, if there is one, and its recipe.

    Raises:
        ModelError: a missing, damaged or refused draft model.
        ConfigError: one that can't draft for this model.
    """
    if config is not None and config.method == "self":
        check_self(model, config.weights)
    if config is None or config.method != "draft":
        return None
    assert config.model is not None, "checked when it was made"
    weights, backend = config.weights or "auto", model.backend
    draft = prepare(config.model, device=str(model.device), weights=weights, backend=backend)
    recipe = draft.recipe(config.kv or "auto", find_scales(draft, None))
    draft.check_scales(recipe)
    check_draft(model, draft, recipe)
    return draft, recipe


def load_helper(config: Speculation | None, model: Model) -> Helper:
    """Load what drafts for a model, if anything does; raises as `check_speculation`."""
    found = check_speculation(config, model.prepared)
    if config is not None and config.method == "self":
        _log.info("loading the model once more, rounded, to draft")
        return Helper(weights=load_self(model, config.weights))
    if found is not None:
        _log.info("loading the draft model")
        return Helper(model=load_prepared(*found))
    return Helper()


def make_speculator(
    config: Speculation | None,
    helper: Helper,
    model: Model,
    scheduler: Scheduler,
    runner: Runner,
    sampler: Sampler,
    chooser: Chooser,
    jobs: Jobs,
    clock: Callable[[], float],
) -> Speculator | None:
    """None if none was asked for."""
    if config is None:
        return None
    proposer: Proposer = Lookup()
    if helper.weights is not None:
        proposer = SelfDraft(sampler, chooser.bind, runner, helper.weights)
    elif helper.model is not None:
        tokens = max(pool.num_blocks for pool in scheduler.manager.pools) * model.layout.block_size
        session = Session.of_tokens(helper.model.weights, helper.model.layout, tokens)
        proposer = DraftModel(sampler, chooser.bind, session, vocab_size=model.geometry.vocab_size)
    return Speculator(config, proposer, scheduler, jobs, clock)
