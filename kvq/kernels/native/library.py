"""Finds and loads the compiled kernels, and picks the variant for this CPU."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401  its OpenMP runtime must be there before the kernels ask for one

from kvq.errors import UnsupportedKernel

VARIANTS = ("avx512vnni", "avx512", "avx2", "portable")  # the best first
# What is given more than addresses of structs and small numbers: the types of its arguments.
_MATRIX = (c_void_p, c_int64)  # address and bytes of a row
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear": (c_void_p, *_MATRIX, *_MATRIX, c_int, c_int64, c_int),
    "gated": (*_MATRIX, *_MATRIX, c_int64, c_int, c_int, c_int64, c_int),
    "linear_mlp": (c_void_p, c_void_p, *_MATRIX, *_MATRIX, c_int, c_int, c_int64, c_int),
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_float, c_int64, c_int),
    "decoder_in": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int),
    "decoder_out": (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int64, c_int),
    "rope": (*_MATRIX, c_void_p, c_void_p, c_int, c_int, c_int, c_int64, c_int),
}
OPERATIONS = ("write_kv", "attend", "gather_dense", "merge_partials", "copy_blocks", *_ARGUMENTS)
_NO_MEMORY, _BAD_BLOCK = 1, 2  # KvqStatus


@dataclass(frozen=True, slots=True)
class Library:
    """One variant of the loaded kernels."""

    variant: str
    write_kv: Any
    attend: Any
    gather_dense: Any
    merge_partials: Any
    copy_blocks: Any
    linear: Any
    gated: Any
    linear_mlp: Any
    rms_norm: Any
    decoder_in: Any
    decoder_out: Any
    rope: Any


@lru_cache(maxsize=1)
def load() -> Library | str:
    """Return the library in the best variant that this CPU runs, or why there is none."""
    found = variants()
    return found if isinstance(found, str) else found[0]


@lru_cache(maxsize=1)
def variants() -> list[Library] | str:
    """Every variant that was built and runs on this CPU, the best first, or why there is none."""
    path = _path()
    if path is None:
        return (
            "the C++ kernels were not built; install a C++ compiler (gcc or clang) and kvq-toolkit once "
            "more, with `pip install -v` to see what it says"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} can't be loaded: {error}"
    library.kvq_cpu_features.restype = ctypes.c_char_p
    best = library.kvq_cpu_features().decode()
    return [
        Library(variant, *(_function(library, variant, name) for name in OPERATIONS))
        for variant in VARIANTS[VARIANTS.index(best) :]
        if hasattr(library, f"kvq_{variant}_attend")
    ]


def _function(library: ctypes.CDLL, variant: str, operation: str) -> Any:
    function = getattr(library, f"kvq_{variant}_{operation}")
    function.argtypes = _ARGUMENTS.get(operation)
    return function


def loaded() -> Library:
    """Return the library.

    Raises:
        UnsupportedKernel: there is none.
    """
    library = load()
    if isinstance(library, str):
        raise UnsupportedKernel(library)
    return library


def check(status: int) -> None:
    """Raise what a kernel's status stands for.

    Raises:
        IndexError: a table or a slot names a block that does not exist; nothing was written.
        MemoryError: no room for scratch memory.
    """
    if status == _BAD_BLOCK:
        raise IndexError("a table or a slot names a block outside the pool")
    if status == _NO_MEMORY:
        raise MemoryError("the CPU kernel found no memory for its scratch space")


def _path() -> Path | None:
    folder = Path(__file__).parent
    candidates = (folder / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)
