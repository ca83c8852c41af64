"""Library of compiled kernels: search, loading, choice of the variant for this CPU, and supported formats."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its OpenMP runtime must be there before the kernels ask for one

from kvq.errors import UnsupportedKernel
from kvq.extras import install_command
from kvq.kernels.native.abi import KERNELS, NUMBERS
from kvq.kernels.spec import Device, KernelSpec, LinearSpec, Support

_FAILURES: dict[int, tuple[type[Exception], str]] = {  # by KvqStatus
    NUMBERS["KVQ_NO_MEMORY"]: (MemoryError, "the CPU kernel found no memory for its scratch space"),
    NUMBERS["KVQ_BAD_BLOCK"]: (IndexError, "a table or a slot names a block outside the pool"),
    NUMBERS["KVQ_BAD_EXPERT"]: (IndexError, "a row chose an expert that isn't there"),
    NUMBERS["KVQ_BAD_ROW"]: (IndexError, "a row was looked up that the weight does not have"),
}
VARIANTS = ("avx512vnni", "avx512", "avx2", "portable")  # best first, chosen by the CPU; Arm runs the last
MOST_DIM = 4096  # elements of a token row that write_kv.cpp has room for


@dataclass(frozen=True, slots=True)
class _Library:
    """One variant of the loaded kernels."""

    variant: str
    kernels: dict[str, Any]  # by name; each returns a KvqStatus
    best: str  # variant of this CPU, whether it was built or not

    def __str__(self) -> str:
        """Return the variant's name, and that of the best one if it was not built."""
        if self.variant == self.best:
            return self.variant
        return f"{self.variant}; {self.best}, which this CPU runs, was not built: {install_command()}"


@lru_cache(maxsize=1)
def load() -> _Library | str:
    """Return the library in the best variant for this CPU, or the reason why none is available."""
    found = variants()
    return found if isinstance(found, str) else found[0]


@lru_cache(maxsize=1)
def variants() -> list[_Library] | str:
    """Return every variant that was built and runs on this CPU, best first, or why there is none."""
    path = _path()
    if path is None:
        note = Path(__file__).with_name("not_built.txt")  # of setup.py
        seen = f" (what it said: {note})" if note.exists() else ""
        return (
            f"the C++ kernels were not built; install a C++ compiler, gcc or clang{seen}, then build them: "
            f"{install_command()}"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} can't be loaded: {error}"
    library.kvq_cpu_features.restype = ctypes.c_char_p
    best = library.kvq_cpu_features().decode()
    built = [variant for variant in VARIANTS if hasattr(library, f"kvq_{variant}_attend")]
    found = [
        _Library(variant, {name: _kernel(library, variant, name) for name in KERNELS}, best)
        for variant in built
        if variant in VARIANTS[VARIANTS.index(best) :]
    ]
    return found or (
        f"the C++ kernels were built for other CPUs alone ({', '.join(built)}), and this one runs {best}; "
        f"build them here: {install_command()}"
    )


def _kernel(library: ctypes.CDLL, variant: str, name: str) -> Any:
    function = getattr(library, f"kvq_{variant}_{name}")
    function.argtypes = KERNELS[name]
    return function


def loaded() -> _Library:
    """Return the library.

    Raises:
        UnsupportedKernel: the library is not available.
    """
    library = load()
    if isinstance(library, str):
        raise UnsupportedKernel(library)
    return library


def run(kernel: str, *arguments: Any) -> None:
    """Call a kernel of the library.

    Raises:
        IndexError: a table, slot, lookup or choice of experts refers to something that does not exist;
            nothing was written.
        MemoryError: there is not enough memory for scratch buffers.
        UnsupportedKernel: the library is not available.
    """
    if status := loaded().kernels[kernel](*arguments):
        kind, message = _FAILURES[status]
        raise kind(message)


def _path() -> Path | None:
    folder = Path(__file__).parent
    candidates = (folder / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def supports(spec: KernelSpec, device: Device) -> Support:
    """Return yes for every format in `CODES` in CPU memory, if the library is available."""
    runs = supports_linear(spec, device)
    return spec.fits_compiled(MOST_DIM) if runs.yes else runs


def supports_latent(spec: KernelSpec, device: Device) -> Support:
    """Return the result of `supports` for attention over latents, which need one KV head."""
    if device.type == "cpu" and spec.kv_heads != 1:
        return Support(False, f"takes latents of one KV head for all query heads, not {spec.kv_heads}")
    return supports(spec, device)


def supports_linear(spec: KernelSpec | LinearSpec, device: Device) -> Support:
    """Like `supports`, but check only the device and the library; any format and shape fits."""
    if device.type != "cpu":
        return Support(False, f"works on CPU memory, not on {device.name}", is_missed=False)
    library = load()
    return Support(False, library) if isinstance(library, str) else Support(True)
