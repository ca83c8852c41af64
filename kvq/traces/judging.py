"""Verdicts on KV formats from agents' turns: what is decided otherwise, what fails, and up to which depth."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

from kvq.evals.report.bootstrap import FEWEST_DOCUMENTS, Z95, Bootstrap, Interval, wilson_interval
from kvq.traces.kinds import DECISIVE, TokenKind

_SHALLOW = 1024  # tokens; buckets of depth double from here on
LEAST_RIGHT = 0.25  # of the turns, in the baseline; otherwise there is little that a format could break


# Of some tokens: how many, their KL, and how many have the same likeliest successor as with unquantized KV
Sums = tuple[int, float, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn in one format."""

    session: int
    number: int  # of the session's answers, from 1
    depth: int  # tokens before the answer
    kinds: Mapping[str, Sums]  # along the recorded answer
    diverges_at: int | None  # first token of the recorded answer that is likeliest no more
    lost: str | None = None  # kind of the first deciding token of the baseline's own answer that it loses
    is_asked: bool = False  # whether there is a free run
    is_valid: bool = True
    is_checked: bool = True  # only the recorded calls are right; otherwise others may be, too
    is_right: bool = False  # its calls are the recorded ones
    is_changed: bool = False  # its calls are not the baseline's
    is_failed: bool = False
    base_failed: bool = False

    @property
    def is_foreseen(self) -> bool:
        """True if scores along the baseline's own answer foretell a failure."""
        return self.base_failed or self.lost is not None


# Of free runs
FREE_FIGURES = ("asked", "invalid", "as_recorded", "changed", "failed", "foreseen", "more_failed", "p_value")
ENOUGH = 200  # turns that show that a format is safe, if it is


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """Row of one format. Fields are the JSON keys of `kvq eval --traces`."""

    kv: str
    bits_per_element: float
    sessions: int
    turns: int
    tokens: int  # of recorded answers
    kl_mean: float  # nats per token
    kl_decisive: float  # of tokens that are no plain text
    top1_agreement: float
    top1_decisive: float
    undiverged: float  # share of recorded answers along which all likeliest tokens are the baseline's
    asked: int  # turns answered freely
    invalid: float  # shares of the asked turns
    as_recorded: float  # with the recorded calls
    changed: float
    failed: float  # wrong, where one answer is right; otherwise invalid or changed
    foreseen: float  # failures as teacher-forced scores foretell them
    more_failed: float  # than the baseline's
    p_value: float  # of McNemar's exact test that as many turns fail as in the baseline
    verdict: str
    intervals: dict[str, Interval | None]
    by_kind: list[dict[str, Any]]
    by_depth: list[dict[str, Any]]
    by_turn: list[dict[str, Any]]


def judge(
    kv: str, bits: float, turns: Sequence[Turn], bootstrap: Bootstrap, *, baseline: str, tolerance: float
) -> TraceRow:
    """Return all figures of one format."""
    asked = [turn for turn in turns if turn.is_asked]
    tokens, kl, same = _means(turns, TokenKind)
    _, decisive_kl, decisive_same = _means(turns, DECISIVE)
    more = _more_failed(asked, bootstrap)
    lost, gained = _discordant(asked)
    return TraceRow(
        kv=kv,
        bits_per_element=bits,
        sessions=len({turn.session for turn in turns}),
        turns=len(turns),
        tokens=tokens,
        kl_mean=kl,
        kl_decisive=decisive_kl,
        top1_agreement=same,
        top1_decisive=decisive_same,
        undiverged=_share(turns, lambda turn: turn.diverges_at is None),
        **_shares(asked),
        more_failed=(lost - gained) / max(1, len(asked)),
        p_value=_mcnemar(lost, gained),
        verdict="baseline" if kv == baseline else _words(asked, more, baseline, tolerance),
        intervals={
            "failed": wilson_interval(sum(x.is_failed for x in asked), len(asked)) if asked else None,
            "more_failed": more,
        },
        by_kind=[
            {"kind": kind.value, "tokens": tokens, "kl_mean": kl, "top1_agreement": same}
            for kind in TokenKind
            for tokens, kl, same in [_means(turns, [kind])]
            if tokens
        ],
        by_depth=[
            {"first_depth": first, "last_depth": last, **_part(some, bootstrap, tolerance)}
            for first, last, some in _by(turns, lambda turn: turn.depth, _SHALLOW)
        ],
        by_turn=[
            {"first_turn": first, "last_turn": last, **_part(some, bootstrap, tolerance)}
            for first, last, some in _by(turns, lambda turn: turn.number, 2)
        ],
    )


def advice(rows: Sequence[TraceRow]) -> str:
    """Return which format is safe up to which depth, in words."""
    baseline, *others = sorted(rows, key=lambda row: row.verdict != "baseline")
    found: list[tuple[str | None, int]] = []  # (format, last depth), shallowest first; None: too few turns
    for bucket in baseline.by_depth:
        safe = [row for row in others if _at(row, bucket["first_depth"]).get("is_safe")]
        cheapest = min(safe, key=lambda row: row.bits_per_element, default=baseline)
        best = cheapest.kv if bucket["is_safe"] else None  # not even the baseline is, against itself
        if found and found[-1][0] == best:
            found[-1] = best, bucket["last_depth"]
        else:
            found.append((best, bucket["last_depth"]))
    if all(row.verdict.startswith(("no verdict", "not judged")) for row in others):
        return "nothing could be judged"
    if all(name in (baseline.kv, None) for name, _ in found):
        return f"no format was shown to be as safe as {baseline.kv}"
    words = {None: "too few turns to tell", baseline.kv: f"{baseline.kv} alone"}
    said = (words.get(name, f"{name} is measured to be as safe as {baseline.kv}") for name, _ in found)
    return "; then ".join(
        f"{one} up to {last + 1:,} tokens" for one, (_, last) in zip(said, found, strict=True)
    )


