"""Goals of kvq on a GPU, compared with the rows of a run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
Value = float | None  # None: not measured


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio and its bound."""

    name: str
    bound: float
    value: Callable[[Rows], Value]
    at_most: bool = False

    def judged(self, rows: Rows) -> dict[str, Any]:
        """Return the goal's line of the result."""
        value = self.value(rows)
        is_met = None if value is None else value <= self.bound if self.at_most else value >= self.bound
        sign = "at most" if self.at_most else "at least"
        return {"goal": f"{self.name}: {sign} {self.bound:g}", "value": value, "is_met": is_met}


def find(rows: Rows, key: str, **wanted: object) -> Value:
    """A figure of the first row with these values; None if there is none."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()) and row.get(key) is not None:
            return float(row[key])
    return None


def ratio(above: Value, below: Value) -> Value:
    """None if one of them is missing."""
    return None if above is None or not below else above / below


def attention(rows: Rows, shape: str, kv: str, key: str = "ms_median") -> Value:
    """A figure of kvq's own attention."""
    return find(rows, key, shape=shape, kv=kv, name="kvq")


def faster(shape: str, kv: str) -> Callable[[Rows], Value]:
    """bf16's time over a format's."""
    return lambda rows: ratio(attention(rows, shape, "bf16"), attention(rows, shape, kv))


def slower(shape: str, kv: str, plain: str) -> Callable[[Rows], Value]:
    """A format's time over another's."""
    return lambda rows: ratio(attention(rows, shape, kv), attention(rows, shape, plain))


def bandwidth(shape: str) -> Callable[[Rows], Value]:
    """bf16's share of the bandwidth."""
    return lambda rows: attention(rows, shape, "bf16", "fraction_of_bandwidth")


def even(kv: str) -> Callable[[Rows], Value]:
    """Tokens a second of log-normal lengths over those of equal ones."""

    def value(rows: Rows) -> Value:
        def rate(shape: str) -> Value:
            return ratio(attention(rows, shape, kv, "tokens"), attention(rows, shape, kv))

        return ratio(rate("decode 128, log-normal"), rate("decode 128, equal"))

    return value


def appended(kv: str) -> Callable[[Rows], Value]:
    """The time to write a step's tokens over that of its attention."""

    def value(rows: Rows) -> Value:
        write_us = find(rows, "us_median", shape="write 256 at 4096", kv=kv)
        return ratio(write_us, 1e3 * (attention(rows, "decode 256 x 4096", kv) or 0))

    return value


def beside_torch(rows: Rows) -> Value:
    """torch's flash attention's time over kvq's bf16."""
    shape = "extend 2048 over 32768"
    return ratio(
        find(rows, "ms_median", shape=shape, name="SDPA, enable_gqa"), attention(rows, shape, "bf16")
    )


def slope(kv: str) -> Callable[[Rows], Value]:
    """Milliseconds that tokens beyond 1,024 cost, over bf16's."""

    def of(rows: Rows, kv: str) -> Value:
        short, far = (find(rows, "ms_median", part="slope", depth=n, kv=kv) for n in (1024, 131_072))
        return None if short is None or far is None else far - short

    return lambda rows: ratio(of(rows, kv), of(rows, "bf16"))


def at_8k(kv: str) -> Callable[[Rows], Value]:
    """The time of a step at 8,192 tokens over bf16's."""

    def of(rows: Rows, kv: str) -> Value:
        return find(rows, "ms_median", part="slope", depth=8192, kv=kv)

    return lambda rows: ratio(of(rows, kv), of(rows, "bf16"))


def served(case: str, kv: str, name: str = "kvq") -> Callable[[Rows], Value]:
    """Output tokens a second of an engine's run: the case, or a piece of it."""

    def value(rows: Rows) -> Value:
        mine = [row for row in rows if str(row.get("case", "")).startswith(case)]
        return find(mine, "output_tokens_per_s", kv=kv, name=name)

    return value


_ENGINES = ("step", "slope", "engine", "engine8b")  # parts


def captured(rows: Rows) -> Value:
    """The share of decode steps' rows that were replayed as graphs."""
    engines = [row for row in rows if row.get("part") in _ENGINES]
    told = [bool(row["graph"]) for row in engines if "graph" in row]
    return sum(told) / len(told) if told else None


