"""Models with random weights, created on the device, since step costs depend on shapes and not on values."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvq.cache.memory import held_bytes
from kvq.layout import BLOCK_SIZE, BlockOrder
from kvq.models import Model
from kvq.models.describe.modules import build_random, quiet_logs
from kvq.models.describe.resolve import EMBEDDED, ModelSource
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.weights import settle
from kvq.models.model import probe_layers
from kvq.models.observe.support import check_supported
from kvq.models.parts.device import pick_dtype
from kvq.models.prove.proof import prove

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def random_model(  # D153: random weights, created on the device
    config: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    *,
    backend: str = "auto",
    stored: bool = False,
) -> Model:
    """Return a model with the shapes in `config` (from a config.json) and the embedded model's tokenizer.

    The files of a model folder are written to `folder`. The weights are included if `stored` is set, for
    rivals that read them, and always on a CPU, where the engine reads some of them. As with any model, kvq's
    results are first compared with the results of the model's own code.

    Raises:
        ModelError: kvq does not run the model's family, or runs it incorrectly.
    """
    torch.manual_seed(0)
    before = held_bytes(device)
    dtype = pick_dtype("auto", device, config)
    module = build_random(config, dtype, device)
    folder.mkdir(parents=True, exist_ok=True)
    if stored or device.type == "cpu":
        with quiet_logs("transformers"):
            module.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    for name in _TOKENIZER:
        shutil.copy(EMBEDDED["tiny"] / name, folder / name)
    geometry = check_supported(config, max_context=None, folder=folder)
    geometry = geometry.computed_in(str(dtype).removeprefix("torch."))
    prepared = PreparedModel(
        source=ModelSource(folder=folder.resolve(), name=folder.name),
        config=config,
        geometry=geometry,
        entries=(),
        device=device,
        dtype=dtype,
        rounded_to=None,
        max_context=geometry.max_context,
        block_size=BLOCK_SIZE,
        order=BlockOrder.LAYER_MAJOR,
        backend=backend,
        cache="kvq",
    )
    prove(prepared)
    weights = settle(prepared, module, before)
    probe_layers(weights)
    return Model(weights, prepared.recipe("auto"))
