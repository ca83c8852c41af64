"""Architectures of GGUF files that kvq reads, with transformers' names for their parts and numbers.

architectures.json has an entry for each, with the fields of `Architecture`. Names that many architectures
share are groups there: `parts`, `keys` and `biases` list groups, and names of their own, of which later ones
take precedence. In `parts`, {} stands for an expert's number.

Source: the GGUF specification and the keys and tensor names that llama.cpp's converter writes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from kvq.errors import ModelError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Names and rules of one `general.architecture`.

    `parts`: parts of a layer in transformers' model, by their name in GGUF. `keys`: fields of transformers'
    config, by the key in GGUF without the architecture's name. `biases`: fields that are True if that part
    has a bias in layer 0. `fixed`: further fields. `is_permuted`: the rows of q and k are in another order.
    `norm_shift`: what GGUF adds to norms. `is_partly_rotated`: RoPE may turn a part of each head. `pattern`:
    in a file with a window, which doesn't list the layers, every pattern-th one is full. `local_theta`: base
    of RoPE in layers with a window, if not that of the others. `layers_of_largest`: layers of the size that
    scales scores by hidden_size / heads instead of head_dim.
    """

    model_type: str
    parts: Mapping[str, str]
    keys: Mapping[str, str]
    biases: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    norm_shift: float = 0.0
    is_partly_rotated: bool = False
    pattern: int = 0
    local_theta: float | None = None
    layers_of_largest: int = 0

    @property
    def has_windows(self) -> bool:
        """True if attention may be limited to a window."""
        return self.pattern > 0 or self.model_type == "phi3"


def _read() -> dict[str, Architecture]:
    stored = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    groups, usual = stored["groups"], {"parts": ["layer"], "keys": ["rms eps"], "biases": []}

    def names(listed: list[Any]) -> dict[str, str]:
        return reduce(or_, [groups[one] if isinstance(one, str) else one for one in listed], {})

    return {
        name: Architecture(**entry | {key: names(entry.get(key, usual[key])) for key in usual})
        for name, entry in stored["architectures"].items()
    }


ARCHITECTURES = _read()
# ours -> as files name them: with experts, and with windows
VARIANTS = {"mixtral": "llama", "olmo3": "olmo2"}


def architecture_of(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture of a file's metadata; `where`: the file, for messages.

    Raises:
        ModelError: the metadata name none that kvq reads.
    """
    name = metadata.get("general.architecture")
    known = [one for one in ARCHITECTURES if one not in VARIANTS]
    if name not in known:
        hint = nearest(str(name), known) or ";"
        raise ModelError(
            f"{where}: kvq reads no GGUF of architecture {name!r:.80}{hint} it reads {', '.join(known)}; "
            f"take the model as safetensors, of which kvq reads more families (docs/models.md)"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return ARCHITECTURES["mixtral"]
    if name == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
        return ARCHITECTURES["olmo3"]
    return ARCHITECTURES[str(name)]
