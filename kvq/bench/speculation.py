"""Drafting measured: how many drafts are right, how many tokens a step gives, and what that is worth.

With a share `a` of right drafts and k of them a step gives (1 - a^(k + 1)) / (1 - a) tokens on average. If a
pass of the draft costs r of a decode step, and checking drafts nothing, that is so many times faster divided
by 1 + k r (Leviathan et al. 2023, section 3.2). Beside that stands what was measured; and the share that is
found offline, without drafting: both models' logits over texts that the model wrote say which drafts would be
right, and a walk along them which would be looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvq.bench.timing import in_turn, percentile
from kvq.engine import LLM, SamplingParams
from kvq.engine.speculation.draft_model import DraftModel
from kvq.engine.speculation.ngram import NGrams
from kvq.engine.speculation.self_draft import SelfDraft
from kvq.engine.speculation.speculator import Speculator
from kvq.engine.speculation_config import Speculation
from kvq.errors import ConfigError
from kvq.layout import KVLayout
from kvq.models import Model
from kvq.models.loading.weights import LoadedWeights
from kvq.models.run.prompts import num_common
from kvq.models.run.session import Session

_CHUNK = 512  # tokens of a text in one pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is drafted how, for which requests."""

    speculation: Speculation
    depths: tuple[int, ...]  # values of k
    prompts: list[list[int]]
    batch: int  # requests at a time
    output_tokens: int
    temperature: float
    seed: int | None  # of requests, which then get the tokens that they get without drafts
    repeats: int

    @property
    def params(self) -> SamplingParams:
        """Of all requests."""
        return SamplingParams(
            max_tokens=self.output_tokens, temperature=self.temperature, ignore_eos=True, seed=self.seed
        )


def expected_tokens(share: float, k: int) -> float:
    """Tokens a step gives with k drafts, each right with probability `share` if those before it are."""
    return float(k + 1) if share >= 1 else (1 - share ** (k + 1)) / (1 - share)


@dataclass(slots=True)
class _Contender:
    """One way of drafting, and what was measured of it."""

    k: int  # 0: none
    adapts: bool
    rates: list[float]  # tokens per second
    generated: int = 0
    drafts: int = 0
    drafted: int = 0
    looked_at: int = 0
    accepted: int = 0

    @property
    def share(self) -> float | None:
        """Of drafts whose forerunners were right, those that were right."""
        return self.accepted / self.looked_at if self.looked_at else None


