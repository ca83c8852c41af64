"""`kvq simulate` without a GPU: the engine's scheduler and block memory under random load and faults."""

import sys
from typing import Any

from kvq.commands.results import write_rows
from kvq.commands.screen import echo


def run(
    faults: bool, seed: int, seeds: int, steps: int, json_path: str | None, fixed: dict[str, Any]
) -> None:
    """Serve random requests with a small engine and a load that are drawn from each seed."""
    from kvq.capacity import Faults, Given, fuzz
    from kvq.commands.progress import progress_bar

    given = Given(faults=None if faults else Faults(), **fixed)
    rows: list[dict[str, Any]] = []
    with progress_bar("simulating") as progress:
        for number in range(seed, seed + seeds):
            try:
                result = fuzz(number, steps=steps, given=given)
            except AssertionError as error:
                echo(f"kvq: an invariant broke: {error}", err=True)
                sys.exit(1)
            rows.append({"seed": number, "digest": result.digest, **result.summary()})
            progress(len(rows), seeds)
    _print(rows)
    write_rows(rows, json_path)


def _print(rows: list[dict[str, Any]]) -> None:
    from hashlib import sha256

    def total(key: str) -> int:
        return sum(row[key] for row in rows)

    echo(
        f"{total('steps'):,} steps, {total('requests'):,} requests: {total('finished'):,} finished, "
        f"{total('cancelled'):,} cancelled, {total('failed'):,} failed, {total('refused'):,} refused"
    )
    echo(
        f"{total('tokens'):,} tokens as each request gets them alone; {total('preemptions'):,} preemptions, "
        f"{total('cached_tokens'):,} prompt tokens found, {total('recomputed_tokens'):,} computed again"
    )
    if len(rows) == 1:
        (row,) = rows
        echo(
            f"simulated {row['seconds']:.1f} s: {row['tokens_per_s']:.0f} tokens/s, TTFT p50 "
            f"{row['ttft_p50_s'] * 1e3:.0f} ms, p99 {row['ttft_p99_s'] * 1e3:.0f} ms, ITL p50 "
            f"{row['itl_p50_s'] * 1e3:.1f} ms, p99 {row['itl_p99_s'] * 1e3:.1f} ms"
        )
        echo(f"digest {row['digest']}")
    else:
        together = sha256("".join(row["digest"] for row in rows).encode()).hexdigest()[:16]
        echo(f"{len(rows)} seeds, digest {together}")
