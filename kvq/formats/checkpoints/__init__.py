"""Quantized checkpoints as described by config.json: layers, formats and tensor names. No tensors.

A new `quant_method` is added to `_READ`; the tensors of its file format are read by `kvq.weights.files`.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvq import strict_json
from kvq.errors import ModelError
from kvq.formats.checkpoints import config_groups, flat_config
from kvq.formats.checkpoints.fields import WHERE, Fields, shown
from kvq.formats.checkpoints.scheme import QuantizationScheme

__all__ = ["QuantizationScheme", "parse_config", "with_modelopt_config"]

_LEFT = "bitsandbytes"  # layers are left to that package
_READ: dict[str, Callable[[Fields], QuantizationScheme]] = {  # by quant_method
    config_groups.METHOD: config_groups.parse,
    "gptq": flat_config.parse_gptq,
    "awq": flat_config.parse_awq,
    _LEFT: lambda _: QuantizationScheme(file_format=_LEFT, version="", rules=[]),
}


def parse_config(config: object) -> QuantizationScheme:
    """Parse the quantization_config of a config.json; for bitsandbytes, the result has no rules.

    Raises:
        ModelError: a method, version or feature is not supported; the message names the field and its value.
    """
    fields = Fields.of(config, WHERE)
    method = fields.values.get("quant_method")
    if not isinstance(method, str) or method not in _READ:
        told = "say no quant_method" if method is None else f"are of quant_method {shown(method)}"
        raise ModelError(
            f"{WHERE}: these weights {told}, which kvq does not load; take it in 16 bits, which --weights or "
            f"`kvq quantize` round, or in {' or '.join(map(shown, _READ))}"
        )
    return _READ[method](fields)


def with_modelopt_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's dict with the quantization_config that ModelOpt writes to a separate file."""
    path, own = folder / "hf_quant_config.json", None
    if config.get("quantization_config") is not None or not path.is_file():
        return dict(config)
    with suppress(OSError, ValueError):
        own = strict_json.read(path)
    own = own if isinstance(own, dict) else {}
    return {**config, "quantization_config": {"quant_method": "modelopt", **own}}
