"""Measurement of KV formats on sessions: scores along given answers, and free runs of the same turns."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvq.engine import LLM
from kvq.engine.exactness import engine_facts
from kvq.errors import RequestError
from kvq.evals.report.bootstrap import Bootstrap
from kvq.evals.watch import UNWATCHED, Watch
from kvq.models import Model
from kvq.traces.finished import Finished
from kvq.traces.forced import Replay, Scored, Scores
from kvq.traces.free import Call, Key, Outcome, Question, are_same, engine_for, generate, questions_of
from kvq.traces.judging import ENOUGH, LEAST_RIGHT, Sums, TraceRow, Turn, judge
from kvq.traces.kinds import CALLED, DECISIVE, TokenKind, kinds_of
from kvq.traces.rendering import Rendering, Stretch
from kvq.traces.sessions import RecordedSession

_PART = 32  # turns that are generated together
_Forced = dict[str, Any]  # one turn in one format: `kinds`, `diverges_at`, `lost`


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePlan:
    """Plan of a measurement."""

    sessions: Sequence[RecordedSession]
    is_free: bool = True  # turns are generated, too, not only scored
    is_forced: bool = False  # generated turns can only be calls
    kv_memory: str | None = None
    finished: Path | None = None  # where finished parts are kept


@dataclass(kw_only=True, slots=True, eq=False)
class TraceFigures:
    """All turns in all formats, the baseline first."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)  # by format
    outcomes: dict[str, dict[Key, Outcome]] = field(default_factory=dict)  # by format
    left_out: dict[str, str] = field(default_factory=dict)  # session -> why


class TraceMeasurement:
    """One run."""

    def __init__(self, models: Sequence[Model], plan: TracePlan, watch: Watch = UNWATCHED) -> None:
        """`models`: one per format, the baseline first.

        Raises:
            RequestError: no session can be rendered.
            ConfigError: the file of finished parts belongs to another measurement.
        """
        self._models, self._plan, self._watch = models, plan, watch
        self.figures = TraceFigures()
        prepared = models[0].prepared
        self._rendering = Rendering(prepared, prepared.max_context)
        self._stretches = list(self._rendered())
        if not self._stretches:
            reason = next(iter(self.figures.left_out.values()))
            raise RequestError(f"none of the sessions can be replayed; the first: {reason}")
        self._questions: list[Question] = []
        if plan.is_free:
            given = models[0], plan.sessions, self._stretches
            self._questions = questions_of(*given, is_forced=plan.is_forced)
        self._finished = Finished(plan.finished, self._about())
        self._steps = len(models) * (len(self._stretches) + len(self._questions))
        self._done = 0

    def run(self) -> TraceFigures:
        """Measure everything that isn't finished yet.

        Raises:
            RequestError: K, V or logits are not finite.
        """
        baseline, *others = self._models
        if 0 < (count := len(self._questions)) < ENOUGH:
            self._watch.say(
                f"{count} turns are generated; they may show that a format harms, and safety takes {ENOUGH}"
            )
        self._generate(baseline)
        forced = self._score()
        self._join(baseline, forced)
        for model in others:
            self._generate(model)
            self._join(model, forced)
        return self.figures

    def _rendered(self) -> Iterator[Stretch]:
        for number, session in enumerate(self._plan.sessions):
            try:
                yield from self._rendering.stretches(number, session)
            except RequestError as error:
                self.figures.left_out[session.name] = str(error)

    def _about(self) -> dict[str, Any]:
        tokens = [[one.session, *one.tokens] for one in self._stretches]
        return {
            **engine_facts(self._models[0]),
            "formats": [[model.recipe.name, model.recipe.digest()] for model in self._models],
            "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "is_free": self._plan.is_free,
            "is_forced": self._plan.is_forced,
        }

    def _generate(self, model: Model) -> None:
        if not self._questions:
            return
        name, outcomes = model.recipe.name, self.figures.outcomes.setdefault(model.recipe.name, {})
        with ExitStack() as stack:
            engines: list[LLM] = []  # made when the first part isn't finished
            for at in range(0, len(self._questions), _PART):
                some = self._questions[at : at + _PART]

                def make(some: list[Question] = some) -> list[dict[str, Any]]:
                    if not engines:
                        llm = engine_for(model, self._questions, self._plan.kv_memory)
                        engines.append(stack.enter_context(llm))
                    return [asdict(one) for one in generate(engines[0], some, self._step)]

                made = self._finished.of(f"free {name} {at}", make)
                outcomes |= zip((one.key for one in some), map(_outcome, made), strict=True)
                self._done += len(some)
                self._step(0, 0)
                if not at and model is self._models[0]:
                    self._look_at([one["is_valid"] for one in made])

    def _look_at(self, valid: Sequence[bool]) -> None:
        """Tell early if few of the baseline's first answers are valid: formats can't be judged by others."""
        if sum(valid) < LEAST_RIGHT * len(valid):
            count, remedy = len(valid), "" if self._plan.is_forced else "; stop, and try --forced-calls"
            wrong = count - sum(valid)
            self._watch.say(f"{wrong} of the first {count} answers are no calls or JSON that fit{remedy}")

    def _step(self, done: int, _: int) -> None:
        self._watch.progress(self._done + done, self._steps)

    def _score(self) -> dict[str, list[_Forced]]:
        """Return each format's scored turns, in the order of stretches and answers."""
        outcomes = self.figures.outcomes.get(self._models[0].recipe.name, {})
        longest = max(len(one.tokens) for one in self._stretches)
        longest += max((len(one.token_ids) for one in outcomes.values()), default=0)
        replay: list[Replay] = []  # made when the first part isn't finished
        found: dict[str, list[_Forced]] = {model.recipe.name: [] for model in self._models}
        for number, stretch in enumerate(self._stretches):

            def make(stretch: Stretch = stretch) -> list[list[_Forced]]:
                if not replay:
                    replay.append(Replay(self._models, longest))
                own = {
                    message: one for (session, message), one in outcomes.items() if session == stretch.session
                }
                given = {message: one.token_ids for message, one in own.items()}
                scored = replay[0].scores(stretch, given)
                return [self._forced(stretch, one, own.get(one[0].message)) for one in scored]

            for turns in self._finished.of(f"stretch {number}", make):
                for name, turn in zip(found, turns, strict=True):
                    found[name].append(turn)
            self._done += len(self._models)
            self._step(0, 0)
        return found

    def _forced(self, stretch: Stretch, scored: Scored, own: Outcome | None) -> list[_Forced]:
        """Return one turn in every format."""
        answer, recorded, mine = scored
        message = self._plan.sessions[stretch.session].messages[answer.message]
        kinds = kinds_of(self._rendering.texts(stretch.tokens[answer.first : answer.end]), message)
        lost: list[str | None] = [None] * len(recorded)
        if own is not None and mine:
            calls = [{"function": call._asdict()} for call in own.calls]
            pieces, chosen = self._rendering.texts(own.token_ids), np.array(own.token_ids)
            own_kinds = kinds_of(pieces, {"content": own.content, "tool_calls": calls})
            deciding = CALLED if self._plan.is_forced else DECISIVE
            decides = np.array([kind in deciding for kind in own_kinds])
            decides &= mine[0].top == chosen  # elsewhere a grammar chose
            lost = [_first(own_kinds, decides & (one.top != chosen)) for one in mine]
        return [
            {"kinds": _sums(kinds, one), "diverges_at": _first(range(len(kinds)), ~one.same), "lost": kind}
            for one, kind in zip(recorded, lost, strict=True)
        ]

    def _join(self, model: Model, forced: dict[str, list[_Forced]]) -> None:
        """Make a format's turns of its scores and outcomes."""
        name, baseline = model.recipe.name, self._models[0].recipe.name
        outcomes = self.figures.outcomes.get(name, {})
        bases = self.figures.outcomes.get(baseline, {})
        places = [(stretch, answer) for stretch in self._stretches for answer in stretch.answers]
        turns = []
        for (stretch, answer), one in zip(places, forced[name], strict=True):
            session = self._plan.sessions[stretch.session]
            key = stretch.session, answer.message
            turns.append(
                Turn(
                    session=stretch.session,
                    number=1 + list(session.answers()).index(answer.message),
                    depth=answer.first,
                    kinds=one["kinds"],
                    diverges_at=one["diverges_at"],
                    lost=one["lost"],
                    **(_judged(session, outcomes[key], bases[key]) if key in outcomes else {}),
                )
            )
        self.figures.turns[name] = turns
        self._watch.keep(lambda: [self.figures])


