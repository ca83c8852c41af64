"""Load check: its verdict on a format beside the cost on a text that the check does not see."""

from time import perf_counter
from typing import Any

from benchmarks.real.bench import Bench
from benchmarks.real.closeness import compare, in_format, row_of
from benchmarks.real.hidden import BASELINE
from benchmarks.real.records import Settings
from kvq.evals.watch import Progress
from kvq.models.check.load_check import measure as load_check
from kvq.models.check.verdict import verdict

TOKENS = 2048


def measure(bench: Bench, kv: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Check a format as who serves with it does for the first time, and measure it on WikiText-2."""
    windows = bench.windows(bench.lab.wikitext(), context=settings["context"], tokens=settings["tokens"])
    model = in_format(bench.model, kv)
    found = row_of(*compare(model, bench.baseline, windows, progress))
    if kv == BASELINE:
        return found
    begin = perf_counter()
    check = load_check(model)
    return found | {
        "measured": verdict(found["kl_mean"], found["perplexity_change"]),
        "said": check.verdict,
        "check_kl_mean": check.kl_mean,
        "check_worst_layer": max(check.layer_errors, default=None),
        "check_passes": check.passes,
        "check_s": perf_counter() - begin,
    }
