"""Registry of tool-call formats, keyed by name."""

from kvq.errors import ConfigError
from kvq.server.tools.format import ToolFormat
from kvq.server.tools.formats.deepseek_v3 import DEEPSEEK_V3
from kvq.server.tools.formats.hermes import HERMES
from kvq.server.tools.formats.llama3_json import LLAMA3_JSON
from kvq.server.tools.formats.mistral import MISTRAL
from kvq.server.tools.formats.pythonic import PYTHONIC
from kvq.server.tools.formats.qwen3_coder import QWEN3_CODER

_ALL = (HERMES, QWEN3_CODER, MISTRAL, DEEPSEEK_V3, PYTHONIC, LLAMA3_JSON)
FORMATS = {format.name: format for format in _ALL}  # the first format that matches a template wins


def find_format(name: str, template: str) -> ToolFormat | None:
    """Return the format called `name`; for "auto", return the format of the chat template, or None.

    Raises:
        ConfigError: the format is unknown.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((format for format in FORMATS.values() if format.is_template(template)), None)
    if name not in FORMATS:
        raise ConfigError(f"no tool call parser {name!r}; there are auto, none, {', '.join(FORMATS)}")
    return FORMATS[name]