def over(above: Callable[[Rows], Value], below: Callable[[Rows], Value]) -> Callable[[Rows], Value]:
    """The ratio of two figures."""
    return lambda rows: ratio(above(rows), below(rows))


_DECODE, _LONG = "decode 64 x 8192", "decode 1 x 131072"
_RIVAL = "0.6B, beside transformers"
GOALS: Iterable[Goal] = (
    Goal("decode 64 x 8,192: bf16, share of bandwidth", 0.85, bandwidth(_DECODE)),
    Goal("decode 64 x 8,192: fp8, speedup over bf16", 1.75, faster(_DECODE, "fp8")),
    Goal("decode 64 x 8,192: int8, speedup over bf16", 1.7, faster(_DECODE, "int8")),
    Goal("decode 64 x 8,192: int4_g64, speedup over bf16", 2.3, faster(_DECODE, "int4_g64")),
    Goal("decode 64 x 8,192: int4_g32, speedup over bf16", 2.1, faster(_DECODE, "int4_g32")),
    Goal("rotation, int4_g64", 1.05, slower(_DECODE, "int4_g64_rot", "int4_g64"), at_most=True),
    Goal("scales of 8 bits", 1.15, slower(_DECODE, "int4", "int4_g64_rot"), at_most=True),  # as many bytes
    Goal("rotation, int4_g32", 1.05, slower(_DECODE, "int4_g32_rot", "int4_g32"), at_most=True),
    Goal("decode 1 x 131,072: bf16, share of bandwidth", 0.75, bandwidth(_LONG)),
    Goal("decode 1 x 131,072: int4, speedup over bf16", 2.0, faster(_LONG, "int4")),
    Goal("log-normal over equal lengths, tokens/s, bf16", 0.85, even("bf16")),
    Goal("log-normal over equal lengths, tokens/s, int4", 0.85, even("int4")),
    Goal("write over attention, 256 x 4,096, int4", 0.05, appended("int4"), at_most=True),
    Goal("extend: torch's flash attention over bf16, time", 0.5, beside_torch),
    Goal("extend: int4, speedup over bf16", 0.9, faster("extend 2048 over 32768", "int4")),
    Goal("ITL slope of fp8 over bf16's", 0.58, slope("fp8"), at_most=True),
    Goal("ITL slope of int4 over bf16's", 0.45, slope("int4"), at_most=True),
    Goal("ITL at 8,192 tokens, fp8 over bf16", 1.0, at_8k("fp8"), at_most=True),
    Goal("ITL at 8,192 tokens, int4 over bf16", 1.0, at_8k("int4"), at_most=True),
    Goal(
        "0.6B, a step of one sequence, bf16: bytes over bandwidth, share of its time",
        1 / 1.35,
        lambda rows: find(rows, "fraction_of_limit", part="step", batch=1, kv="bf16"),
    ),
    Goal(
        "0.6B, a step of 64 sequences, int4: GPU idle",
        0.1,
        lambda rows: find(rows, "gpu_idle_share", part="step", batch=64, kv="int4"),
        at_most=True,
    ),
    Goal("decode steps captured as graphs, share of rows", 1.0, captured),
    Goal(
        "8B, requests: int4 over bf16, output tokens/s",
        1.8,
        over(served("8B, requests", "int4"), served("8B, requests", "bf16")),
    ),
    Goal(
        "8B, step at 8,192: GPU idle",
        0.1,
        lambda rows: find(rows, "gpu_idle_share", part="engine8b", kv="int4"),
        at_most=True,
    ),
    Goal(
        "0.6B: kvq over transformers' continuous batching",
        4.0,
        over(served(_RIVAL, "bf16"), served(_RIVAL, "bf16", "hf-continuous")),
    ),
    Goal(
        "0.6B, a quarter fits: int4 over bf16",
        1.35,
        over(served("0.6B, a quarter fits", "int4"), served("0.6B, a quarter fits", "bf16")),
    ),
    Goal(
        "0.6B, all fit: int4 over bf16",
        1.0,
        over(served("0.6B, all fit", "int4"), served("0.6B, all fit", "bf16")),
    ),
)


def judged(rows: Rows) -> Rows:
    """Every goal's line."""
    return [goal.judged(rows) for goal in GOALS]