def bench_speculation(
    model: Model,
    formats: Sequence[str],
    plan: Plan,
    *,
    progress: Callable[[int, int], object] = lambda *_: None,
    keep: Callable[[Callable[[], Sequence[Any]]], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each format and depth; depth 0 drafts nothing, the last row of a format chooses its depth.

    Raises:
        KVQError: a request failed.
    """
    rows: list[dict[str, Any]] = []
    for number, kv in enumerate(formats):

        def tell(done: int, total: int, before: int = number) -> None:
            progress(before * total + done, len(formats) * total)

        rows += _bench_format(model, kv, plan, tell)
        keep(rows.copy)
    return rows


def _bench_format(
    model: Model, kv: str, plan: Plan, progress: Callable[[int, int], object]
) -> list[dict[str, Any]]:
    longest = max(map(len, plan.prompts)) + plan.output_tokens
    layout = model.with_kv(kv).layout
    blocks = (plan.batch + 1) * (-(-longest // layout.block_size) + 1)
    options: dict[str, Any] = {"num_blocks": blocks, "max_num_seqs": plan.batch, "max_context": longest}
    with LLM(model, kv, speculation=plan.speculation, prefix_caching=False, **options) as llm:
        speculator = llm.core.speculator
        assert speculator is not None, "it was asked for"
        plain, *_ = [_run(llm, one, plan) for one in _contenders(plan)]  # kernels compile, costs are learned
        fresh, equal = _contenders(plan), 0
        for done, (_, contender) in enumerate(in_turn(fresh, plan.repeats), 1):
            tokens = _run(llm, contender, plan)
            equal += tokens == plain
            progress(done, plan.repeats * len(fresh))
        offline = offline_shares(llm, speculator, plan, plain)
        cost = _draft_cost(speculator, plan.batch)
    base = percentile(fresh[0].rates, 50)
    repeatable = plan.temperature == 0 or plan.seed is not None
    facts = {
        "kv": kv,
        "method": plan.speculation.method,
        "draft_cost": cost,
        "runs_with_equal_tokens": equal / (plan.repeats * len(fresh)) if repeatable else None,
    }
    return [facts | _row(one, base, plan, offline, cost) for one in fresh]


def _contenders(plan: Plan) -> list[_Contender]:
    """No drafts first, then every number of them, then as many as the engine finds worth it."""
    fixed = [_Contender(k, False, []) for k in (0, *plan.depths)]
    return [*fixed, _Contender(max(plan.depths), True, [])]


def _row(
    one: _Contender, base: float, plan: Plan, offline: dict[int, float | None], cost: float
) -> dict[str, Any]:
    share, rate = one.share, percentile(one.rates, 50)
    steps = one.generated - one.accepted  # of sequences
    measured = one.generated / steps
    expected = None
    if share is not None and not one.adapts:  # n-grams don't find something to guess in every step
        expected = 1 + (expected_tokens(share, one.k) - 1) * one.drafts / steps
    return {
        "k": one.k,
        "adapts": one.adapts,
        "acceptance": share,
        "offline_acceptance": None if one.adapts else offline.get(one.k),
        "draft_acceptance": one.accepted / one.drafted if one.drafted else None,
        "drafts_per_step": one.drafted / steps,
        "expected_tokens_per_step": expected,
        "tokens_per_step": measured,
        "expected_speedup": None if expected is None else expected / (1 + one.k * cost),
        "output_tokens_per_s": rate,
        "output_tokens_per_s_p10": percentile(one.rates, 10),
        "output_tokens_per_s_p90": percentile(one.rates, 90),
        "speedup": rate / base,
        "batch": plan.batch,
    }


def _run(llm: LLM, contender: _Contender, plan: Plan) -> list[list[int]]:
    """Serve all prompts, `batch` at a time, and count."""
    speculator, counters = llm.core.speculator, llm.core.scheduler.counters
    assert speculator is not None, "it was asked for"
    speculator.use(k=contender.k, adapts=contender.adapts)
    speculator.proposer.begin_anew()  # else n-grams would find the answers of the run before
    before = counters.drafts, counters.drafted_tokens, speculator.right, speculator.looked_at
    began = perf_counter()
    outputs = llm.generate(plan.prompts, plan.params)
    seconds = perf_counter() - began
    for output in outputs:
        if output.error is not None:
            raise output.error
    tokens = [output.outputs[0].token_ids for output in outputs]
    contender.rates.append(sum(map(len, tokens)) / seconds)
    contender.generated += sum(map(len, tokens))
    after = counters.drafts, counters.drafted_tokens, speculator.right, speculator.looked_at
    drafts, drafted, accepted, looked_at = (b - a for a, b in zip(before, after, strict=True))
    contender.drafts += drafts
    contender.drafted += drafted
    contender.accepted += accepted
    contender.looked_at += looked_at
    return tokens


def _draft_cost(speculator: Speculator, batch: int) -> float:
    """What a pass of the draft costs, of a decode step; 0 for n-grams."""
    step = speculator.depth.costs.decode_s(batch)
    return speculator.depth.draft_s(batch) / step if speculator.depth.takes_passes and step else 0.0


# Without drafting


def offline_shares(
    llm: LLM, speculator: Speculator, plan: Plan, texts: list[list[int]]
) -> dict[int, float | None]:
    """For every k the share of drafts that would be right, found without drafting; nothing for heads.

    A draft of a model is right where both find the same token likeliest; with a temperature it is kept with
    probability sum(min(p, q)). Of n-grams: what they would have guessed along these texts.
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


def share_along(agreements: Sequence[Sequence[float]], k: int) -> float | None:
    """Of the drafts looked at, the share kept, where the draft of token i is kept with probability `[i]`.

    Not the mean of all: the token behind k right drafts is none, and errors that come in runs are looked at
    more often than what follows right ones. The first token of an answer comes from its prompt's pass.
    """
    right = looked_at = 0.0
    for kept in agreements:
        begins = [0.0] * (len(kept) + 1)  # the probability that a step's first draft is of token i
        begins[min(1, len(kept))] = 1.0
        for at in range(1, len(kept)):
            reached = begins[at]
            drafts = min(k, len(kept) - at - 1)
            for i in range(at, at + drafts):
                looked_at += reached
                begins[i + 1] += reached * (1 - kept[i])
                reached *= kept[i]
                right += reached
            begins[at + drafts + 1] += reached
    return right / looked_at if looked_at else None


def _logits_over(model: Model, weights: LoadedWeights, ids: list[int], first: int) -> Tensor:
    """Behind every token from `first` on but the last, by other weights over what the model's own wrote."""
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
    """Of each row, fp64 [rows]."""
    width = min(p.shape[-1], q.shape[-1])
    if temperature == 0:
        return (p[:, :width].argmax(dim=-1) == q[:, :width].argmax(dim=-1)).double()
    one, other = ((x[:, :width].double() / temperature).softmax(dim=-1) for x in (p, q))
    return torch.minimum(one, other).sum(dim=-1)


def _logits(weights: LoadedWeights, layout: KVLayout, ids: list[int]) -> Tensor:
    """Behind every token, over a cache of its own: fp32 [tokens, vocab]."""
    session = Session(weights, layout, max_tokens=len(ids))
    sequence, parts = session.new_sequence(), []
    for at in range(0, len(ids), _CHUNK):
        parts.append(session.forward([(sequence, ids[at : at + _CHUNK])], all_rows=True)[0].logits)
    return torch.cat(parts)


def _lookup_share(plan: Plan, texts: list[list[int]], k: int) -> float | None:
    right = looked_at = 0
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
            looked_at += min(len(guessed), good + 1)
            right += good
            at += good + 1
        answers.extend(text)
    return right / looked_at if looked_at else None


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say, a line a format."""
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
    """Values of k from a text with commas.

    Raises:
        ConfigError: others than whole numbers of 1 to `most`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"--k takes whole numbers of 1 to {most} with commas between, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))
