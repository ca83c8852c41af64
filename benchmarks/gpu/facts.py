"""The device: what it is, what its memory and its matrix units do, and which packages are there."""

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.gpu.case import Case, Rows, Target

_ASKED = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
_ASKED += ("temperature.gpu", "pstate")
_OPTIONAL = ("xdist", "pytest_timeout", "llguidance", "msgspec", "fastapi", "flash_attn", "nanovllm")


def cases(target: Target) -> Iterator[Case]:
    """Device, bandwidth and products."""
    yield Case(name="device", run=lambda: device(target), limit_s=30)
    yield Case(name="rates", run=lambda: rates(target), limit_s=30)


def device(target: Target) -> Rows:
    """Return what torch and the driver report of the device; on a CPU stand-ins."""
    import torch

    row = {"missing": [name for name in _OPTIONAL if not has(name)], **driver()}
    if not target.is_rehearsal:
        seen = torch.cuda.get_device_properties(0)
        row |= {
            "name": seen.name,
            "capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": seen.multi_processor_count,
            "memory_bytes": seen.total_memory,
            "l2_bytes": seen.L2_cache_size,
            "devices": torch.cuda.device_count(),
        }
    return [row]


def has(package: str) -> bool:
    """True if a package can be imported."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def rates(target: Target) -> Rows:
    """A sum that only reads, a copy that reads and writes, and a product of two large bf16 matrices."""
    import torch

    from kvq.bench.kernels.measure import Stopwatch, matrix_rate, read_bandwidth
    from kvq.bench.timing import percentile

    where = torch.device(target.device)
    a = torch.ones(target.pick(1 << 30, 1 << 20), device=where)
    b = torch.empty_like(a)
    watch = Stopwatch(lambda _: b.copy_(a), 1, where)
    copied_ms = percentile([watch.sample() for _ in range(5)], 50)
    row = {"read_gb_per_s": read_bandwidth(where), "copy_gb_per_s": 2 * a.nbytes / copied_ms / 1e6}
    if not target.is_rehearsal:
        row["bf16_tflop_per_s"] = matrix_rate(where, torch.bfloat16) / 1e12
    return [row | driver()]  # clocks just after work


def driver() -> dict[str, str]:
    """The driver's version and the card's clocks now; nothing where nobody tells."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "--id=0"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_ASKED, (value.strip() for value in run.stdout.split(",")), strict=False))
