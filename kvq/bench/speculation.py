"""`kvq bench speculation`: acceptance rate of drafts, tokens per step, and speedup.

With acceptance rate `a` and k drafts, a step yields (1 - a^(k + 1)) / (1 - a) tokens on average. If a draft
pass takes r times as long as a decode step, and verification costs nothing, the speedup is this number
divided by 1 + k r (Leviathan et al. 2023, section 3.2). Rows include both expected and measured values. They
also include the acceptance rate computed offline, without drafting: the logits of both models on generated
texts show which drafts would be accepted, and a walk along the texts shows which drafts would be verified.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvq.bench.timing import in_turn, percentile, spread
from kvq.engine import LLM, SamplingParams
from kvq.engine.speculation.draft_model import DraftModel
from kvq.engine.speculation.ngram import NGrams
from kvq.engine.speculation.self_draft import SelfDraft
from kvq.engine.speculation.speculator import Speculator
from kvq.engine.speculation_config import Speculation
from kvq.errors import ConfigError
from kvq.evals.watch import UNWATCHED, Progress, Watch, part_of
from kvq.layout import KVLayout
from kvq.models import Model
from kvq.models.loading.weights import LoadedWeights
from kvq.models.run.prompts import num_common
from kvq.models.run.session import Session

_CHUNK = 512  # tokens of a text per pass


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationPlan:
    """Plan of one benchmark: the drafting method, its depths, and the requests."""

    speculation: Speculation
    depths: tuple[int, ...]  # values of k
    prompts: list[list[int]]
    batch: int  # concurrent requests
    output_tokens: int
    temperature: float
    seed: int | None  # if set, tokens are the same with and without drafts
    repeats: int

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of all requests."""
        return SamplingParams(
            max_tokens=self.output_tokens, temperature=self.temperature, ignore_eos=True, seed=self.seed
        )


def expected_tokens(share: float, k: int) -> float:
    """Return tokens per step with k drafts, each correct with probability `share` if its predecessors are."""
    return float(k + 1) if share >= 1 else (1 - share ** (k + 1)) / (1 - share)


@dataclass(slots=True)
class _Contender:
    """Drafting depth with its measured rates and counts."""

    k: int  # 0: no drafts
    adapts: bool
    rates: list[float] = field(default_factory=list)  # tokens per second
    # generated, drafts, drafted, verified (drafts whose predecessors were correct), accepted
    counts: Counter[str] = field(default_factory=Counter)


def bench_speculation(
    model: Model, formats: Sequence[str], plan: SpeculationPlan, watch: Watch = UNWATCHED
) -> list[dict[str, Any]]:
    """Measure each format at each depth, and return the rows.

    Depth 0 means no drafts; in the last row of a format, the engine adapts the depth.

    Raises:
        KVQError: a request fails.
    """
    rows: list[dict[str, Any]] = []
    for number, kv in enumerate(formats):
        rows += _bench_format(model, kv, plan, part_of(watch.progress, number, len(formats)))
        watch.keep(rows.copy)
    return rows


