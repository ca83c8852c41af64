"""Folders that hold no model, but a head that reads the hidden states of another: EAGLE and its like."""

import re

from kvq.errors import ConfigError
from kvq.models.checkpoint import read_json
from kvq.models.resolve import ModelSource

_HEAD = re.compile(r"eagle|medusa", re.IGNORECASE)  # in names of classes and kinds
_NAMING = ("model_type", "speculators_model_type")


def check_is_model(source: ModelSource) -> None:
    """Raise ConfigError if what is given as a draft model is such a head, by its config.json.

    Raises:
        ModelError: it has none that can be read.
    """
    config = read_json(source.folder / "config.json")
    classes = config.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    names += [str(config[key]) for key in _NAMING if key in config]
    if (name := next((name for name in names if _HEAD.search(name)), None)) is not None:
        raise ConfigError(
            f"{source} holds a {name}, a head that reads another model's hidden states and is no draft "
            f"model; transformers has no code for such heads, so kvq runs none: take the method ngram, self "
            f"or heads, or draft with a model of the same vocabulary"
        )
