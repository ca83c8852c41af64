"""Tokens by likelihood, ties by token id, the same in every batch and on every path.

Libraries leave the order of equal values open, and it changes with the width asked for. So a logit
and its token are packed into one whole number, no two of them alike, and those are sorted:

    key = rank of the logit, likeliest first (32 bits) | token id (32 bits)

On a CPU NumPy does the work: its vectorized argmax, sort and partition take a tenth of torch's time.
"""

import numpy as np
import torch
from torch import Tensor


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's highest logit and the first token that has it: [rows] fp32, [rows] int64.

    The value of a row that holds NaN is NaN. `logits` is fp32, [rows, vocab].
    """
    if logits.device.type != "cpu":
        values, tokens = logits.max(dim=-1)
        return values, tokens
    array = logits.detach().numpy()
    best = array.argmax(axis=-1)
    return torch.from_numpy(array[np.arange(len(array)), best]), torch.from_numpy(best)


def ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each row's `width` highest logits and their tokens, likeliest first.

    `logits` is fp32, [rows, vocab]; the results are fp32 and int64, [rows, width]. A smaller width
    gives the beginning of what a larger one gives. Rows that hold NaN come out in no useful order.
    """
    keys = _lowest(_pack(logits), width)
    return _unpack_logits(keys), keys & 0xFFFFFFFF


def _pack(logits: Tensor) -> Tensor:
    """Whole numbers that rise as the logit falls, and with the token id where logits are equal."""
    bits = (logits.detach() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which it equals
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count backwards; now they don't
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return rising.bitwise_not().to(torch.int64).bitwise_left_shift_(32).bitwise_or_(tokens)  # [rows, vocab]


def _unpack_logits(keys: Tensor) -> Tensor:
    rising = (keys >> 32).to(torch.int32).bitwise_not()
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _lowest(keys: Tensor, width: int) -> Tensor:
    """The `width` lowest keys of each row, rising."""
    everything = width >= keys.shape[-1]
    if keys.device.type != "cpu":
        if everything:
            return keys.sort(dim=-1).values
        return keys.topk(width, dim=-1, largest=False, sorted=True).values
    array = keys.numpy()
    if not everything:
        array = np.partition(array, width - 1, axis=-1)[:, :width]
    return torch.from_numpy(np.sort(array, axis=-1))