def trace_rows(
    figures: TraceFigures, models: Sequence[Model], bootstrap: Bootstrap, tolerance: float
) -> list[TraceRow]:
    """Return the rows of the formats that are finished, the baseline first."""
    baseline = models[0].recipe.name
    return [
        judge(
            *(name, model.bits_per_element, figures.turns[name], bootstrap),
            baseline=baseline,
            tolerance=tolerance,
        )
        for model in models
        if (name := model.recipe.name) in figures.turns
    ]


def _judged(session: RecordedSession, one: Outcome, base: Outcome) -> dict[str, Any]:
    is_same = are_same(base.calls, one.calls, session) and one.is_valid == base.is_valid
    if is_same and base.is_valid and not base.calls:
        is_same = json.loads(one.content) == json.loads(base.content)
    checked = session.is_checked
    return {
        "is_asked": True,
        "is_valid": one.is_valid,
        "is_checked": checked,
        "is_right": one.is_right,
        "is_changed": not is_same,
        "is_failed": not (one.is_right if checked else one.is_valid and is_same),
        "base_failed": not (base.is_right if checked else base.is_valid),
    }


def _outcome(made: dict[str, Any]) -> Outcome:
    return Outcome(**made | {"calls": [Call(*call) for call in made["calls"]]})


def _first(values: Sequence[Any], wanted: Any) -> Any:
    """Return the first value where `wanted` is true, or None."""
    return next((value for value, is_it in zip(values, wanted, strict=True) if is_it), None)


def _sums(kinds: Sequence[TokenKind], scores: Scores) -> dict[str, Sums]:
    found: dict[str, Sums] = {}
    for kind, kl, same in zip(kinds, scores.kl, scores.same, strict=True):
        tokens, before, alike = found.get(kind.value, (0, 0.0, 0))
        found[kind.value] = tokens + 1, before + float(kl), alike + int(same)
    return found
