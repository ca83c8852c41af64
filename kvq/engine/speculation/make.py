"""The speculator that an engine was asked for."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvq.engine.choose import Chooser
from kvq.engine.runner import Runner
from kvq.engine.sampling.sampler import Sampler
from kvq.engine.speculation.config import Speculation
from kvq.engine.speculation.draft_model import DraftModel, check_draft
from kvq.engine.speculation.eagle import check_is_model
from kvq.engine.speculation.heads import Heads
from kvq.engine.speculation.lookup import Lookup
from kvq.engine.speculation.proposer import Jobs, Proposer
from kvq.engine.speculation.self_draft import SelfDraft, load_self
from kvq.engine.speculation.speculator import Speculator
from kvq.models import Model, load
from kvq.models.mtp import MtpHead, load_mtp
from kvq.models.resolve import resolve_model
from kvq.models.session import Session
from kvq.models.weights import LoadedWeights
from kvq.scheduler import Scheduler

_log = logging.getLogger("kvq")


@dataclass(frozen=True, slots=True)
class Helper:
    """What drafts, loaded before the pools are sized: another model, or another form or the head of this one."""

    model: Model | None = None
    weights: LoadedWeights | None = None
    head: MtpHead | None = None


def load_helper(config: Speculation | None, model: Model) -> Helper:
    """Load what drafts for a model, if anything does.

    Raises:
        ModelError: a missing, damaged or refused draft model.
        ConfigError: one that can't draft for this model.
    """
    if config is not None and config.method == "self":
        _log.info("loading the model once more, rounded, to draft")
        return Helper(weights=load_self(model, config.weights))
    if config is not None and config.method == "draft":
        assert config.model is not None, "checked when it was made"
        _log.info("loading the draft model")
        prepared = model.prepared
        source = resolve_model(config.model)
        check_is_model(source)
        draft = load(
            source,
            config.kv or "auto",
            device=str(prepared.device),
            weights=config.weights or "auto",
            backend=prepared.backend,
        )
        check_draft(model, draft)
        return Helper(model=draft)
    if config is not None and config.method == "heads":
        _log.info("loading the model's multi-token-prediction layer")
        return Helper(head=load_mtp(model))
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
    tokens = max(pool.num_blocks for pool in scheduler.manager.pools) * model.layout.block_size
    if helper.weights is not None:
        proposer = SelfDraft(sampler, chooser.bind, runner, helper.weights)
    elif helper.head is not None:
        layers = len(model.geometry.layers)
        proposer = Heads(sampler, chooser.bind, helper.head, tokens=tokens, layers=layers)
    elif helper.model is not None:
        session = Session.of_tokens(helper.model.weights, helper.model.layout, tokens)
        proposer = DraftModel(sampler, chooser.bind, session, vocab_size=model.geometry.vocab_size)
    return Speculator(config, proposer, scheduler, jobs, clock)
