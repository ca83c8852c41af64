"""Write an agent trace in Mooncake's format, for simulators and other load generators.

    python -m benchmarks.agents.mooncake --trace trace.jsonl --out mooncake.jsonl [--measured replay.json]

A line is a request: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one for each block of
512 tokens, the last one possibly partial; equal ids mean equal tokens after equal beginnings (Qin et al.
2024, arXiv:2407.00079). The format has times in place of pauses, so a turn is given its time in a result of
`replay`, or the time at which it would be sent if new tokens took `--prefill` and answers `--decode` tokens
per second, alone and with all that came before in memory. `session`, which is no field of Mooncake's, is
written with `--sessions`; `kvq simulate` reads it.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.agents.trace import Trace, Turn, TurnId, block_keys, read_trace

HASHED_TOKENS = 512


def lines(trace: Trace, sent_s: Mapping[TurnId, float], *, sessions: bool = False) -> list[dict[str, Any]]:
    """Return the requests in order of their times."""
    ids: dict[bytes, int] = {}
    found = []
    for turn in sorted(trace.turns, key=lambda turn: sent_s[turn.id]):
        keys = block_keys(trace.pieces(turn), HASHED_TOKENS)
        line: dict[str, Any] = {
            "timestamp": round(1e3 * sent_s[turn.id]),
            "input_length": trace.prompt_tokens(turn),
            "output_length": turn.answer.tokens,
            "hash_ids": [ids.setdefault(key, len(ids)) for key in keys],
        }
        found.append(line | ({"session": turn.session} if sessions else {}))
    return found


def estimated(trace: Trace, service_s: Callable[[Turn], float]) -> dict[TurnId, float]:
    """Return when each turn is sent if it takes `service_s`, whatever else runs."""
    sent: dict[TurnId, float] = {}
    ended: dict[TurnId, float] = {}
    for turn in trace.turns:
        sent[turn.id] = turn.pause_s + max((ended[other] for other in turn.after), default=0.0)
        ended[turn.id] = sent[turn.id] + service_s(turn)
    return sent


def measured(result: Mapping[str, Any]) -> dict[TurnId, float]:
    """Return when each turn was sent in a result of `replay`."""
    return {(row["session"], row["turn"]): row["sent_s"] for row in result["turns"]}


def main() -> None:
    """Convert a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measured", type=Path, help="a result of replay, whose times are taken")
    parser.add_argument("--prefill", type=float, default=2000.0, help="tokens per second")
    parser.add_argument("--decode", type=float, default=50.0, help="tokens per second")
    parser.add_argument("--sessions", action="store_true", help="write the session of each request, too")
    given = parser.parse_args()
    trace = read_trace(given.trace)

    def service_s(turn: Turn) -> float:
        return sum(piece.tokens for piece in turn.added) / given.prefill + turn.answer.tokens / given.decode

    if given.measured is not None:
        sent_s = measured(json.loads(given.measured.read_text(encoding="utf-8")))
    else:
        sent_s = estimated(trace, service_s)
    found = lines(trace, sent_s, sessions=given.sessions)
    given.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    print(f"{given.out}: {len(found)} requests in {found[-1]['timestamp'] / 1e3:.0f} s")


if __name__ == "__main__":
    main()
