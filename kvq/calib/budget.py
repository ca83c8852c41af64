"""What `kvq tune --budget` means in bytes per token."""

import re
from contextlib import suppress

from kvq.calib.search import bytes_of_bits, recipe_bytes
from kvq.errors import ConfigError
from kvq.models.prepared import PreparedModel
from kvq.sizes import parse_bytes

_BITS = re.compile(r"([0-9]*\.?[0-9]+)\s*(bits?|b/el)?", re.IGNORECASE)


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
    with suppress(ConfigError):
        return parse_bytes(text, "--budget")
    try:
        return recipe_bytes(model.geometry, model.recipe(text))
    except ConfigError as error:
        raise ConfigError(
            f"--budget takes bits per element (4.5bits), bytes per token (900B) or a format (int4), "
            f"got {text!r}: {error}"
        ) from error
