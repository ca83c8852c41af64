"""Interleaved timing of rivals on a CPU or a GPU, and the memory bandwidth measured beside them."""

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from kvq.bench.timing import percentile

Run = Callable[[int], Tensor]  # one call; the number picks one of several copies of the data
_GPU_CALLS = 20  # in one sample, at least
_WARM_UP = 3


class Stopwatch:
    """One contender's way of being timed: wall clock on a CPU, a replayed graph between events on a GPU."""

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
        """Milliseconds of one call, the mean of a batch of calls on a GPU."""
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
        """All calls of a sample as one graph; None if the contender synchronizes."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                for i in range(self._calls):
                    self._run(i % self._copies)
        except RuntimeError:  # what CUDA raises for an operation that can't be captured
            torch.cuda.synchronize()
            return None
        return graph


def interleaved(
    watches: Sequence[Stopwatch], repeats: int, progress: Callable[[], None]
) -> list[dict[str, float]]:
    """`repeats` samples of each, one contender after another, each time beginning with the next one."""
    samples: list[list[float]] = [[] for _ in watches]
    for repeat in range(repeats):
        for i in range(len(watches)):
            at = (i + repeat) % len(watches)
            samples[at].append(watches[at].sample())
        progress()
    return [
        {
            "ms_median": percentile(ms, 50),
            "ms_p10": percentile(ms, 10),
            "ms_p90": percentile(ms, 90),
        }
        for ms in samples
    ]


def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """GB/s that a sum over much more than any cache reads, the median of several runs."""
    nbytes = nbytes or (1 << 32 if device.type == "cuda" else 1 << 29)
    x = torch.ones(nbytes // 4, device=device)
    watch = Stopwatch(lambda _: x.sum(), 1, device)
    ms = percentile([watch.sample() for _ in range(9)], 50)
    return nbytes / ms / 1e6


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache; data should be several times as large, or be rotated."""
    if device.type == "cuda":
        size: int = torch.cuda.get_device_properties(device).L2_cache_size
        return size
    return 32 << 20  # a usual size; what the machine shares is seldom known
