"""From the logits of a step to everybody's next tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from kvq.engine.device.runner import StepOutput
from kvq.engine.device.transfers import Readback, upload
from kvq.engine.grammar.walk import Walk
from kvq.engine.requests.outputs import TokenLogprobs
from kvq.engine.requests.request_state import Job
from kvq.engine.sampling.logprobs import beam_candidates, prompt_logprobs
from kvq.engine.sampling.sampler import Drafted, PendingSamples, Sampler
from kvq.engine.sampling.seeds import mix_seed
from kvq.errors import EngineError, KVQError, NumericalError, first_lines
from kvq.scheduler import Branch, Request, StepPlan

Token = tuple[int, TokenLogprobs | None]
_NO_DRAFTS: Mapping[int, Sequence[Drafted]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Choices:
    """What was chosen, by the plan's indices; `errors` are of requests that can't go on."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)  # accepted drafts, and the token behind them
    forks: dict[Request, list[Token]] = field(default_factory=dict)  # one per branch, after the prompt
    beams: list[Request] = field(default_factory=list)  # whose candidates came in
    errors: dict[Request, KVQError] = field(default_factory=dict)


@dataclass(slots=True)
class _Draw:
    """One row of logits from which one branch draws a token."""

    branch: Branch
    row: int  # of the logits
    plan_index: int | None  # None: a fork's first token
    ahead: Sequence[int] = ()  # drafts before it
    drafted: Drafted | None = None  # what it is to be, if it was drawn from a distribution

    def follows(self, chosen: list[Token]) -> bool:
        """True if the drafts before it are what was chosen."""
        return len(chosen) == len(self.ahead) and (not chosen or chosen[-1][0] == self.ahead[-1])


@dataclass(slots=True, eq=False)
class Wanted:
    """What is to be chosen from a step's logits, as far as it is known without them."""

    plan: StepPlan
    errors: dict[Request, KVQError]  # of requests that can't go on
    draws: list[_Draw] = field(default_factory=list)
    masks: dict[int, Tensor] = field(default_factory=dict)  # by place, tokens that a grammar lets come
    beams: list[tuple[Branch, int]] = field(default_factory=list)  # and their rows
    prompts: list[tuple[Job, int, int, int]] = field(default_factory=list)  # job, first row, rows, end


@dataclass(slots=True, eq=False)  # one a step
class PendingChoices:
    """Choices whose tokens are on their way to the host."""

    _plan: StepPlan
    _choices: Choices
    _bad_tokens: Readback
    _draws: list[_Draw]
    _samples: PendingSamples | None  # of the draws, if there are any

    def drew(self, branches: list[int]) -> bool:
        """True if some of the plan's branches, by index, draw exactly one token each and nothing failed."""
        places = {draw.plan_index for draw in self._draws}
        return bool(branches) and not self._choices.errors and places.issuperset(branches)

    def tokens(self, branches: list[int]) -> Tensor:
        """int64 [branches] on the device: what they drew."""
        assert self._samples is not None, "some were drawn"
        places = {draw.plan_index: i for i, draw in enumerate(self._draws)}
        drawn, wanted = self._samples.tokens, [places[i] for i in branches]
        if wanted == list(range(len(drawn))):
            return drawn
        return drawn[upload(wanted, drawn.device)]

    def wait(self) -> Choices:
        """The choices, once they are there."""
        choices = self._choices
        if self._samples is not None:
            samples = self._samples.wait()
            for i, draw in enumerate(self._draws):
                request = draw.branch.request
                token = (samples.tokens[i], samples.logprobs[i])
                if draw.plan_index is not None:
                    chosen = choices.tokens.setdefault(draw.plan_index, [])
                    if not draw.follows(chosen):
                        continue
                    chosen.append(token)
                else:
                    choices.forks.setdefault(request, []).append(token)
                if not samples.finite[i]:
                    choices.errors.setdefault(request, _not_finite("the logits"))
        _find_bad(self._plan, self._bad_tokens.wait(), choices.errors)
        return choices


