"""Kernel measurements: checks and alternating timing of contenders, and memory bandwidth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvq.bench.timing import in_turn, percentile, spread
from kvq.errors import KVQError
from kvq.evals.watch import Progress

Run = Callable[[int], Tensor]  # one call; the argument selects one of several copies of the data
Rows = list[dict[str, Any]]
_GPU_CALLS = 20  # minimum number of calls per sample
_WARM_UP = 3
_MOST_COPIES = 64
_PEAK_SIZE = 8192  # rows and columns of the matrices for timing products


class Stopwatch:
    """Stopwatch for one contender: wall-clock time on a CPU, or a replayed graph between events on a GPU."""

    def __init__(self, run: Run, copies: int, device: torch.device) -> None:
        self._run = run
        self._copies = copies
        self._calls = 1
        self._next = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        for i in range(max(_WARM_UP, copies)):
            run(i % copies)
        if device.type == "cuda":
            self._calls = -(-_GPU_CALLS // copies) * copies
            self._graph = self._captured()
        self.is_graph = self._graph is not None
        self._is_gpu = device.type == "cuda"

    def sample(self) -> float:
        """Return the duration of one call in milliseconds; on a GPU, the mean over a batch of calls."""
        if not self._is_gpu:
            begin = perf_counter()
            self._run(self._next)
            self._next = (self._next + 1) % self._copies
            return 1e3 * (perf_counter() - begin)
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        if self._graph is not None:
            self._graph.replay()
        else:
            for i in range(self._calls):
                self._run(i % self._copies)
        end_event.record()
        torch.cuda.synchronize()
        return float(begin_event.elapsed_time(end_event)) / self._calls

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Return all calls of a sample as one graph, or None if the contender synchronizes."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                for i in range(self._calls):
                    self._run(i % self._copies)
        except RuntimeError:  # CUDA's error for an operation that can't be captured
            torch.cuda.synchronize()
            return None
        return graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One way to compute a result. Its row has `name`, `backend` and the keys of `over`."""

    name: str
    backend: str
    over: dict[str, str]  # kv or weights -> format
    run: Run
    nbytes: int  # bytes read by one call from one copy of the data
    copies: int
    truth: Tensor  # fp64, correct values of the last rows returned by `run`
    allowed: float  # relative error

    def check(self) -> float:
        """Return the relative error.

        Raises:
            KVQError: the error is too large.
        """
        error = relative_error(self.run(0)[-len(self.truth) :], self.truth)
        if not error <= self.allowed:
            raise KVQError(
                f"{self.name} over {', '.join(self.over.values())} is wrong: relative error {error:.1e}, "
                f"allowed {self.allowed:.1e}; nothing was timed"
            )
        return error


def compete(contenders: Sequence[Contender], repeats: int, progress: Progress) -> tuple[Rows, float]:
    """Check every contender, then time them interleaved.

    Returns a row per contender, and the memory read bandwidth in GB/s, measured in the same run.

    Raises:
        KVQError: a contender's error is too large; nothing was timed.
    """
    errors = [one.check() for one in contenders]
    device = contenders[0].truth.device
    watches = [Stopwatch(one.run, one.copies, device) for one in contenders]
    times = interleaved(watches, repeats, progress)
    rows = [
        {
            "name": one.name,
            "backend": one.backend,
            **one.over,
            **time,
            "gb_per_s": one.nbytes / time["ms_median"] / 1e6,
            "max_relative_error": error,
            "graph": watch.is_graph,
        }
        for one, error, watch, time in zip(contenders, errors, watches, times, strict=True)
    ]
    return rows, read_bandwidth(device)


def interleaved(watches: Sequence[Stopwatch], repeats: int, progress: Progress) -> list[dict[str, float]]:
    """Sample all stopwatches alternately, `repeats` times; return each `ms_median`, `ms_p10` and `ms_p90`."""
    samples: list[list[float]] = [[] for _ in watches]
    for done, (_, i) in enumerate(in_turn(range(len(watches)), repeats), 1):
        samples[i].append(watches[i].sample())
        if done % len(watches) == 0:
            progress(done // len(watches), repeats)
    times = [spread("ms", ms) for ms in samples]
    return [{"ms_median": time.pop("ms"), **time} for time in times]


def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """Return the GB/s at which a sum reads data much larger than any cache (median of several runs)."""
    nbytes = nbytes or (1 << 32 if device.type == "cuda" else 1 << 29)
    x = torch.ones(nbytes // 4, device=device, dtype=torch.float32)
    watch = Stopwatch(lambda _: x.sum(), 1, device)
    ms = percentile([watch.sample() for _ in range(9)], 50)
    return nbytes / ms / 1e6


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of torch's product of two large matrices (median of several runs)."""
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, device=device, dtype=dtype) for _ in range(2))
    watch = Stopwatch(lambda _: a @ b, 1, device)
    return 2e3 * _PEAK_SIZE**3 / percentile([watch.sample() for _ in range(5)], 50)


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last-level cache in bytes. Data should be several times as large, or rotated."""
    if device.type == "cuda":
        size: int = torch.cuda.get_device_properties(device).L2_cache_size
        return size
    return 32 << 20  # a typical size; virtual machines rarely report theirs


def copies_for(device: torch.device, nbytes: int) -> int:
    """Return how many copies of `nbytes` bytes fill four times the last-level cache, at most 64."""
    return max(1, min(_MOST_COPIES, -(-4 * cache_bytes(device) // max(1, nbytes))))


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention for the last tokens of one sequence in fp64.

    `q`: [new, q_heads, dim]; `k`, `v`: [kv_heads, keys, dim]. Returns fp64 [new, q_heads, dim].
    """
    new, q_heads, _ = q.shape
    heads, keys, _ = k.shape
    position = torch.arange(keys - new, keys, device=q.device)[:, None]
    hidden = torch.arange(keys, device=q.device) > position  # [new, keys]
    out = torch.empty(new, q_heads, v.shape[2], dtype=torch.float64, device=q.device)
    for head in range(q_heads):
        of = head * heads // q_heads
        scores = q[:, head].double() @ k[of].double().T * scale
        weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), dim=-1)
        out[:, head] = weights @ v[of].double()
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return max|got - want| / max|want|."""
    return float((got.double() - want).abs().max() / want.abs().max())