def _at(row: TraceRow, depth: int) -> dict[str, Any]:
    return next((one for one in row.by_depth if one["first_depth"] == depth), {})


def _part(turns: Sequence[Turn], bootstrap: Bootstrap, tolerance: float) -> dict[str, Any]:
    asked, (_, kl, same) = [turn for turn in turns if turn.is_asked], _means(turns, DECISIVE)
    more = _more_failed(asked, bootstrap)
    return {
        "turns": len(turns),
        "kl_decisive": kl,
        "top1_decisive": same,
        **_shares(asked),
        "more_failed": more,
        "is_safe": more is not None and more[1] <= tolerance,
    }


def _shares(asked: Sequence[Turn]) -> dict[str, Any]:
    return {
        "asked": len(asked),
        "invalid": _share(asked, lambda turn: not turn.is_valid),
        "as_recorded": _share(asked, lambda turn: turn.is_right),
        "changed": _share(asked, lambda turn: turn.is_changed),
        "failed": _share(asked, lambda turn: turn.is_failed),
        "foreseen": _share(asked, lambda turn: turn.is_foreseen),
    }


def _means(turns: Sequence[Turn], kinds: Iterable[str]) -> tuple[int, float, float]:
    """Return the number of tokens of some kinds, their mean KL, and the share with the same likeliest one."""
    found = [turn.kinds[kind] for kind in kinds for turn in turns if kind in turn.kinds]
    tokens, kl, same = map(sum, zip((0, 0.0, 0), *found, strict=True))
    return tokens, kl / max(1, tokens), same / max(1, tokens)


def _share(turns: Sequence[Turn], is_so: Callable[[Turn], bool]) -> float:
    return sum(map(is_so, turns)) / max(1, len(turns))


def _discordant(asked: Sequence[Turn]) -> tuple[int, int]:
    """Return how many turns fail only in this format, and only in the baseline."""
    lost = sum(turn.is_failed and not turn.base_failed for turn in asked)
    return lost, sum(turn.base_failed and not turn.is_failed for turn in asked)


def _more_failed(asked: Sequence[Turn], bootstrap: Bootstrap) -> Interval | None:
    """Return a 95% interval of how many more turns fail than in the baseline, as a share of turns.

    Sessions are resampled. Turns without a difference don't prove that there is none: the interval is at
    least that of a difference of paired shares with half a turn added to each of the four outcomes, and that
    of each share alone. None if there are too few sessions, or too few turns that succeed in the baseline.

    Source: Agresti and Min, "Simple improved confidence intervals for comparing matched proportions" (2005).
    """
    right = sum(not turn.base_failed for turn in asked)
    if len({turn.session for turn in asked}) < FEWEST_DOCUMENTS or right < LEAST_RIGHT * len(asked):
        return None
    count, (lost, gained) = len(asked), _discordant(asked)
    more = (lost - gained) / (count + 2)
    half = Z95 * sqrt((lost + gained + 1) / (count + 2) - more**2) / sqrt(count + 2)
    least, most = (bound - gained / count for bound in wilson_interval(lost, count))
    low, high = min(more - half, least), max(more + half, most)
    sums = {turn.session: np.zeros(2) for turn in asked}
    for turn in asked:
        sums[turn.session] += (turn.is_failed - turn.base_failed, 1)
    drawn = bootstrap.interval(lambda more, turns: more / turns, *np.array(list(sums.values())).T)
    return (low, high) if drawn is None else (min(low, drawn[0]), max(high, drawn[1]))


def _words(asked: Sequence[Turn], more: Interval | None, baseline: str, tolerance: float) -> str:
    if not asked:
        return "not judged: its answers were only scored"
    if more is None and sum(turn.base_failed for turn in asked) > (1 - LEAST_RIGHT) * len(asked):
        invalid = _share(asked, lambda turn: not turn.is_valid)
        remedy = (
            "; it writes no calls that its template knows, so try --forced-calls" if invalid > 0.5 else ""
        )
        return f"no verdict: {baseline} itself fails most of the turns{remedy}"
    if more is None:
        sessions = len({turn.session for turn in asked})
        return f"no verdict: {sessions} sessions with free runs are too few; {FEWEST_DOCUMENTS} are needed"
    low, high = (100 * bound for bound in more)
    if more[1] <= tolerance:
        return f"as safe as {baseline}: at most {high:.1f} points more turns fail"
    if more[0] > 0:
        if all(turn.is_checked for turn in asked):
            return f"harms: {low:.1f} to {high:.1f} points more turns fail than with {baseline}"
        return f"differs: {low:.1f} to {high:.1f} points more turns invalid or changed than with {baseline}"
    more_fail = f"{low:+.1f} to {high:+.1f} points more turns fail than with {baseline}"
    return f"unclear: {more_fail}; some {ENOUGH} turns tell"


def _mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test. Source: McNemar, Psychometrika 12 (1947)."""
    total = lost + gained
    tail = sum(comb(total, k) for k in range(min(lost, gained) + 1))
    return float(min(1.0, 2 * tail / 2**total))


def _by(turns: Sequence[Turn], value: Callable[[Turn], int], first: int) -> list[tuple[int, int, list[Turn]]]:
    """Return turns in buckets of a value that double, as (first, last, turns); empty ones are left out."""
    found: dict[int, list[Turn]] = {}
    for turn in turns:
        found.setdefault(max(0, (value(turn) // first).bit_length()), []).append(turn)
    bounds = [(first << bucket >> 1 if bucket else 0, (first << bucket) - 1) for bucket in sorted(found)]
    return [(*bound, found[bucket]) for bound, bucket in zip(bounds, sorted(found), strict=True)]
