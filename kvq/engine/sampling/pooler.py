"""Pooler: computes embeddings of texts, and scores of pairs, from the hidden states of their tokens."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from kvq.engine.device.runner import StepOutput
from kvq.engine.requests.request_state import Job, as_job
from kvq.errors import ConfigError, ModelError
from kvq.models import Model
from kvq.models.describe.pooling import SCORE_HEAD, Pooling, read_pooling
from kvq.models.describe.text_part import read_other_tensor
from kvq.scheduler import StepPlan


class Pooler:  # D430: requests for one token, which is dropped
    """Pooler of one model: follows the prompts of requests that pool, chunk by chunk."""

    def __init__(self, pooling: Pooling, model: Model) -> None:
        """Resolve tokens and read the classifier.

        Raises:
            ConfigError: the tokenizer has no token for "yes" or "no".
            ModelError: the classifier's tensor is missing, or has several scores.
        """
        self.pooling, width = pooling, model.geometry.hidden_size
        self._answers = [_token_id(model, token) for token in (pooling.yes, pooling.no)]
        self._head: Tensor | None = None  # fp32 [hidden_size]
        if pooling.has_head:
            stored = read_other_tensor(model.prepared.folder, SCORE_HEAD)
            if stored is None or tuple(stored.shape) != (1, width):
                has = "no" if stored is None else f"a {list(stored.shape)}"
                raise ModelError(
                    f"{model.prepared.folder} has {has} {SCORE_HEAD}; scores need one of [1, {width}]"
                )
            self._head = stored[0].to(model.weights.device, torch.float32)

    @torch.inference_mode()
    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the hidden states of a step that has run, and finish the requests whose prompts end in it."""
        at = 0
        for i, (branch, count, end) in enumerate(zip(plan.branches, plan.counts, plan.ends, strict=True)):
            job = as_job(branch.request)
            if job.pools and not branch.is_done and output.hidden is not None:
                self._add(job, output.hidden[at : at + count], end)
                if plan.samples[i]:
                    job.vector = self._result(job, output.logits[output.starts[i]])
            at += count

    def _add(self, job: Job, rows: Tensor, end: int) -> None:
        """Add the hidden states, [rows, hidden_size], of a prompt's tokens before `end`."""
        if self.pooling.place == "last":
            job.pooled = rows[-1].float()
        elif self.pooling.place == "first":
            job.pooled = rows[0].float() if job.pooled is None else job.pooled
        elif (num_new := end - job.num_pooled) > 0:  # others are computed again after a preemption
            assert num_new <= len(rows), "none are taken from the cache"
            total = rows[len(rows) - num_new :].float().sum(0)
            job.pooled = total if job.pooled is None else job.pooled + total
            job.num_pooled = end

    def _result(self, job: Job, logits: Tensor) -> list[float]:
        pooling, pooled = self.pooling, job.pooled
        assert pooled is not None, "the prompt's last tokens were added"
        if pooling.scores:
            return [self._score(pooled, logits)]
        if pooling.place == "mean":
            pooled = pooled / job.num_pooled
        pooled = pooled[: job.dimensions]
        if pooling.is_normalized:
            pooled = functional.normalize(pooled, dim=0)
        return [float(value) for value in pooled.tolist()]

    def _score(self, pooled: Tensor, logits: Tensor) -> float:
        if self._head is not None:
            score = float(pooled @ self._head)
        else:
            yes, no = (None if one is None else float(logits[one]) for one in self._answers)
            score = (yes or 0.0) - (no or 0.0)
        return 0.5 * (1 + math.tanh(score / 2)) if self.pooling.is_probability else score  # sigmoid


def _token_id(model: Model, token: int | str | None) -> int | None:
    """Return the id of a token that stands for an answer; raise ConfigError if the model has none."""
    found = model.tokenizer.get_vocab().get(token) if isinstance(token, str) else token
    if token is not None and not (isinstance(found, int) and 0 <= found < model.geometry.vocab_size):
        raise ConfigError(
            f"{model.prepared.folder} has no token {token!r}, so it can't score by it; leave pooling out"
        )
    return found


def make_pooler(model: Model, choice: str) -> Pooler | None:
    """Return a model's pooler, as its files or the operator's `choice` say, or None if it only generates.

    Raises:
        ConfigError: the tokenizer has no token for "yes" or "no".
        ModelError: the files name something that kvq does not compute, or lack a tensor.
    """
    pooling = read_pooling(model.prepared.folder, choice)
    return None if pooling is None else Pooler(pooling, model)
