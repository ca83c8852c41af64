"""What a config.json says of quantized weights: which layers, how, under which tensor names. No tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvq.errors import ModelError
from kvq.formats.checkpoints import config_groups, flat_config
from kvq.formats.checkpoints.fields import WHERE, Fields
from kvq.formats.checkpoints.scheme import QuantizationScheme

__all__ = ["QuantizationScheme", "parse_config", "told_beside", "why_unread"]

_LEFT = "bitsandbytes"  # whose layers are left to that package
_READ: dict[str, Callable[[Fields], QuantizationScheme]] = {  # by quant_method
    config_groups.METHOD: config_groups.parse,
    "gptq": flat_config.parse_gptq,
    "awq": flat_config.parse_awq,
    _LEFT: lambda _: QuantizationScheme(file_format=_LEFT, version="", rules=()),
}


def parse_config(config: object) -> QuantizationScheme:
    """Read the quantization_config of a config.json; of bitsandbytes' there are no rules.

    Raises:
        ModelError: a method, version or feature that isn't read, by its field and value.
    """
    fields = Fields.of(config, WHERE)
    return _READ[fields.choice("quant_method", tuple(_READ))](fields)


def why_unread(config: object) -> str | None:
    """Why kvq does not load weights that are quantized so; None: it does."""
    try:
        parse_config(config)
    except ModelError as error:
        return str(error)
    return None


def told_beside(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's dict with the quantization_config that ModelOpt leaves in a file of its own."""
    path = folder / "hf_quant_config.json"
    if config.get("quantization_config") is not None or not path.is_file():
        return dict(config)
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        said = None
    own = said if isinstance(said, dict) else {}
    return {**config, "quantization_config": {"quant_method": "modelopt", **own}}
