"""Linear layers on CPUs: weights in the order that is fastest, and results that don't depend on the batch.

BLAS sums the products of a few rows in another order than those of many. One differing bit can flip a
code of the KV cache, so a token's results would depend on what else is in its step. With each weight
stored by input feature (still [out, in] to everybody, transposed in memory) products are faster, by an
eighth to a third for up to 64 rows, and from two rows on all rows are summed alike, on the CPUs seen so
far. How many rows it takes is measured when a model is first run, not assumed.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

_CANDIDATES = (1, 2, 4, 8, 11, 16)  # rows; beyond 16, padding would cost more than it gives
_MANY = 48  # rows that are summed as any larger number is


def order_weights(model: nn.Module) -> None:
    """Store the weights of Linear layers by input feature, one after the other; for CPUs.

    A weight that is an embedding too stays as it is: lookups read whole rows of it.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in looked_up:
            module.weight.data = module.weight.data.t().contiguous().t()


def invariant_rows(model: nn.Module, head: nn.Module | None) -> tuple[int, int]:
    """Fewest rows of a step, and of its logits, from which on results don't depend on their number.

    `head`: the layer that makes the logits. Shapes that depend on it even at 16 rows are passed over:
    padding would not help them.
    """
    body: dict[tuple[int, ...], Tensor] = {}
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            body.setdefault((*module.weight.shape, *module.weight.stride()), module.weight)
    heads = [head.weight] if isinstance(head, nn.Linear) else []
    return _fewest(list(body.values())), _fewest(heads)


@torch.inference_mode()
def _fewest(weights: list[Tensor]) -> int:
    fewest = 1
    for weight in weights:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_MANY, weight.shape[1], generator=generator).to(weight.dtype)
        many = functional.linear(x, weight)
        same = {n for n in range(1, _MANY) if torch.equal(functional.linear(x[:n], weight), many[:n])}
        fits = [n for n in _CANDIDATES if same.issuperset(range(n, _MANY))]
        if fits:
            fewest = max(fewest, fits[0])
    return fewest
