"""Builds the CPU kernels, one library with a variant per instruction set; the rest is in pyproject.toml.

The kernels are optional: without a compiler the installation still succeeds, and kvq runs on its
slower reference backend.
"""

import logging
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

KERNELS = Path("kvq/kernels")
COMMON = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512VNNI = [*AVX512, "-mavx512vnni"]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
VARIANTS = {"portable": [], **({"avx2": AVX2, "avx512": AVX512, "avx512vnni": AVX512VNNI} if IS_X86 else {})}
COMMON_SOURCES = ("native/variants.cpp", "native/pool.cpp")  # without instruction-set flags
SOURCES = {  # and what each file needs
    "attend/attend.cpp": ["-ffp-contract=fast"],
    "attend_latent/attend_latent.cpp": ["-ffp-contract=fast"],
    "copy_blocks/copy_blocks.cpp": [],
    "decoder/decoder.cpp": ["-ffp-contract=off"],  # bit-equal to calls one after the other
    "decoder/stack.cpp": [],
    "gather_dense/gather_dense.cpp": ["-ffp-contract=off"],  # bit-equal to the reference,
    "linear/linear.cpp": ["-ffp-contract=off"],  # a row alone is bit-equal to it among others
    "linear/mlp.cpp": ["-ffp-contract=off"],
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


class BuildKernels(build_ext):
    """Compiles every source once per variant; a variant that the compiler can't build is left out."""

    def build_extension(self, ext: Extension) -> None:
        """Build the library next to the package, or say why there is none."""
        try:
            objects = [
                obj for source in COMMON_SOURCES for obj in self._compile(str(KERNELS / source), "common", [])
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers are processes of their own
                for built in pool.map(self._variant, VARIANTS, VARIANTS.values()):
                    objects += built
            self.compiler.link_shared_object(
                objects,
                self.get_ext_fullpath(ext.name),
                target_lang="c++",
                extra_postargs=[*THREADS, *SANITIZED],
            )
        except (CCompilerError, CompileError, ExecError, PlatformError) as error:
            logging.getLogger("kvq").warning(
                "the CPU kernels were not built (%s); kvq will run on its slower reference backend", error
            )

    def _variant(self, variant: str, flags: list[str]) -> list[str]:
        objects: list[str] = []
        for source, own in SOURCES.items():
            try:
                objects += self._compile(str(KERNELS / source), variant, [*flags, *own])
            except CompileError:
                if variant == "portable":
                    raise
                return []
        return objects

    def _compile(self, source: str, variant: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp) / variant),
            macros=[("KVQ_VARIANT", variant)],
            extra_postargs=[*COMMON, *THREADS, *flags, *SANITIZED],
        )


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
