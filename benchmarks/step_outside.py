"""Time of a decode step outside its kernels on a CPU: scheduling, inputs, sampling, output.

    python tools/make_bench_model.py --out /tmp/bench-model
    python -m benchmarks.step_outside --model /tmp/bench-model [--weights int4] [--batch 1] [--out FILE]

The engine decodes greedily at a depth of some hundred tokens. Each phase is timed where the engine calls it,
kernels where Python calls compiled code; a phase's time is without the kernels inside it, and without what
happens while a step runs aside. Medians over steps.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvq.engine import LLM, SamplingParams
from kvq.evals.report.results import envelope, write_json
from kvq.kernels.native.library import loaded
from kvq.models import load

DEPTH, WARM, STEPS = 128, 32, 256
# Where the engine calls each phase.
PHASES = {
    "schedule": lambda core: (core.scheduler, "schedule"),
    "orders and tables": lambda core: (core.runner, "prepare"),
    "forward": lambda core: (core.runner, "forward"),
    "choose": lambda core: (core._chooser, "choose"),
    "launch ahead": lambda core: (core._launcher, "launch_ahead"),
    "commit and tell": lambda core: (core, "_settle"),
    "publish": lambda core: (core._publisher, "publish"),
}


class Phases:
    """Seconds by phase of the step that runs, kernels apart; the clock stands while a step runs aside."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []  # of every phase that runs, seconds that belong to others
        self._aside_s = 0.0
        self._stands_since: float | None = None

    def _now(self) -> float:
        return (perf_counter() if self._stands_since is None else self._stands_since) - self._aside_s

    def kernel(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel whose time counts as `kernels`, of a step that runs aside from its begin to its end."""
        timed = self.timed("kernels", kernel)

        def begin(*args: Any) -> Any:
            status = timed(*args)
            self._stands_since = perf_counter()
            return status

        def end(*args: Any) -> Any:
            status, now = kernel(*args), perf_counter()
            if self._stands_since is not None:
                self.seconds["kernels"] += now - self._stands_since
                self._aside_s += now - self._stands_since
                self._stands_since = None
            return status

        return {"decoder_pass_begin": begin, "decoder_pass_end": end}.get(name, timed)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as `name`'s and not as its caller's."""

        def call(*args: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            began = self._now()
            try:
                return function(*args, **more)
            finally:
                took = self._now() - began
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return call


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of every phase over steps, the rest of a step, and all but the kernels."""
    model = load(given.model, device="cpu", weights=given.weights)
    llm = LLM(model, given.kv, kv_memory="512MiB", max_num_seqs=given.batch, prefix_caching=False)
    core, phases = llm.core, Phases()
    kernels = loaded().kernels
    for name, kernel in list(kernels.items()):
        kernels[name] = phases.kernel(name, kernel)
    for name, find in PHASES.items():
        owner, method = find(core)
        setattr(owner, method, phases.timed(name, getattr(owner, method)))
    steps: list[dict[str, float]] = []
    inner = phases.timed("the rest of a step", core.step)

    def step() -> bool:
        phases.seconds.clear()
        ran: bool = inner()
        steps.append(dict(phases.seconds))
        return ran

    core.step = step
    params = SamplingParams(temperature=0, max_tokens=WARM + STEPS, ignore_eos=True)
    prompts = [[(7 * i + j) % 1000 + 1 for j in range(DEPTH)] for i in range(given.batch)]
    llm.generate(prompts, params)
    late = [one for one in steps if one.get("choose")][-STEPS:]
    names = ["kernels", *PHASES, "the rest of a step"]
    rows = [{"phase": name, "ms": _median(one.get(name, 0.0) for one in late)} for name in names]
    outside = [sum(one.values()) - one["kernels"] for one in late]
    rows.append({"phase": "all but kernels", "ms": _median(outside)})
    return rows


def _median(seconds: Any) -> float:
    return 1e3 * statistics.median(seconds)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = measure(given)
    for row in rows:
        print(f"{row['phase']:<22}{row['ms']:8.3f} ms")
    if given.out:
        asked = {"weights": given.weights, "kv": given.kv, "batch": given.batch}
        more = {**asked, "depth": DEPTH, "steps": STEPS}
        write_json(given.out, envelope(sys.argv, torch.device("cpu"), rows, more))


if __name__ == "__main__":
    main()
