"""A door of the fuzzer: damaged model folders. Each is refused in kvq's own words, or loads.

Three small folders are made once: a plain model, and the same quantized with and without a manifest. A case
damages one of them in up to three places, prepares it, now and then loads it whole, and puts back what was
there.
"""

import atexit
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kvq
from kvq.errors import KVQError
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.prepared import prepare
from kvq.models.loading.skeleton import build_skeleton
from kvq.weights.manifest import MANIFEST, manifest_path
from tests.helpers_models import build_model
from tests.weights.mutations import mutate

_SLOW_S = 20.0  # a case takes a hundredth; a busy machine is no finding
_GROWTH_BYTES = 1 << 30  # of the process, by one case
_FOREIGN = (  # in messages that aren't kvq's
    "Traceback", "report!", "above report", "ignore_mismatched_sizes", " at 0x", "<class", "NoneType",
    "Validation error", "has no attribute", "unexpected keyword", "meta tensor", "site-packages",
)  # fmt: skip
_MAX_WORDS = 2_000  # characters of a message


def case(odds: random.Random) -> str | None:
    """Damage a folder and load it; what was found, and how to find it again."""
    name = odds.choice(list(_FOLDERS))
    folder = _folders() / name
    whole = _whole(name)
    try:
        done = [_damage(folder, odds) for _ in range(odds.choice((1, 1, 1, 2, 3)))]
        damaged = {path.name for path in folder.iterdir() if path.read_bytes() != whole.get(path.name)}
        damaged |= {name for name in whole if not (folder / name).exists()}
        found = outcome(folder, damaged, is_loaded=odds.random() < 0.1)
        return None if found is None else f"{name}, {'; '.join(done)}: {found}; {_shown(folder, damaged)}"
    finally:
        _restore(folder, whole)


def outcome(folder: Path, damaged: set[str], *, is_loaded: bool) -> str | None:
    """Load a model, or prepare it; return what is wrong with how that ends."""
    began, most = time.thread_time(), _most_bytes()
    sealed = manifest_path(folder).exists()
    try:
        if is_loaded:
            kvq.load(folder, device="cpu")
        else:
            build_skeleton(prepare(folder, device="cpu"))
        listed = damaged - {"README.md"}
        if sealed and listed and (is_loaded or not all(name.endswith(".safetensors") for name in listed)):
            return f"loaded in silence, though {', '.join(sorted(listed))} differ from the manifest"
    except KVQError as error:
        message = str(error)
        if foreign := [part for part in _FOREIGN if part in message]:
            return f"not in kvq's words ({foreign[0]!r}): {message}"
        if len(message) > _MAX_WORDS or not message.strip():
            return f"a message of {len(message)} characters: {message[:_MAX_WORDS]}"
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return f"{type(error).__name__}: {error}"
    if (took := time.thread_time() - began) > _SLOW_S:
        return f"took {took:.1f} s of processor time"
    if (grown := _most_bytes() - most) > _GROWTH_BYTES:
        return f"took {grown / 2**30:.1f} GiB"
    return None


def _most_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _shown(folder: Path, damaged: set[str]) -> str:
    """The damaged small files, as far as they fit a line."""
    texts = []
    for name in sorted(damaged):
        path = folder / name
        if path.suffix == ".json" and path.exists() and path.stat().st_size < 10_000:
            texts.append(f"{name} = {path.read_bytes()!r}")
        else:
            texts.append(f"{name} {'changed' if path.exists() else 'is gone'}")
    return ", ".join(texts)


def _damage(folder: Path, odds: random.Random) -> str:
    try:
        return odds.choice(_KINDS)(folder, odds)
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        MemoryError,
        OverflowError,
    ) as error:  # of what is damaged already
        return f"not changed again ({type(error).__name__})"


def _nudge_number(folder: Path, odds: random.Random) -> str:
    """A number of the configuration becomes another that might be one."""
    path = folder / odds.choice(("config.json", "config.json", "config.json", "generation_config.json"))
    config = json.loads(path.read_bytes())
    names = [name for name, value in config.items() if type(value) in (int, float)]
    if not names:
        return mutate(folder, odds)
    name = odds.choice(names)
    value = config[name]
    config[name] = odds.choice(
        (
            value * 2,
            value // 2,
            value + 1,
            value - 1,
            -value,
            value * 10**9,
            10**18,
            1 << 31,
            str(value),
            [value],
        )
    )
    path.write_text(json.dumps(config))
    return f"{path.name}: {name} {value!r} becomes {config[name]!r}"


def _swap_for_default(folder: Path, odds: random.Random) -> str:
    """A key of the configuration, or one that it could have, gets another family's word or is dropped."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    name, value = odds.choice(_WORDS)
    config[name] = value
    path.write_text(json.dumps(config))
    return f"config.json: {name} becomes {value!r}"


_WORDS: tuple[tuple[str, Any], ...] = (
    *(("model_type", name) for name in ("qwen3", "mixtral", "gpt2", "phi3", "gemma2", "deepseek_v3", "")),
    ("model_type", "gpt_oss"),
    *(("hidden_act", name) for name in ("nope", "gelu", 3, None)),
    *(("dtype", name) for name in ("float16", "float7", "int8", 3, None)),
    *(("rope_parameters", value) for value in (None, [], {}, {"rope_type": "yarn"}, {"rope_type": "nope"})),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -1}),
    ("rope_scaling", {"type": "linear", "factor": "2"}),
    ("rope_parameters", {"rope_type": "llama3", "factor": 0, "rope_theta": 1e4}),
    *(("layer_types", value) for value in ([], ["full_attention"], ["full_attention"] * 2, "full_attention")),
    ("tie_word_embeddings", False), ("attention_bias", True), ("mlp_bias", True), ("head_dim", None),
    ("num_key_value_heads", None), ("architectures", ["Nope"]), ("architectures", 3),
    ("quantization_config", {}), ("_name_or_path", 3),
    ("eos_token_id", 10**9), ("eos_token_id", [0, -5]), ("pad_token_id", 4096), ("sliding_window", 2),
    ("num_local_experts", 10**9), ("auto_map", {"AutoConfig": "x.Y"}), ("id2label", {"0": 1}),
    ("attention_dropout", "a"), ("use_cache", "no"), ("is_decoder", True), ("torch_dtype", "nope"),
)  # fmt: skip
_KINDS: tuple[Callable[[Path, random.Random], str], ...] = (mutate, mutate, _nudge_number, _swap_for_default)


@cache
def _folders() -> Path:
    """Return the folder of folders; it is made once and removed with the process."""
    root = Path(tempfile.mkdtemp(prefix="kvq-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    make_plain(root / "plain")
    kvq.quantize(root / "plain", root / "sealed", method="rtn", group_size=32)
    shutil.copytree(root / "sealed", root / "open", ignore=shutil.ignore_patterns(MANIFEST))
    return root


_FOLDERS = ("plain", "sealed", "open")


@cache
def _whole(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (_folders() / name).iterdir()}


def make_plain(folder: Path) -> None:
    """Write a small model with the embedded model's tokenizer."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    build_model(config).bfloat16().save_pretrained(folder)
    for path in EMBEDDED["tiny"].glob("*token*"):
        shutil.copyfile(path, folder / path.name)


def _restore(folder: Path, whole: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in whole:
            path.unlink()
    for name, content in whole.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
