"""What `kvq tune --budget` means in bytes per token."""

import re

from kvq.calib.search import bytes_of_bits, recipe_bytes
from kvq.errors import ConfigError
from kvq.models.prepared import PreparedModel

_BITS = re.compile(r"([0-9]{0,18}\.?[0-9]{1,18})\s*(bits?|b/el)?", re.IGNORECASE)
_BYTES = re.compile(r"([0-9]{0,18}\.?[0-9]{1,18})\s*(B|KB|KiB|bytes)", re.IGNORECASE)
_UNITS = {"b": 1, "bytes": 1, "kb": 1000, "kib": 1024}


def parse_budget(model: PreparedModel, text: str) -> int:
    """Bytes per token of a budget: bits per element (`4.5bits`), bytes per token (`900B`) or a format.

    Raises:
        ConfigError: none of these.
    """
    text = text.strip()
    if match := _BITS.fullmatch(text):
        bits = float(match[1])
        if not 0 < bits <= 32:
            raise ConfigError(
                f"--budget is {bits:g} bits per element; give 2 to 32, or a format such as int4"
            )
        return bytes_of_bits(model.geometry, bits)
    if match := _BYTES.fullmatch(text):
        return int(float(match[1]) * _UNITS[match[2].lower()])
    try:
        return recipe_bytes(model.geometry, model.recipe(text))
    except ConfigError as error:
        raise ConfigError(
            f"--budget takes bits per element (4.5bits), bytes per token (900B) or a format (int4), "
            f"got {text!r}: {error}"
        ) from error
