"""Profile of a GPU in some steps: its kernels by kind, busy time, and launches."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KINDS = (  # the first whose words are found in a kernel's name; names are torch's, cuBLAS's and kvq's
    ("attention", ("attend", "merge_kernel", "write_kernel", "list_kernel", "flash", "fmha")),
    ("linear", ("linear", "gemm", "gemv", "cutlass", "nvjet", "splitk", "cublas", "parts", "quantize")),
    ("sampling", ("peaks", "brackets", "bins", "choose", "plan_kernel", "sort", "argmax", "topk", "scan")),
    ("layers", ("norm", "gated", "rope", "elementwise", "reduce")),
    ("copies", ("memcpy", "memset")),
)
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or a copy on the GPU, or a call of the driver on the host."""

    name: str
    on_gpu: bool
    begin_us: float
    end_us: float


def profiled(work: Callable[[], object]) -> list[Activity]:
    """Everything that happened on the GPU while `work` ran, and the driver's calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return [
        Activity(
            event.name,
            event.device_type.name == "CUDA",
            event.time_range.start,
            event.time_range.end,
        )
        for event in profile.events() or []
    ]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


def summed_up(found: Sequence[Activity], steps: int, layers: int) -> dict[str, Any]:
    """Per step: milliseconds by kind of kernel and altogether, overlaps once; kernels and calls counted."""
    kernels = [one for one in found if one.on_gpu]
    by_kind: dict[str, float] = dict.fromkeys((*(kind for kind, _ in KINDS), "other"), 0.0)
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in kernels:
        by_kind[kind_of(one.name)] += one.end_us - one.begin_us
        by_name[one.name].append(one.end_us - one.begin_us)
    slowest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:_SHOWN]
    count = sum(kind_of(one.name) != "copies" for one in kernels)
    return {
        "gpu_busy_ms": _covered(kernels) / steps / 1e3,
        **{f"{kind}_ms": us / steps / 1e3 for kind, us in by_kind.items()},
        "kernels": count / steps,
        "kernels_per_layer": count / steps / layers,
        "launches": _calls(found, _LAUNCHES) / steps,
        "graph_launches": _calls(found, ("cudaGraphLaunch",)) / steps,
        "host_waits": _calls(found, _WAITS) / steps,
        "slowest_kernels": [
            {
                "name": name[:120],
                "kind": kind_of(name),
                "count": len(by_name[name]) / steps,
                "ms": sum(by_name[name]) / steps / 1e3,
            }
            for name in slowest
        ],
    }


def _calls(found: Iterable[Activity], names: tuple[str, ...]) -> int:
    return sum(not one.on_gpu and one.name.startswith(names) for one in found)


def _covered(kernels: Sequence[Activity]) -> float:
    """Microseconds in which at least one ran."""
    total, end = 0.0, float("-inf")
    for one in sorted(kernels, key=lambda one: one.begin_us):
        total += max(0.0, one.end_us - max(end, one.begin_us))
        end = max(end, one.end_us)
    return total
