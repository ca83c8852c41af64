"""What a plan needs to know of a model's folder whose config.json alone does not say it."""

from pathlib import Path

from kvq.models.counted import count_module
from kvq.models.modules import build_on_meta, unquantized
from kvq.models.support import check_supported
from kvq.models.text_part import read_config
from kvq.sizing.shape import Shape


def read_shape(folder: Path) -> Shape:
    """Layers and parameters of the model in a folder, by transformers' own code for it, without numbers.

    Raises:
        ModelError: kvq does not run it; the message says why.
    """
    config = read_config(folder)
    geometry = check_supported(config, max_context=1, folder=folder)  # RoPE need not be pinned to count bytes
    counted = count_module(build_on_meta(folder, unquantized(config)))
    return Shape(config=config, geometry=geometry, parameters=counted)
