"""A door of the fuzzer: damaged GGUF files. Each is refused in kvq's own words, or loads.

Three small files are made once, of values and of two mixtures of blocks. A case changes bytes of one of
them, mostly in its header, or the file's length, prepares it, and now and then loads it whole. Beside one in
four lies the manifest of the whole file, and then none may load.
"""

import atexit
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import kvq
from benchmarks.fuzz.folders import make_plain, outcome
from benchmarks.fuzz.mutate import mutated_bytes
from kvq.weights.manifest import manifest_path, write_manifest

_KINDS = ("F16", "Q8_0", "Q4_K_M")
_HEADER = 1 << 15  # bytes; the vocabulary takes most of the header


def case(odds: random.Random) -> str | None:
    """Damage a file and load it; what was found, and how to find it again."""
    kind = odds.choice(_KINDS)
    content, path = _whole(kind), _folder() / f"damaged-{kind}.gguf"
    damaged = _damaged(odds, content)
    is_loaded, is_sealed = odds.random() < 0.1, odds.random() < 0.25
    manifest_path(path).unlink(missing_ok=True)
    if is_sealed:
        path.write_bytes(content)
        write_manifest(path)
    path.write_bytes(damaged)
    found = outcome(path, {path.name} if damaged != content else set(), is_loaded=is_loaded)
    return None if found is None else f"{kind}{' and a manifest' * is_sealed}: {found}"


def _damaged(odds: random.Random, content: bytes) -> bytes:
    change = odds.randrange(5)
    if change == 0:  # a number in the header becomes another
        at, size = odds.randrange(_HEADER), odds.choice((1, 4, 8))
        value = odds.choice((0, 1, 255, 1 << 31, (1 << 63) - 1, odds.randrange(1 << 16))) % (1 << 8 * size)
        return content[:at] + value.to_bytes(size, "little") + content[at + size :]
    if change == 1:
        return content[: odds.randrange(len(content))]
    if change == 2:  # numbers of tensors: shapes, types and offsets
        end = content.rindex(b".weight") + 64
        at = odds.randrange(max(0, end - 2000), end)
        return content[:at] + odds.randbytes(odds.choice((1, 2, 8))) + content[at + 8 :]
    if change == 3:
        return mutated_bytes(odds, content)
    return mutated_bytes(odds, content[:_HEADER]) + content[_HEADER:]


@cache
def _folder() -> Path:
    """Return the folder of files; it is made once and removed with the process."""
    root = Path(tempfile.mkdtemp(prefix="kvq-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    make_plain(root / "plain")
    return root


@cache
def _whole(kind: str) -> bytes:
    path = _folder() / f"{kind}.gguf"
    kvq.quantize(_folder() / "plain", path, file_format="gguf", gguf_type=kind)
    kvq.load(path, device="cpu")
    return path.read_bytes()
