"""Turns summed up: one row a contender."""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.loads import Contender, Part
from benchmarks.peers.process import Turn
from kvq.bench.engine.rivals import NEAR_FP32, first_difference
from kvq.bench.timing import percentile
from kvq.errors import EngineError


def agreement(
    contender: Contender, expected: Sequence[int], found: Sequence[int], gaps: Sequence[float]
) -> dict[str, Any]:
    """Return how many greedy tokens equal the reference's before the first difference.

    `gaps`: of each of the reference's steps, from the likeliest log-probability to the next one.

    Raises:
        EngineError: unquantized weights and KV gave another token where rounding explains none.
    """
    at = first_difference(expected, found)
    gap = None if at is None else gaps[at]
    if contender.is_exact and gap is not None and gap > NEAR_FP32:
        raise EngineError(
            f"{contender.name} goes on with {found[at : at + 2]} after {at} tokens, and the reference with "
            f"{expected[at : at + 2]}, whose first is {gap:.3g} above the next likely one in log-probability "
            f"where rounding explains {NEAR_FP32}, so this computes something else"
        )
    return {
        "check_tokens": len(expected),
        "check_equal": len(expected) if at is None else at,
        "check_gap": gap,  # where the first other token is
    }


def row(part_name: str, part: Part, contender: Contender, turns: Sequence[Turn]) -> dict[str, Any]:
    """Rates are medians over turns, times between tokens percentiles over those of all turns."""
    rates = [part.rate(turn.run) for turn in turns]
    served = [one for turn in turns for one in turn.run.served]
    between = [gap for one in served for gap in one.itl_s]
    return {
        **names(part_name, contender),
        "turns": len(turns),
        "tokens_per_s_median": percentile(rates, 50),
        "tokens_per_s_p10": percentile(rates, 10),
        "tokens_per_s_p90": percentile(rates, 90),
        **{f"itl_ms_p{p}": 1e3 * percentile(between, p) if between else None for p in (50, 99)},
        **{f"ttft_ms_p{p}": 1e3 * percentile([one.ttft_s for one in served], p) for p in (50, 99)},
        "cpu_s_median": percentile([turn.cpu_s for turn in turns], 50),
        "cpu_share_median": percentile([turn.cpu_s / turn.run.seconds for turn in turns], 50),
        "reason": None,
    }


def refusal(part_name: str, contender: Contender, error: Exception) -> dict[str, Any]:
    """The row of one that can't take part, without figures."""
    return {**names(part_name, contender), "reason": str(error).strip()}


def names(part_name: str, contender: Contender) -> dict[str, Any]:
    """Return the fields that identify the row."""
    return {
        "part": part_name,
        "engine": contender.engine,
        "weights": contender.weights,
        "kv": contender.kv,
    }
