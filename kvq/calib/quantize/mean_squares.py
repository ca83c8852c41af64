"""Mean squares of the inputs of a model's Linear layers over a text, as weights of rounding errors."""

import torch
from torch import Tensor, nn

from kvq.calib.quantize.settings import Progress
from kvq.calib.quantize.walk import Walk, decoder_layers
from kvq.models.loading.prepared import PreparedModel
from kvq.models.loading.weights import load_plain

_LEAST = 1e-4  # of the mean of all inputs, for inputs that were always 0


@torch.no_grad()
def mean_squares(prepared: PreparedModel, windows: list[list[int]], progress: Progress) -> dict[str, Tensor]:
    """Return the mean square of each input of the decoder layers' Linear layers, fp32 [in], by layer's name.

    Layers run one after the other in fp32, as in `quantize_model`. Experts that no token chose are left out,
    and so are those that are stacked.

    Raises:
        RequestError: activations are not finite.
    """
    model = load_plain(prepared)
    walk = Walk(model, windows, prepared.device)
    prefix, layers = decoder_layers(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        sums[name] = sums.get(name, 0) + rows.square().sum(0)
        counts[name] = counts.get(name, 0) + len(rows)

    for index, layer in enumerate(layers):
        progress(index, len(layers))
        layer.to(prepared.device, torch.float32)
        handles = [
            module.register_forward_pre_hook(
                lambda _, given, name=f"{prefix}.{index}.{own}": add(name, given[0])
            )
            for own, module in layer.named_modules()
            if isinstance(module, nn.Linear)
        ]
        walk.advance(index)
        for handle in handles:
            handle.remove()
        layer.to("meta")
    means = {name: total / counts[name] for name, total in sums.items() if counts[name]}
    return {name: mean.clamp_min(_LEAST * float(mean.mean())) for name, mean in means.items()}