def _bench_format(model: Model, kv: str, plan: SpeculationPlan, progress: Progress) -> list[dict[str, Any]]:
    longest = max(map(len, plan.prompts)) + plan.output_tokens
    layout = model.with_kv(kv).layout
    blocks = (plan.batch + 1) * (-(-longest // layout.block_size) + 1)
    options: dict[str, Any] = {"num_blocks": blocks, "max_num_seqs": plan.batch, "max_context": longest}
    with LLM(model, kv, speculation=plan.speculation, prefix_caching=False, **options) as llm:
        speculator = llm.core.speculator
        assert speculator is not None, "the engine was built with one"
        plain, *_ = [_run(llm, one, plan) for one in _contenders(plan)]  # compiles kernels, learns costs
        fresh, equal = _contenders(plan), 0
        for done, (_, contender) in enumerate(in_turn(fresh, plan.repeats), 1):
            tokens = _run(llm, contender, plan)
            equal += tokens == plain
            progress(done, plan.repeats * len(fresh))
        offline = offline_shares(llm, speculator, plan, plain)
        depth, step = speculator.depth, speculator.depth.costs.decode_s(plan.batch)
        cost = depth.draft_s(plan.batch) / step if depth.takes_passes and step else 0.0  # in decode steps
    base = percentile(fresh[0].rates, 50)
    repeatable = plan.temperature == 0 or plan.seed is not None
    facts = {
        "kv": kv,
        "method": plan.speculation.method,
        "draft_cost": cost,
        "runs_with_equal_tokens": equal / (plan.repeats * len(fresh)) if repeatable else None,
    }
    return [facts | _row(one, base, plan, offline, cost) for one in fresh]


def _contenders(plan: SpeculationPlan) -> list[_Contender]:
    """Return the contenders: no drafts, every fixed depth, and a depth adapted by the engine."""
    fixed = [_Contender(k, False) for k in (0, *plan.depths)]
    return [*fixed, _Contender(max(plan.depths), True)]


def _row(
    one: _Contender, base: float, plan: SpeculationPlan, offline: dict[int, float | None], cost: float
) -> dict[str, Any]:
    generated, accepted = one.counts["generated"], one.counts["accepted"]
    share = accepted / one.counts["verified"] if one.counts["verified"] else None
    steps = generated - accepted  # of single sequences
    expected = None
    if share is not None and not one.adapts:  # n-grams don't provide a draft in every step
        expected = 1 + (expected_tokens(share, one.k) - 1) * one.counts["drafts"] / steps
    return {
        "k": one.k,
        "adapts": one.adapts,
        "acceptance": share,
        "offline_acceptance": None if one.adapts else offline.get(one.k),
        "draft_acceptance": accepted / one.counts["drafted"] if one.counts["drafted"] else None,
        "drafts_per_step": one.counts["drafted"] / steps,
        "expected_tokens_per_step": expected,
        "tokens_per_step": generated / steps,
        "expected_speedup": None if expected is None else expected / (1 + one.k * cost),
        **spread("output_tokens_per_s", one.rates),
        "speedup": percentile(one.rates, 50) / base,
        "batch": plan.batch,
    }


def _run(llm: LLM, contender: _Contender, plan: SpeculationPlan) -> list[list[int]]:
    """Serve all prompts, `batch` at a time, update the contender's counts, and return the tokens."""
    speculator, counters = llm.core.speculator, llm.core.scheduler.counters
    assert speculator is not None, "the engine was built with one"
    speculator.use(k=contender.k, adapts=contender.adapts)
    speculator.proposer.reset()  # otherwise n-grams would find the answers of the previous run

    def counts() -> dict[str, int]:
        drafts = {"drafts": counters.drafts, "drafted": counters.drafted_tokens}
        return drafts | {"accepted": speculator.right, "verified": speculator.looked_at}

    contender.counts.subtract(counts())
    began = perf_counter()
    outputs = llm.generate(plan.prompts, plan.params)
    seconds = perf_counter() - began
    for output in outputs:
        if output.error is not None:
            raise output.error
    tokens = [output.outputs[0].token_ids for output in outputs]
    generated = sum(map(len, tokens))
    contender.rates.append(generated / seconds)
    contender.counts.update(counts(), generated=generated)
    return tokens


def offline_shares(
    llm: LLM, speculator: Speculator, plan: SpeculationPlan, texts: list[list[int]]
) -> dict[int, float | None]:
    """Return the acceptance rate for every k, computed without drafting; an empty dict for drafting heads.

    A model's draft is accepted if the most likely token is the same in both models; at a temperature above 0,
    it is accepted with probability sum(min(p, q)). For n-grams, the accepted drafts along these texts are
    counted.
    """
    if speculator.proposer.takes_passes is False:
        return {k: _lookup_share(plan, texts, k) for k in plan.depths}
    model, proposer = llm.model, speculator.proposer
    agreements: list[list[float]] = []
    for prompt, text in zip(plan.prompts, texts, strict=True):
        ids, first = prompt + text, len(prompt) - 1
        p = _logits(model.weights, model.layout, ids)[first:-1]
        if isinstance(proposer, DraftModel):
            q = _logits(proposer.session.weights, proposer.session.layout, ids)[first:-1]
        elif isinstance(proposer, SelfDraft) and not model.recipe.is_staged:
            q = _logits_over(model, proposer.weights, ids, first)
        else:
            return {}
        agreements.append(_agreement(p, q, plan.temperature).tolist())
    return {k: share_along(agreements, k) for k in plan.depths}


def share_along(agreements: Sequence[Sequence[float]], k: int) -> float | None:  # D263
    """Return the ratio of accepted to verified drafts, given each draft's probability of acceptance.

    This is not the mean of all probabilities: the token after k correct drafts is not a draft, and tokens in
    runs of errors are verified more often than tokens after correct drafts. The first token of an output is
    generated in the prompt's pass.
    """
    right = verified = 0.0
    for kept in agreements:
        begins = [0.0] * (len(kept) + 1)  # probability that a step's first draft is of token i
        begins[min(1, len(kept))] = 1.0
        for at in range(1, len(kept)):
            reached = begins[at]
            drafts = min(k, len(kept) - at - 1)
            for i in range(at, at + drafts):
                verified += reached
                begins[i + 1] += reached * (1 - kept[i])
                reached *= kept[i]
                right += reached
            begins[at + drafts + 1] += reached
    return right / verified if verified else None


def _logits_over(model: Model, weights: LoadedWeights, ids: list[int], first: int) -> Tensor:
    """Return other weights' logits on the model's KV, after each token from `first` on except the last."""
    session = Session(model.weights, model.layout, max_tokens=len(ids))
    sequence, parts = session.new_sequence(), []
    if first:
        session.forward([(sequence, ids[:first])])
    for at in range(first, len(ids) - 1):
        for session.weights in (weights, model.weights):
            logits = session.forward([(sequence, ids[at : at + 1])])[0].logits
            if session.weights is weights:
                parts.append(logits)
                session.manager.truncate(sequence, at)
    return torch.cat(parts)


def _agreement(p: Tensor, q: Tensor, temperature: float) -> Tensor:
    """Return the probability that each row's draft is accepted, fp64 [rows]."""
    width = min(p.shape[-1], q.shape[-1])
    if temperature == 0:
        return (p[:, :width].argmax(dim=-1) == q[:, :width].argmax(dim=-1)).double()
    one, other = ((x[:, :width].double() / temperature).softmax(dim=-1) for x in (p, q))
    return torch.minimum(one, other).sum(dim=-1)


def _logits(weights: LoadedWeights, layout: KVLayout, ids: list[int]) -> Tensor:
    """Return the logits after every token, computed with a new cache, fp32 [tokens, vocab]."""
    session = Session(weights, layout, max_tokens=len(ids))
    sequence, parts = session.new_sequence(), []
    for at in range(0, len(ids), _CHUNK):
        parts.append(session.forward([(sequence, ids[at : at + _CHUNK])], all_rows=True)[0].logits)
    return torch.cat(parts)


def _lookup_share(plan: SpeculationPlan, texts: list[list[int]], k: int) -> float | None:
    """Return the ratio of accepted to verified n-gram drafts along the texts."""
    right = verified = 0
    answers = NGrams()
    for prompt, text in zip(plan.prompts, texts, strict=True):
        known = NGrams()
        known.extend(prompt)
        at = 1
        while at < len(text):
            known.extend(text[len(known.tokens) - len(prompt) : at])
            limit = min(k, len(text) - at - 1)
            guessed = known.following(known.tokens, limit) or answers.following(known.tokens, limit)
            good = num_common(guessed, text[at:])
            verified += min(len(guessed), good + 1)
            right += good
            at += good + 1
        answers.extend(text)
    return right / verified if verified else None


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the conclusions from the rows, as one line per format."""
    lines = []
    for kv in dict.fromkeys(row["kv"] for row in rows):
        mine = [row for row in rows if row["kv"] == kv and row["k"]]
        fixed = max((row for row in mine if not row["adapts"]), key=lambda row: row["speedup"])
        own = next(row for row in mine if row["adapts"])
        share = (
            "no draft was made"
            if fixed["acceptance"] is None
            else f"{fixed['acceptance']:.0%} of drafts right"
        )
        word = "pays" if fixed["speedup"] > 1.02 else "does not pay"
        lines.append(
            f"{kv}: drafting {word} at batch {fixed['batch']}: {fixed['speedup']:.2f} times the tokens "
            f"per second with k={fixed['k']}, {share}, {fixed['tokens_per_step']:.2f} tokens a step; "
            f"left to itself {own['speedup']:.2f} times"
        )
    return lines


def check_depths(text: str, most: int) -> tuple[int, ...]:
    """Parse values of k, separated by commas.

    Raises:
        ConfigError: a value is not a whole number from 1 to `most`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"--k takes whole numbers of 1 to {most} with commas between, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))
