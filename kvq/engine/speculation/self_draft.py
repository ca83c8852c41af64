"""Self-drafting: the model itself, with rounded weights, makes the drafts from its own cache.

Drafting reads the K and V that the model itself wrote. The drafts' K and V go to the slots that the step has
reserved for them, and the step overwrites them. No separate cache is needed, and no prompt is computed twice.
Source: Zhang et al. 2024, "Draft & Verify", for a draft model that is the model itself; Tiwari et al. 2025,
"QuantSpec", for a draft model with rounded weights.
"""

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor, nn

from kvq.engine.device.runner import Runner
from kvq.engine.sampling.choose import Chooser
from kvq.engine.speculation.drafter import Drafter, Growing
from kvq.errors import ConfigError
from kvq.formats.weights import parse_weight_format
from kvq.models import Model
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.weights import LoadedWeights
from kvq.models.model import load_prepared
from kvq.scheduler import StepPlan
from kvq.weights.linear import PackedEmbedding, replace_linear

_LARGEST_GROUP = 128


def check_self(prepared: PreparedModel, weights: str | None) -> None:
    """Raise ConfigError for a model whose weights are already quantized, or that has recurrent states."""
    parse_weight_format(weights or _default_weights(prepared))
    if prepared.is_quantized:
        raise ConfigError(
            f"speculation by self rounds the weights of the model, but {prepared.folder} holds quantized "
            f"ones already; serve the unquantized model, or take the method ngram or draft"
        )
    if prepared.geometry.states:
        raise ConfigError(
            "speculation by self can't go back in recurrent states, which this model keeps; take the method "
            "ngram, or draft with a model that keeps none"
        )


def _default_weights(prepared: PreparedModel) -> str:
    """Return INT4 with the largest group size, at most 128, that divides the inputs of every matrix."""
    widths = [entry.shape[1] for entry in prepared.entries if len(entry.shape) == 2]
    group = gcd(_LARGEST_GROUP, *widths)
    return "int4" if group == _LARGEST_GROUP else f"int4_g{group}"


def load_self(model: Model, weights: str | None) -> LoadedWeights:
    """Return the model's weights, rounded further. Weights that are not rounded are shared with the model."""
    form = parse_weight_format(weights or _default_weights(model.prepared))
    rounded = replace(model.prepared, rounded_to=form, exact=False)  # the model itself decides on drafts
    draft = load_prepared(rounded, model.recipe, model.static_scales).weights
    share_equal(model.weights, draft)
    return draft


@torch.no_grad()
def share_equal(target: LoadedWeights, draft: LoadedWeights) -> None:
    """Share parameters that are equal in two models, such as embeddings."""
    known = dict(target.model.named_parameters())
    for name, parameter in draft.model.named_parameters():
        other = known.get(name)
        if other is None or parameter.is_mkldnn or other.is_mkldnn or parameter.dtype != other.dtype:
            continue
        if parameter.shape == other.shape and torch.equal(parameter, other):
            parameter.data = other.data
    packed = {name: x for name, x in target.model.named_modules() if isinstance(x, PackedEmbedding)}
    for name, embedding in packed.items():
        own = draft.model.get_submodule(name)
        if isinstance(own, nn.Embedding) and torch.equal(own.weight, embedding.weight):
            replace_linear(draft.model, name, embedding)


class SelfDraft(Drafter):  # D260: uses the model's own blocks, no separate cache
    """Drafter that runs a plan's branches token by token with rounded weights, before the step runs."""

    def __init__(self, chooser: Chooser, runner: Runner, weights: LoadedWeights) -> None:
        super().__init__(chooser)
        self._runner = runner
        self.weights = weights

    def logits(self, plan: StepPlan, growing: list[Growing]) -> Tensor:
        """Return logits after each branch's newest token. K and V are written to the step's slots."""
        return self._runner.forward(_single(plan, growing), weights=self.weights).logits


def _single(plan: StepPlan, growing: list[Growing]) -> StepPlan:
    """Return a one-token step for the newest known or drafted token of some of the plan's branches."""
    ends, tokens = [], []
    for one in growing:
        drafts = one.drafts
        end = plan.ends[one.index] - plan.drafts[one.index] + len(drafts)
        ends.append(end)
        tokens.append(drafts[-1].token if drafts else one.branch.tokens[end - 1])
    count = len(growing)
    return StepPlan(
        number=plan.number,
        branches=[one.branch for one in growing],
        num_decodes=count,
        counts=[1] * count,
        drafts=[0] * count,
        ends=ends,
        samples=[True] * count,
        token_ids=tokens,
        moves=[None] * count,
        orders=[],
    )
