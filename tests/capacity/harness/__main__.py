"""Random engines under random loads and faults, for as many seeds and steps as asked for.

    python -m tests.capacity.harness [--faults] [--seed 7] [--seeds 10000] [--steps 1000] [--blocks 20] ...

A small engine and its load are drawn from each seed, with --faults also failures: every token is compared
with what the request gets alone, and nothing may leak, starve or end twice. The same seed gives the same
digest. Ends with 1 if an invariant breaks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.capacity.harness.faults import Faults
from tests.capacity.harness.fuzz import Given, fuzz

_GIVEN = ("requests", "rate", "blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "drafts")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.capacity.harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", action="store_true", help="failures too")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--steps", type=int, default=1000, help="of each, then no more requests")
    parser.add_argument("--json", type=Path, help="write a row for each seed")
    for name in _GIVEN:
        kind = float if name == "rate" else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="instead of the seed's")
    asked = parser.parse_args(arguments)
    given = Given(
        faults=None if asked.faults else Faults(), **{name: getattr(asked, name) for name in _GIVEN}
    )
    rows: list[dict[str, Any]] = []
    for number in range(asked.seed, asked.seed + asked.seeds):
        try:
            result = fuzz(number, steps=asked.steps, given=given)
        except AssertionError as error:
            print(f"an invariant broke: {error}", file=sys.stderr)
            sys.exit(1)
        rows.append({"seed": number, "digest": result.digest, **result.summary()})
    _print(rows)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _print(rows: list[dict[str, Any]]) -> None:
    def total(key: str) -> int:
        return sum(row[key] for row in rows)

    print(
        f"{total('steps'):,} steps, {total('requests'):,} requests: {total('finished'):,} finished, "
        f"{total('cancelled'):,} cancelled, {total('failed'):,} failed, {total('refused'):,} refused"
    )
    print(
        f"{total('tokens'):,} tokens as each request gets them alone; {total('preemptions'):,} preemptions, "
        f"{total('cached_tokens'):,} prompt tokens found, {total('recomputed_tokens'):,} computed again"
    )
    print(
        f"{total('packed_blocks'):,} blocks packed, {total('loaded_tokens'):,} tokens loaded, "
        f"{total('failed_loads'):,} loads failed, {total('damaged_blocks'):,} damaged blocks found, "
        f"{total('prefetched'):,} sessions prefetched"
    )
    if len(rows) == 1:
        (row,) = rows
        print(
            f"simulated {row['seconds']:.1f} s: {row['tokens_per_s']:.0f} tokens/s, TTFT p50 "
            f"{row['ttft_p50_s'] * 1e3:.0f} ms, p99 {row['ttft_p99_s'] * 1e3:.0f} ms, ITL p50 "
            f"{row['itl_p50_s'] * 1e3:.1f} ms, p99 {row['itl_p99_s'] * 1e3:.1f} ms"
        )
        print(f"digest {row['digest']}")
    else:
        together = sha256("".join(row["digest"] for row in rows).encode()).hexdigest()[:16]
        print(f"{len(rows)} seeds, digest {together}")


if __name__ == "__main__":
    main()