class Chooser:
    """Samples for all branches of a step at once; keeps the sampler's rows those of the branches."""

    def __init__(self, sampler: Sampler, max_num_seqs: int) -> None:
        self._sampler = sampler
        self._bound: list[Branch | None] = [None] * max_num_seqs

    def prepare(
        self,
        plan: StepPlan,
        output: StepOutput,
        jobs: dict[Request, Job],
        errors: dict[Request, KVQError],
        drafts: Mapping[int, Sequence[Drafted]] = _NO_DRAFTS,
    ) -> Wanted:
        """What is wanted of a step, which may run yet: for every branch that wants a token.

        Requests in `errors` and those that ended want none.
        """
        wanted = Wanted(plan, errors)
        draws = wanted.draws
        for i, branch in enumerate(plan.branches):
            if branch.is_done or branch.request in errors:
                continue
            job = jobs[branch.request]
            row = output.starts[i]
            end = plan.ends[i]
            if num_rows := job.prompt_rows(end - plan.counts[i], end):
                wanted.prompts.append((job, row, num_rows, end))
                row += num_rows - 1
            if not plan.samples[i]:
                continue
            if job.beams is not None:
                wanted.beams.append((branch, row))
            elif job.request.is_forked:
                draws.append(_Draw(branch, row, i))
                if plan.drafts[i]:
                    draws[-1:] = _behind(draws[-1], drafts[i])
            else:
                draws.extend(_Draw(fork, row, None) for fork in job.request.branches)
        wanted.draws, wanted.masks = _masked(draws, jobs, errors)
        for draw in wanted.draws:
            self.bind(jobs[draw.branch.request], draw.branch)
        return wanted

    def choose(self, wanted: Wanted, output: StepOutput, jobs: dict[Request, Job]) -> PendingChoices:
        """Draw what is wanted from the logits of a step that has ended."""
        choices = Choices(errors=wanted.errors)
        bad_tokens = Readback(output.bad_tokens)
        for job, row, num_rows, end in wanted.prompts:
            _read_prompt(job, output.logits[row : row + num_rows], end)
        samples = self._draw(wanted, output.logits, jobs) if wanted.draws else None
        if wanted.beams:
            _expand(wanted.beams, output.logits, jobs, choices)
        return PendingChoices(wanted.plan, choices, bad_tokens, wanted.draws, samples)

    def record(self, branch: Branch, token: int) -> None:
        """A token was accepted: penalties count it from now on."""
        if branch.row is not None and self._bound[branch.row] is branch:
            self._sampler.record(branch.row, token)

    def bind(self, job: Job, branch: Branch) -> None:
        """See to it that the sampler knows a branch's row, if it is new or came back at another place."""
        row = _row(branch)
        if self._bound[row] is branch:
            return
        if branch in self._bound:  # what the row it left has counted grows old
            self.forget(self._bound.index(branch))
        self.forget(row)
        self._sampler.add(
            row,
            job.params,
            prompt=job.request.tokens,
            generated=branch.tokens[job.request.prompt_length :],
            seed=mix_seed(job.seed, job.index_of(branch)),
            stop_ids=list(job.end_ids),
        )
        self._bound[row] = branch

    def forget(self, row: int) -> None:
        """A row's branch ended or moved."""
        if self._bound[row] is not None:
            self._sampler.remove(row)
            self._bound[row] = None

    def _draw(self, wanted: Wanted, logits: Tensor, jobs: dict[Request, Job]) -> PendingSamples:
        draws, masks = wanted.draws, wanted.masks
        rows = [draw.row for draw in draws]
        if rows != list(range(logits.shape[0])):
            logits = logits[upload(rows, logits.device)]
        marked = [(i, draw) for i, draw in enumerate(draws) if jobs[draw.branch.request].params.watermark]
        return self._sampler.sample(
            logits,
            [_row(draw.branch) for draw in draws],
            [draw.branch.num_generated + len(draw.ahead) for draw in draws],
            masks=masks or None,
            ahead={i: draw.ahead for i, draw in enumerate(draws) if draw.ahead},
            drafted={i: draw.drafted for i, draw in enumerate(draws) if draw.drafted is not None},
            contexts={i: [*draw.branch.tokens, *draw.ahead] for i, draw in marked} or None,
        )


def _row(branch: Branch) -> int:
    assert branch.row is not None, "a branch that computes has a row"
    return branch.row


