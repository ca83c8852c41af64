"""Token selection: chooses the next tokens of all branches from a step's logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvq.engine.device.runner import StepOutput
from kvq.engine.device.transfers import Readback, upload
from kvq.engine.grammar.walk import Walk
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.engine.requests.request_state import Job, as_job
from kvq.engine.sampling.logprobs import beam_candidates, prompt_logprobs
from kvq.engine.sampling.pooler import Pooler
from kvq.engine.sampling.sampler import AfterDrafts, Drafted, PendingSamples, Sampler
from kvq.engine.sampling.seeds import mix_seed
from kvq.errors import EngineError, KVQError, NumericalError, first_lines
from kvq.scheduler import Branch, StepPlan

Token = tuple[int, TokenLogprobs | None]
_NO_DRAFTS: Mapping[int, Sequence[Drafted]] = MappingProxyType({})


@dataclass(slots=True)
class _Draw:  # D256: with a seed, tokens are the same with and without drafts
    """One row of logits from which a token is sampled for one branch."""

    job: Job
    branch: Branch
    row: int  # of the logits
    plan_index: int | None  # None for the first token of a fork
    ahead: Sequence[int] = ()  # drafts before this row
    drafted: Drafted | None = None  # draft to keep or replace, if it was drawn from a distribution

    def follows(self, chosen: list[Token]) -> bool:
        """Return True if the drafts before this row equal the chosen tokens."""
        return len(chosen) == len(self.ahead) and (not chosen or chosen[-1][0] == self.ahead[-1])


@dataclass(slots=True, eq=False)
class Wanted:
    """Tokens to choose from a step's logits, as far as they can be determined before the logits exist."""

    plan: StepPlan
    errors: dict[Job, KVQError]  # of requests that can't continue
    draws: list[_Draw] = field(default_factory=list)
    masks: dict[int, Tensor] = field(default_factory=dict)  # tokens that a grammar allows, by draw index
    beams: list[tuple[Branch, int]] = field(default_factory=list)  # with their rows of logits
    prompts: list[tuple[Job, int, int, int]] = field(default_factory=list)  # job, first row, rows, end


@dataclass(slots=True, eq=False)  # one per step
class Choices:
    """Chosen tokens of a step, available after `wait`, and the errors of requests that can't continue."""

    _plan: StepPlan
    errors: dict[Job, KVQError]
    _bad_tokens: Readback
    _draws: list[_Draw]
    _samples: PendingSamples | None  # of the draws, if there are any
    # By index in the plan: accepted drafts, and the token after them
    tokens: dict[int, list[Token]] = field(default_factory=dict)
    forks: dict[Job, list[Token]] = field(default_factory=dict)  # one per branch, after the prompt
    beams: list[Job] = field(default_factory=list)  # jobs whose candidates are complete

    def drew(self, branches: list[int]) -> bool:
        """Return True if each of these branches (plan indices) sampled a token and no request failed."""
        places = {draw.plan_index for draw in self._draws}
        return bool(branches) and not self.errors and places.issuperset(branches)

    def drawn(self, branches: list[int]) -> Tensor:
        """Return the tokens sampled for these branches: int64 [branches], on the device."""
        assert self._samples is not None, "some were drawn"
        places = {draw.plan_index: i for i, draw in enumerate(self._draws)}
        drawn, wanted = self._samples.tokens, [places[i] for i in branches]
        if wanted == list(range(len(drawn))):
            return drawn
        return drawn[upload(wanted, drawn.device)]

    def wait(self) -> "Choices":
        """Wait until all fields are filled, then return the object itself."""
        if self._samples is not None:
            samples = self._samples.wait()
            for i, draw in enumerate(self._draws):
                token = (samples.tokens[i], samples.logprobs[i])
                if draw.plan_index is not None:
                    chosen = self.tokens.setdefault(draw.plan_index, [])
                    if not draw.follows(chosen):
                        continue
                    chosen.append(token)
                else:
                    self.forks.setdefault(draw.job, []).append(token)
                if not samples.finite[i]:
                    self.errors.setdefault(draw.job, _not_finite("the logits"))
        _find_bad(self._plan, self._bad_tokens.wait(), self.errors)
        return self


