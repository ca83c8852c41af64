"""`kvq doctor`: the backends that run on this machine, and the reasons why others don't."""

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from kvq.commands.shared.terminal import echo
from kvq.errors import UnsupportedKernel
from kvq.extras import PACKAGES, install_command, missing_packages
from kvq.formats import KVRecipe
from kvq.formats.weights import parse_weight_format
from kvq.layout import BLOCK_SIZE
from kvq.sizes import binary
from kvq.version import __version__

if TYPE_CHECKING:
    from kvq.kernels import Device


@click.command(name="doctor")
def command() -> None:
    """Show the device, the compiler, the backends that run here, and the reasons why others don't."""
    import torch

    from kvq.cache import available_bytes
    from kvq.cache.backend import cache_backends
    from kvq.evals.report.results import describe_device, versions
    from kvq.kernels.cores import quota_cores, settle_threads
    from kvq.models.parts.device import pick_device

    device = pick_device("auto")
    free = available_bytes(device)
    found = versions()
    _line("kvq", __version__)
    _line("python", f"{found['python']} on {found['platform']}")
    _line("torch", f"{found['torch']}, transformers {found['transformers']}")
    _line("device", describe_device(device))
    _line("memory", "unknown" if free is None else f"{binary(free)} available")
    settle_threads()
    quota = quota_cores()
    cores = f"{os.cpu_count()}" if quota is None else f"{os.cpu_count()}, a quota of {quota:g}"
    _line("cpu cores", f"{cores}; {torch.get_num_threads()} threads")
    _line("gpu", _gpu())
    _line("compiler", _compiler())
    _line("caches", ", ".join(cache_backends()))
    echo("\nbackends (auto takes the first that runs):")
    for name, verdict in backend_verdicts():
        _line(f"  {name}", verdict)
    echo("\nextras (packages that some commands need):")
    for extra in dict.fromkeys(extra for _, extra in PACKAGES.values()):
        missing = missing_packages(extra)
        lacks = f"lacks {', '.join(missing)}; {install_command(extra)}"
        _line(f"  {extra}", lacks if missing else "installed")


def backend_verdicts() -> list[tuple[str, str]]:
    """Return every backend with the operations that run here, or with the reason why none do."""
    from kvq.kernels import BACKENDS, Device, KernelSpec, registered, select
    from kvq.kernels.native.library import load
    from kvq.models.parts.device import pick_device

    formats = KVRecipe.uniform("int4", [(128, 128)], whole_blocks=True).layers[0]
    spec = KernelSpec(formats=formats, q_heads=8, kv_heads=1, block_size=BLOCK_SIZE)  # also for latents
    device = Device.of(pick_device("auto"))
    verdicts = []
    for name in BACKENDS:
        try:
            runs = [select(operation, spec, device, name).operation for operation in registered(name)]
            runs += _linear_operations(device, name)
        except UnsupportedKernel as error:
            reason = str(error).partition(f": {name}: ")[2].partition("; use --backend")[0]
            verdicts.append((name, f"does not run: {reason}"))
            continue
        library = load() if name == "cpu" else None
        variant = "" if library is None or isinstance(library, str) else f" ({library})"
        verdicts.append((name, f"runs here: {', '.join(runs)}{variant}"))
    return verdicts


def _linear_operations(device: "Device", backend: str) -> list[str]:
    """Return a backend's Linear operations that run here."""
    from kvq.kernels import LinearSpec, select

    found = []
    for name in ("int4_g128", "int8"):
        spec = LinearSpec(fmt=parse_weight_format(name), in_features=4096, out_features=4096)
        with suppress(UnsupportedKernel):
            found.append(select(spec.operation, spec, device, backend).operation)
    return found


def _line(name: str, value: str) -> None:
    echo(f"{name:<12} {value}")


def _gpu() -> str:
    import torch

    from kvq.kernels import Device

    if not torch.cuda.is_available():
        return "none that torch can use"
    device = Device.of(torch.device("cuda"))
    if device.capability is None:
        return f"{device.name}, {device.gfx}, ROCm {torch.version.hip}"
    major, minor = device.capability
    return f"{device.name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"


def _compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return run.stdout.splitlines()[0] if run.stdout else path
    packages = "Xcode command line tools" if platform.system() == "Darwin" else "g++ or clang"
    return f"none found; compiled CPU kernels will need {packages}"