def _masked(
    draws: list[_Draw], jobs: dict[Request, Job], errors: dict[Request, KVQError]
) -> tuple[list[_Draw], dict[int, Tensor]]:
    """Draws without those whose grammars failed, and by place what the others' grammars let come."""
    kept: list[_Draw] = []
    masks: dict[int, Tensor] = {}
    walk: Walk | None = None  # behind the drafts of a branch, whose draws are neighbours
    for draw in draws:
        job = jobs[draw.branch.request]
        matcher = job.results[job.index_of(draw.branch)].matcher
        mask: Tensor | None = None
        if job.request not in errors and matcher is not None:
            count = draw.branch.num_generated + len(draw.ahead)
            if draw.ahead:
                assert walk is not None, "the draw before it began one"
                walk.accept(draw.ahead[-1])
                mask = walk.mask()
                if mask is None or job.must_go_on(count, mask):  # nothing can follow that draft
                    continue
            else:
                walk = Walk(matcher)
                try:
                    mask = matcher.mask()
                    if job.must_go_on(count, mask):
                        raise job.too_short(count)
                except Exception as error:  # noqa: BLE001 - whatever a grammar's library raises
                    errors[job.request] = as_known(error, "its grammar raised ")
        if job.request not in errors:
            if mask is not None:
                masks[len(kept)] = mask
            kept.append(draw)
    return kept, masks


def _behind(first: _Draw, drafts: Sequence[Drafted]) -> list[_Draw]:
    """The draws of a branch with drafts: of each that is to be one, and of what follows the last."""
    tokens = [draft.token for draft in drafts]
    return [
        replace(first, row=first.row + i, ahead=tokens[:i], drafted=None if draft.masses is None else draft)
        for i, draft in enumerate((*drafts, Drafted(0)))
    ]


def _not_finite(what: str) -> NumericalError:
    return NumericalError(
        f"{what} of this request held NaN or infinity; the weights or the dtype overflow, try dtype fp32"
    )


def _find_bad(plan: StepPlan, flags: list[bool], errors: dict[Request, KVQError]) -> None:
    """Note the requests of which a new token's K or V was not finite."""
    if not any(flags):
        return
    at = 0
    for branch, count in zip(plan.branches, plan.counts, strict=True):
        if any(flags[at : at + count]) and not branch.is_done:  # else it was computed in vain
            errors.setdefault(branch.request, _not_finite("K or V"))
        at += count


def _expand(
    beams: list[tuple[Branch, int]], logits: Tensor, jobs: dict[Request, Job], choices: Choices
) -> None:
    """Keep the likeliest tokens of every beam until those of all its request's beams are there."""
    most = max(job.beams.num_candidates for b, _ in beams if (job := jobs[b.request]).beams is not None)
    rows = logits[upload([row for _, row in beams], logits.device)]
    finite = torch.isfinite(rows).all(dim=-1).tolist()
    values, tokens = beam_candidates(rows, min(most, rows.shape[-1]))
    for i, (branch, _) in enumerate(beams):
        job = jobs[branch.request]
        assert job.beams is not None, "only beams are expanded"
        if not finite[i]:
            choices.errors.setdefault(job.request, _not_finite("the logits"))
            continue
        count = job.beams.num_candidates
        job.candidates[branch] = list(zip(values[i][:count], tokens[i][:count], strict=True))
        if len(job.candidates) == job.beams.num_running:
            choices.beams.append(job.request)


def _read_prompt(job: Job, rows: Tensor, end: int) -> None:
    """Log-probabilities of the prompt tokens that follow a chunk's last positions, which end at `end`."""
    assert job.prompt_logprobs is not None, "asked for"
    known = len(job.prompt_logprobs)
    targets = job.request.tokens[known : end + 1]
    skipped = known - 1 - (end - len(rows))  # below 0: tokens before the chunk are missing
    if skipped < 0 or not targets:
        return
    rows = rows[skipped : skipped + len(targets)]
    job.prompt_logprobs += prompt_logprobs(rows, targets.tolist(), job.params.prompt_logprobs or 0)


def as_known(error: BaseException, what: str = "") -> KVQError:
    """An error as who asked may be told it, on one line: ours with its own words, any other with its type."""
    return error if isinstance(error, KVQError) else EngineError(what + describe(error))


def describe(error: BaseException) -> str:
    """A foreign error on one line."""
    return f"{type(error).__name__}: {first_lines(error)}"
