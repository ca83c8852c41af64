"""What a decode step costs the host on a GPU, without one: everything but the launches themselves.

    python -m benchmarks.host_step [--layers 28] [--batch 64] [--out FILE]

Kernels of Triton are "launched" up to what Triton compiled, whose own launch (in C for the most part) does
nothing; the work list of attention, one launch a step, is left out. torch's own operations run on CPU tensors
of a model so narrow that calling them is what they cost. Processor time of this process.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton, or torch
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from triton.runtime.jit import JITFunction

from benchmarks.as_on_gpu import as_on_gpu
from kvq.bench.random_model import random_model
from kvq.engine.device.graphs import DecodeGraphs, Tables
from kvq.engine.device.runner import Runner
from kvq.evals.report.results import envelope, write_json
from kvq.kernels.gpu.launch import Bound
from kvq.models.loading.fused_layers import fuse_layers
from kvq.scheduler import Branch, Request, StepPlan
from kvq.sizing.pools import PoolPlan

DEPTH, BLOCK = 1000, 32
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1024, "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}  # fmt: skip


class _Compiled:
    """What Triton would have compiled; launching it does nothing."""

    function, packed_metadata = 0, ()

    @staticmethod
    def run(*_: Any) -> None:
        """The driver's call."""


def _look(bound: Any, grid: Any, tensors: Any, numbers: tuple[int, ...]) -> None:
    bound._known[numbers] = _Compiled.run, _Compiled.function, _Compiled.packed_metadata, 0
    return _Compiled


@contextmanager
def imagined() -> Iterator[None]:
    """Kernels are chosen as on a GPU and launched nowhere."""
    with ExitStack() as stack:
        stack.enter_context(as_on_gpu(in_triton=False))
        stack.enter_context(patch("kvq.bench.random_model.probe_layers"))  # nothing is computed
        stack.enter_context(patch.object(JITFunction, "run", lambda *_, **__: _Compiled))
        stack.enter_context(patch.object(Bound, "look", _look))
        stack.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, create=True))
        yield


def plan_of(batch: int) -> StepPlan:
    """A decode step of so many requests."""
    requests = [Request(id=str(i), tokens=array("I", (0,)), max_tokens=1) for i in range(batch)]
    return StepPlan(
        number=0,
        branches=[Branch(request=r, tokens=r.tokens, row=row) for row, r in enumerate(requests)],
        num_decodes=batch,
        counts=[1] * batch,
        ends=[DEPTH + i % 7 for i in range(batch)],
        samples=[True] * batch,
        token_ids=[i % 100 for i in range(batch)],
        orders=[],
        table_changes=[(row, 0, DEPTH // BLOCK, [row]) for row in range(0, batch, BLOCK)],
    )


def timed(run: Callable[[], object], count: int = 200) -> dict[str, float]:
    """Milliseconds of processor time a call, after a few that aren't counted."""
    for _ in range(20):
        run()
    found = []
    for _ in range(count):
        began = time.process_time_ns()
        run()
        found.append((time.process_time_ns() - began) / 1e6)
    cuts = statistics.quantiles(found, n=10)
    return {
        "ms_median": statistics.median(found),
        "ms_p10": cuts[0],
        "ms_p90": cuts[-1],
        "ms_min": min(found),
    }


def measured(layers: int, batch: int, *, fused: bool) -> list[dict[str, Any]]:
    """Rows of an eager and of a captured step."""
    config = QWEN3 | {"num_hidden_layers": layers}
    # Kernels that are launched nowhere give anything, so the model isn't probed.
    unprobed = patch("kvq.bench.random_model.probe_layers", lambda weights: None)
    with tempfile.TemporaryDirectory() as folder, imagined(), unprobed:
        model = random_model(config, Path(folder) / "model", torch.device("cpu"))
        module = model.weights.model
        assert not fused or fuse_layers(module, [None] * layers, in_triton=True), "a Qwen3 is known"
        model = model.with_kv("int4_g16")
        pools = PoolPlan(num_blocks=[batch * 33], step_tokens=batch, sequences=batch)
        runner = Runner(model, pools, 4096)
        plan = plan_of(batch)
        eager = timed(lambda: (runner.prepare(plan), runner.forward(plan)))
        tables = [torch.zeros(batch + 1, 33, dtype=torch.int32) for _ in runner.cache.num_blocks]
        graphs = DecodeGraphs(
            model,
            runner.cache,
            Tables(there=tables, here=[table.numpy() for table in tables], max_context=4096),
            max_num_seqs=batch,
            capture=lambda work: lambda: None,
        )
        captured = timed(lambda: (runner.prepare(plan), graphs.run(plan)))
    base = {"layers": layers, "batch": batch, "fused": fused}
    return [{**base, "step": "eager", **eager}, {**base, "step": "captured", **captured}]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for fused in (True, False) for row in measured(options.layers, options.batch, fused=fused)]
    for row in rows:
        kind = "fused" if row["fused"] else "transformers' layers"
        spread = f"{row['ms_p10']:.3f} - {row['ms_p90']:.3f}"
        print(f"{row['step']:9s} {kind:20s} {row['ms_median']:6.3f} ms ({spread})")
    if options.out:
        write_json(
            options.out,
            envelope(["python -m benchmarks.host_step", *sys.argv[1:]], torch.device("cpu"), rows, {}),
        )


if __name__ == "__main__":
    main()