class Chooser:
    """Selector of tokens for all branches of a step at once. It binds the sampler's rows to branches."""

    def __init__(self, sampler: Sampler, max_num_seqs: int, pooler: Pooler | None = None) -> None:
        self.sampler = sampler
        self._pooler, self.pooling = pooler, None if pooler is None else pooler.pooling
        self._bound: list[Branch | None] = [None] * max_num_seqs

    def prepare(
        self,
        plan: StepPlan,
        output: StepOutput,
        errors: dict[Job, KVQError],
        drafts: Mapping[int, Sequence[Drafted]] = _NO_DRAFTS,
    ) -> Wanted:
        """Find out which tokens the step's branches need. The step's forward pass may still be running.

        Branches of ended requests, and of requests in `errors`, need no token.
        """
        wanted = Wanted(plan, errors)
        draws = wanted.draws
        for i, branch in enumerate(plan.branches):
            job = as_job(branch.request)
            if branch.is_done or job in errors:
                continue
            row = output.starts[i]
            end = plan.ends[i]
            if num_rows := job.prompt_rows(end - plan.counts[i], end):
                wanted.prompts.append((job, row, num_rows, end))
                row += num_rows - 1
            if not plan.samples[i]:
                continue
            if job.beams is not None:
                wanted.beams.append((branch, row))
            elif job.is_forked:
                draws.append(_Draw(job, branch, row, i))
                if plan.drafts[i]:
                    draws[-1:] = _behind(draws[-1], drafts[i])
            else:
                draws.extend(_Draw(job, fork, row, None) for fork in job.branches)
        wanted.draws, wanted.masks = _masked(draws, errors)
        for draw in wanted.draws:
            self.bind(draw.job, draw.branch)
        return wanted

    def choose(self, wanted: Wanted, output: StepOutput) -> Choices:
        """Sample the wanted tokens from the logits of a step whose forward pass has finished."""
        bad_tokens = self.sampler.read_back(output.bad_tokens)
        for job, row, num_rows, end in wanted.prompts:
            _read_prompt(job, output.logits[row : row + num_rows], end)
        if self._pooler is not None:
            self._pooler.observe(wanted.plan, output)
        samples = self._draw(wanted, output.logits) if wanted.draws else None
        choices = Choices(wanted.plan, wanted.errors, bad_tokens, wanted.draws, samples)
        if wanted.beams:
            _expand(wanted.beams, output.logits, choices)
        return choices

    def record(self, branch: Branch, token: int) -> None:
        """Record an accepted token, which counts toward penalties from now on."""
        if branch.row is not None and self._bound[branch.row] is branch:
            self.sampler.record(branch.row, token)

    def bind(self, job: Job, branch: Branch) -> None:
        """Bind a branch to its sampler row if the branch is new or its row has changed."""
        row = _row(branch)
        if self._bound[row] is branch:
            return
        if branch in self._bound:  # the counts in its former row would become stale
            self.forget(self._bound.index(branch))
        self.forget(row)
        self.sampler.add(
            row,
            job.params,
            prompt=job.tokens,
            generated=branch.tokens[job.prompt_length :],
            seed=mix_seed(job.seed, job.index_of(branch)),
            stop_ids=list(job.end_ids),
        )
        self._bound[row] = branch

    def forget(self, row: int) -> None:
        """Unbind a row whose branch has ended or moved to another row."""
        if self._bound[row] is not None:
            self.sampler.remove(row)
            self._bound[row] = None

    def _draw(self, wanted: Wanted, logits: Tensor) -> PendingSamples:
        draws, masks = wanted.draws, wanted.masks
        rows = [draw.row for draw in draws]
        if rows != list(range(logits.shape[0])):
            logits = logits[upload(rows, logits.device)]
        drafts: dict[int, AfterDrafts] = {}
        contexts: dict[int, list[int]] = {}
        if wanted.plan.num_drafts:
            drafts = {i: (draw.ahead, draw.drafted) for i, draw in enumerate(draws)}
        if self.sampler.has_watermarks:
            marked = [(i, draw) for i, draw in enumerate(draws) if draw.job.params.watermark]
            contexts = {i: [*draw.branch.tokens, *draw.ahead] for i, draw in marked}
        return self.sampler.sample(
            logits,
            [_row(draw.branch) for draw in draws],
            [draw.branch.num_generated + len(draw.ahead) for draw in draws],
            masks=masks or None,
            drafts=drafts,
            contexts=contexts,
        )


def _row(branch: Branch) -> int:
    assert branch.row is not None, "a branch that computes has a row"
    return branch.row


