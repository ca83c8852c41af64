"""How many rows of logits are worked on at once."""

from collections.abc import Iterator

import torch

# Elements. On a CPU the copies of a chunk stay in its cache, which halves the time; elsewhere larger
# chunks mean fewer launches, and 64 MiB of fp32 bounds what 256 rows over a vocabulary of 128k take.
_CPU_ELEMENTS = 1 << 18
_DEVICE_ELEMENTS = 1 << 24


def chunks(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Split `num_rows` rows into slices whose temporary copies stay small. Rows never affect each other."""
    elements = _CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
    step = max(1, elements // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
