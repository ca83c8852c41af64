"""Dry run: measures the memory and time of a full-size step before the pools are sized."""

import gc
from array import array
from dataclasses import dataclass
from time import perf_counter

import torch

from kvq.blockmgr import HOLE, BlockId, StateMove
from kvq.engine.device.runner import Runner
from kvq.models import Model
from kvq.scheduler import Branch, Request, StepPlan
from kvq.sizing.pools import PoolPlan

_CPU_TOKENS = 256  # full steps of large models are slow on CPUs; memory is proportional to tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _DryRun:
    """Measurements of the dry run."""

    activation_bytes: int  # for a step with all its tokens
    token_s: float  # seconds per prefill token


def dry_run(model: Model, *, max_num_batched_tokens: int, max_context: int) -> _DryRun:
    """Run a prefill step on a separate small pool, and measure its peak memory and time.

    Raises:
        OutOfMemory: not even this step fits in memory.
    """
    device = model.weights.device
    tokens = max_num_batched_tokens if device.type == "cuda" else min(max_num_batched_tokens, _CPU_TOKENS)
    plan, blocks = _plan(tokens, min(tokens, max_context), model.layout.block_size)
    layout = model.layout
    num_blocks = [blocks] * len(layout.attended) + ([len(plan.branches)] if layout.states else [])
    pools = PoolPlan(num_blocks=num_blocks, step_tokens=tokens, sequences=len(plan.branches))
    runner = Runner(model, pools, max_context, uses_graphs=False)
    runner.prepare(plan)
    before = _reset_peak(device)
    runner.forward(plan)  # loads, compiles and caches everything needed
    began = perf_counter()
    output = runner.forward(plan)
    output.logits.cpu()
    seconds = perf_counter() - began
    peak = _peak_bytes(device) - before
    # Memory that the process already held is not counted, so assume at least eight fp32 rows per token.
    least = 32 * model.geometry.hidden_size * tokens
    activation_bytes = max(least, peak) * max_num_batched_tokens // tokens
    return _DryRun(activation_bytes=activation_bytes, token_s=seconds / tokens)


def _plan(tokens: int, longest: int, block_size: int) -> tuple[StepPlan, int]:
    """Return a plan to prefill `tokens` tokens in sequences of up to `longest`, and its number of blocks."""
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    request = Request(id="dry-run", tokens=array("I", (0,)), max_tokens=1)
    branches = [Branch(request=request, tokens=request.tokens, row=row) for row in range(len(counts))]
    blocks = [-(-count // block_size) for count in counts]
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    changes = [
        (row, 0, 0, list(range(first, first + count)))
        for row, (first, count) in enumerate(zip(starts, blocks, strict=True))
    ]
    plan = StepPlan(
        number=0,
        branches=branches,
        num_decodes=0,
        counts=counts,
        ends=counts,
        samples=[True] * len(counts),
        token_ids=[0] * tokens,
        moves=[
            StateMove(start=0, source=HOLE, pieces=[(count, BlockId(row))])
            for row, count in enumerate(counts)
        ],
        orders=[],
        table_changes=changes,  # type: ignore[arg-type]
    )
    return plan, sum(blocks)


def _reset_peak(device: torch.device) -> int:
    """Start measuring peak memory, and return the number of bytes in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets the peak
    except OSError:
        return 0
    return _status_bytes("VmRSS")


def _peak_bytes(device: torch.device) -> int:
    """Return the peak number of bytes in use since the last reset, or 0 if the system doesn't report it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(name):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