def _masked(draws: list[_Draw], errors: dict[Job, KVQError]) -> tuple[list[_Draw], dict[int, Tensor]]:
    """Return the draws whose grammars did not fail, and their grammar masks, keyed by index."""
    kept: list[_Draw] = []
    masks: dict[int, Tensor] = {}
    walk: Walk | None = None  # through the drafts of a branch, whose draws are consecutive
    for draw in draws:
        job = draw.job
        matcher = job.results[job.index_of(draw.branch)].matcher
        mask: Tensor | None = None
        if job not in errors and matcher is not None:
            count = draw.branch.num_generated + len(draw.ahead)
            if draw.ahead:
                assert walk is not None, "the draw before it began one"
                walk.accept(draw.ahead[-1])
                mask = walk.mask()
                if mask is None or job.must_go_on(count, mask):  # nothing can follow this draft
                    continue
            else:
                walk = Walk(matcher)
                try:
                    mask = matcher.mask()
                    if job.must_go_on(count, mask):
                        raise job.too_short(count)
                except Exception as error:  # noqa: BLE001 - any error from a grammar's library
                    errors[job] = as_known(error, "its grammar raised ")
        if job not in errors:
            if mask is not None:
                masks[len(kept)] = mask
            kept.append(draw)
    return kept, masks


def _behind(first: _Draw, drafts: Sequence[Drafted]) -> list[_Draw]:
    """Return the draws for a branch with drafts: one per draft, and one after the last draft."""
    tokens = [draft.token for draft in drafts]
    return [
        replace(first, row=first.row + i, ahead=tokens[:i], drafted=None if draft.masses is None else draft)
        for i, draft in enumerate((*drafts, Drafted(0)))
    ]


def _not_finite(what: str) -> NumericalError:
    return NumericalError(
        f"{what} of this request held NaN or infinity; the weights or the dtype overflow, try dtype fp32"
    )


def _find_bad(plan: StepPlan, flags: list[bool], errors: dict[Job, KVQError]) -> None:
    """Record an error for each request with a new token whose K or V is not finite."""
    if not any(flags):
        return
    at = 0
    for branch, count in zip(plan.branches, plan.counts, strict=True):
        if any(flags[at : at + count]) and not branch.is_done:  # otherwise, it was computed for nothing
            errors.setdefault(as_job(branch.request), _not_finite("K or V"))
        at += count


def _expand(beams: list[tuple[Branch, int]], logits: Tensor, choices: Choices) -> None:
    """Store the candidates of each beam; a request is complete once all its beams have candidates."""
    most = max(job.beams.num_candidates for b, _ in beams if (job := as_job(b.request)).beams is not None)
    rows = logits[upload([row for _, row in beams], logits.device)]
    finite = torch.isfinite(rows).all(dim=-1).tolist()
    values, tokens = beam_candidates(rows, min(most, rows.shape[-1]))
    for i, (branch, _) in enumerate(beams):
        job = as_job(branch.request)
        assert job.beams is not None, "only beams are expanded"
        if not finite[i]:
            choices.errors.setdefault(job, _not_finite("the logits"))
            continue
        count = job.beams.num_candidates
        job.candidates[branch] = list(zip(values[i][:count], tokens[i][:count], strict=True))
        if len(job.candidates) == job.beams.num_running:
            choices.beams.append(job)


def _read_prompt(job: Job, rows: Tensor, end: int) -> None:
    """Append the log-probabilities of the prompt tokens that follow a chunk's positions, up to `end`."""
    assert job.prompt_logprobs is not None, "asked for"
    known = len(job.prompt_logprobs)
    targets = job.tokens[known : end + 1]
    skipped = known - 1 - (end - len(rows))  # negative: tokens before the chunk are missing
    if skipped < 0 or not targets:
        return
    rows = rows[skipped : skipped + len(targets)]
    job.prompt_logprobs += prompt_logprobs(rows, targets.tolist(), job.params.prompt_logprobs or 0)


def as_known(error: BaseException, what: str = "") -> KVQError:
    """Return an error as a KVQError: kvq's own errors unchanged, others on one line with their type."""
    return error if isinstance(error, KVQError) else EngineError(what + describe(error))


def describe(error: BaseException) -> str:
    """Return an error's type and message on one line."""
    return f"{type(error).__name__}: {first_lines(error)}"
