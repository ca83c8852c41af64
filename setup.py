"""Builds the CPU kernels, one library with a variant per instruction set; the rest is in pyproject.toml.

The kernels are optional: without a compiler the installation still succeeds, kvq runs on its slower
reference backend, and what the compiler said lies beside the missing library, where kvq finds it.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

KERNELS = Path("kvq/kernels")
COMMON = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-fPIC",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-psabi",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512VNNI = [*AVX512, "-mavx512vnni"]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
VARIANTS = {"portable": [], **({"avx2": AVX2, "avx512": AVX512, "avx512vnni": AVX512VNNI} if IS_X86 else {})}
COMMON_SOURCES = ("native/variants.cpp", "native/pool.cpp")  # without instruction-set flags
SOURCES = {  # and what each file needs; the two that take longest come first
    "linear/linear.cpp": ["-ffp-contract=off"],  # a row alone is bit-equal to it among others
    "linear/blocks.cpp": ["-ffp-contract=off"],
    "adapters/adapters.cpp": ["-ffp-contract=off"],  # as these
    "attend/attend.cpp": ["-ffp-contract=fast"],
    "attend_latent/attend_latent.cpp": ["-ffp-contract=fast"],
    "copy_blocks/copy_blocks.cpp": [],
    "decoder/decoder.cpp": ["-ffp-contract=off"],  # bit-equal to calls one after the other
    "decoder/stack.cpp": [],
    "experts/experts.cpp": ["-ffp-contract=off"],  # sums in one order, as its products
    "gather_dense/gather_dense.cpp": ["-ffp-contract=off"],  # bit-equal to the reference
    "linear/block_pack.cpp": [],
    "linear/mlp.cpp": ["-ffp-contract=off"],
    "linear/pack.cpp": [],
    "linear/rows.cpp": ["-ffp-contract=off"],  # values are the reference's, bit for bit
    "merge_partials/merge_partials.cpp": ["-ffp-contract=fast"],
    "rms_norm/rms_norm.cpp": ["-ffp-contract=off"],
    "rope/rope.cpp": ["-ffp-contract=off"],
    "seal/seal.cpp": ["-ffp-contract=off"],  # codes and scales are the reference's, bit for bit
    "write_kv/write_kv.cpp": ["-ffp-contract=off"],  # as are these
}
THREADS = ["-pthread"]
# For `make sanitize`: address,undefined or thread.
SANITIZE = os.environ.get("KVQ_SANITIZE", "")
SANITIZED = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-g", "-O1", "-w"] if SANITIZE else []
# Which variants: all, for a library that is quick on every CPU; here, the best that this one runs; none.
WANTED = os.environ.get("KVQ_VARIANTS", "all")
NOTE = "not_built.txt"  # beside the library: why there is none
LAST_LINES = 20  # of what a compiler said
SECONDS = 50  # of processor time that a variant takes at most, on a quiet CPU of 2023
REMEDY = (
    "a compiler of C++17 is needed, gcc or clang: Debian and Ubuntu: apt install g++; Fedora: dnf install "
    "gcc-c++; macOS: xcode-select --install"
)


class BuildKernels(build_ext):
    """Compiles every source once per variant; a variant that the compiler can't build is left out."""

    def build_extension(self, ext: Extension) -> None:
        """Build the library next to the package, or say why there is none."""
        if WANTED not in ("all", "here", "none"):
            raise SystemExit(f"KVQ_VARIANTS must be all, here or none, got {WANTED!r}")
        if WANTED == "none":
            return
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        note = library.with_name(NOTE)
        for old in (library, note):
            old.unlink(missing_ok=True)
        try:
            self._build(library)
        except (CompileError, PlatformError) as error:
            note.write_text(f"{error}\n", encoding="utf-8")
            say(f"the C++ kernels were not built; kvq will run on its slower reference backend.\n{error}")

    def copy_extensions_to_source(self) -> None:
        """Of an editable installation: the note, too, and no older one."""
        super().copy_extensions_to_source()
        (ext,) = self.extensions
        made, copied = Path(self.build_lib, *ext.name.split(".")).with_name(NOTE), KERNELS / "native" / NOTE
        if made.exists():
            shutil.copy(made, copied)
        elif WANTED != "none":
            copied.unlink(missing_ok=True)

    def _build(self, library: Path) -> None:
        common = [self._compile(source, "common", []) for source in COMMON_SOURCES]
        if WANTED == "all":
            objects = self._variants(list(VARIANTS))
        else:  # an older compiler may know less than the CPU
            lower = list(VARIANTS)[: list(VARIANTS).index(self._best(common)) + 1]
            objects = next(filter(None, (self._variants([variant]) for variant in reversed(lower))))
        self._link([*common, *objects], library)

    def _best(self, common: list[str]) -> str:
        """The best variant for this CPU, as the library itself will find."""
        probe = Path(self.build_temp, "probe.so").resolve()
        self._link(common[:1], probe)  # variants.cpp
        features = ctypes.CDLL(str(probe)).kvq_cpu_features
        features.restype = ctypes.c_char_p
        return str(features().decode())

    def _variants(self, variants: list[str]) -> list[str]:
        """Objects of those variants that the compiler can build; `portable` it must."""
        jobs = [(source, variant) for source in SOURCES for variant in variants]
        say(
            f"compiling the C++ kernels for {', '.join(variants)}: {len(jobs)} files, about "
            f"{SECONDS * len(variants)} s of processor time on {os.cpu_count()} cores"
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers are processes of their own
            built = list(pool.map(self._try, *zip(*jobs, strict=True)))
        failed = {
            variant: x for (_, variant), x in zip(jobs, built, strict=True) if isinstance(x, CompileError)
        }
        if "portable" in failed:
            raise failed["portable"]
        for variant, error in failed.items():
            say(f"without the variant {variant}, which this compiler can't build: {error}")
        return [x for (_, variant), x in zip(jobs, built, strict=True) if variant not in failed]

    def _try(self, source: str, variant: str) -> str | CompileError:
        try:
            return self._compile(source, variant, [*VARIANTS[variant], *SOURCES[source]])
        except CompileError as error:
            return error

    def _compile(self, source: str, variant: str, flags: list[str]) -> str:
        made = Path(self.build_temp, variant, source).with_suffix(".o")
        made.parent.mkdir(parents=True, exist_ok=True)
        own = [*COMMON, *THREADS, *flags, *SANITIZED, f"-DKVQ_VARIANT={variant}"]
        self._run("compiler_so_cxx", [*own, "-c", str(KERNELS / source), "-o", str(made)])
        return str(made)

    def _link(self, objects: list[str], made: Path) -> None:
        self._run("linker_so_cxx", [*objects, "-o", str(made), *THREADS, *SANITIZED])

    def _run(self, tool: str, arguments: list[str]) -> None:
        """Run the compiler that Python knows, or the one of CXX; of what it says failures alone are told."""
        if not hasattr(self.compiler, tool):
            raise PlatformError(f"the kernels are for gcc and clang; {REMEDY}")
        command = [*getattr(self.compiler, tool), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise CompileError(f"{command[0]} can't be run ({error.strerror}); {REMEDY}") from error
        if done.returncode:
            said = "\n".join((done.stderr or done.stdout).splitlines()[-LAST_LINES:])
            raise CompileError(f"{shlex.join(command)}\nended with {done.returncode}:\n{said}\n{REMEDY}")


def say(text: str) -> None:
    """Show a line at once, where pip or make show it at all."""
    print(f"kvq: {text}", file=sys.stderr, flush=True)


setup(
    ext_modules=[
        Extension(
            "kvq.kernels.native._kernels",
            sources=[str(KERNELS / source) for source in (*COMMON_SOURCES, *SOURCES)],
            depends=[str(path) for path in sorted(KERNELS.rglob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
