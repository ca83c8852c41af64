"""Tasks of `kvq eval` on agents' sessions: recorded ones (--traces), and those that kvq generates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.commands.shared.declare import option, path_option
from kvq.commands.shared.param_types import AT_LEAST_1, TO_READ, Finite, TokenCount
from kvq.errors import ConfigError, explained

if TYPE_CHECKING:
    from kvq.evals import EvalText
    from kvq.evals.report.bootstrap import Bootstrap
    from kvq.evals.watch import Watch
    from kvq.models import Model
    from kvq.models.loading.prepared import PreparedModel
    from kvq.traces.measure import TraceFigures
    from kvq.traces.sessions import Log

_EXAMPLES = 5  # per format


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Options for agents' sessions."""

    traces: str | None = path_option(
        "--traces",
        "Recorded sessions as JSONL: logs of OpenAI's chat or Responses API, of Anthropic's, or of kvq serve "
        "--record. Runs the task traces.",
        type=TO_READ,
    )
    sessions: int = option(25, "Sessions to generate for tools, edits, recall, ...", type=AT_LEAST_1)
    session_tokens: int = option(
        2000, "Tokens of a generated session, of four characters each.", type=TokenCount(1000, 30_000)
    )
    forced_calls: bool = option(
        False, "Let a grammar leave the model only calls of tools where the session has some."
    )
    free: bool = option(
        True, "Generate turns, too, or only score the given answers.", names="--free/--scores-only"
    )
    tolerance: float = option(
        0.02, "Share of turns that may fail more often where a format counts as safe.", type=Finite(0, 1)
    )
    texts: bool = option(False, "Show examples of failed turns with their texts.", names="--show-texts")
    finished: str | None = path_option(
        "--finished", "Keep finished parts in FILE.TASK, and go on from there after an interruption."
    )

    def source(self, names: Sequence[str], seed: int) -> "EvalText":
        """Return what results on sessions of these tasks call their text."""
        from kvq.evals import EvalText

        if self.traces is not None:
            with explained(ConfigError, f"can't read {self.traces}"):
                text = Path(self.traces).read_bytes().decode(errors="replace")
            return EvalText(name=self.traces, text=text)
        drawn = f"{','.join(names)}: {self.sessions} sessions of {self.session_tokens} tokens, seed {seed}"
        return EvalText(name=f"generated sessions ({drawn})", text=drawn)


def load(name: str, options: SessionOptions, model: "PreparedModel", seed: int) -> "Log":
    """Return the sessions of a task.

    Raises:
        ConfigError: the file holds none, or no file is named.
    """
    from kvq.traces.sessions import Log

    if not model.tokenizer.chat_template:
        raise ConfigError(f"the task {name} needs a model with a chat template")
    if name == "traces":
        from kvq.traces.reading import read_log

        if options.traces is None:
            raise ConfigError("the task traces needs recorded sessions: --traces sessions.jsonl")
        return read_log(Path(options.traces))
    from kvq.traces.tasks import generated

    tokens = min(options.session_tokens, model.max_context)
    return Log(sessions=generated(name, options.sessions, seed, tokens=tokens))


def run(
    models: "Sequence[Model]",
    given: tuple[str, "Log"],
    options: SessionOptions,
    bootstrap: "Bootstrap",
    *,
    kv_memory: str | None,
    watch: "Watch",
) -> dict[str, Any]:
    """Measure one task. Return its rows, and facts about them, as JSON by key.

    `models`: one per format, the baseline first; `given`: the task's name and sessions.
    """
    from kvq.traces.judging import advice
    from kvq.traces.measure import TraceMeasurement, TracePlan, trace_rows

    name, log = given
    how = TracePlan(
        sessions=log.sessions,
        is_free=options.free,
        is_forced=options.forced_calls,
        kv_memory=kv_memory,
        finished=None if options.finished is None else Path(f"{options.finished}.{name}"),
    )

    def result(found: "Sequence[TraceFigures]") -> dict[str, Any]:
        (figures,) = found
        rows = trace_rows(figures, models, bootstrap, options.tolerance)
        facts = {
            "sessions": len(log.sessions) - len(figures.left_out),
            "left_out": figures.left_out,
            "refused": {f"line {line}": reason for line, reason in log.refused},
            "checked": all(one.is_checked for one in log.sessions),
            "advice": advice(rows),
            "examples": _examples(figures, log, [row.kv for row in rows], texts=options.texts),
        }
        return {name: rows, f"{name}_facts": facts}

    return result([TraceMeasurement(models, how, watch.through(result)).run()])


def _examples(
    figures: "TraceFigures", log: "Log", formats: Sequence[str], *, texts: bool
) -> list[dict[str, Any]]:
    """Return turns that fail in a format and not in the baseline, the shallowest first."""
    found = []
    for kv in formats[1:]:
        turns = [turn for turn in figures.turns[kv] if turn.is_failed and not turn.base_failed]
        for turn in sorted(turns, key=lambda turn: turn.depth)[:_EXAMPLES]:
            session = log.sessions[turn.session]
            message = list(session.answers())[turn.number - 1]
            one = {
                **{"kv": kv, "session": session.name, "message": message + 1, "depth": turn.depth},
                **{"is_valid": turn.is_valid, "lost": turn.lost},
            }
            if texts:
                base, own = (figures.outcomes[x][turn.session, message].text for x in (formats[0], kv))
                one |= {"recorded": _text_of(session.messages[message]), formats[0]: base, "text": own}
            found.append(one)
    return found


def _text_of(message: Mapping[str, Any]) -> str:
    calls = [
        f"{one['function']['name']}({one['function']['arguments']})"
        for one in message.get("tool_calls") or ()
    ]
    return "\n".join(filter(None, [message.get("content") or "", *calls]))
