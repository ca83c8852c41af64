"""The formats by their names."""

from kvq.errors import ConfigError
from kvq.server.tools.format import ToolFormat
from kvq.server.tools.hermes import HERMES

FORMATS = {format.name: format for format in (HERMES,)}  # the first whose template it is wins


def find_format(name: str, template: str) -> ToolFormat | None:
    """The format of a name; that of a chat template for "auto", if one is recognised; None for "none".

    Raises:
        ConfigError: there is no such format.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((format for format in FORMATS.values() if format.is_template(template)), None)
    if name not in FORMATS:
        raise ConfigError(f"no tool call parser {name!r}; there are auto, none, {', '.join(FORMATS)}")
    return FORMATS[name]
