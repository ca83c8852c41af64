"""One forward pass over a packed batch, as the attention of every layer sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from kvq.cache.backend import CacheBackend
from kvq.geometry import ModelGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.models.weights import LoadedWeights

Observer = Callable[[int, Tensor, Tensor], None]  # (layer, K, V), both [tokens, kv_heads, dim]


@dataclass(kw_only=True, slots=True, eq=False)
class PackedStep:
    """What the registered attention function needs; passed through the model as a keyword."""

    cache: CacheBackend
    geometry: ModelGeometry
    batches: tuple[SequenceBatch, ...]  # per layer group
    bad_tokens: Tensor  # bool [tokens]; set where K or V was not finite
    window_limit: int | None = None  # shortens every layer's window, to see what context is worth
    observer: Observer | None = None
    attention_s: float = 0.0  # time in `attend` so far; on a GPU the time to launch it

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Write the new tokens of one layer, then attend from them.

        `q`: [rows, q_heads, k_head_dim]; `k`, `v`: [rows, kv_heads, dim]. Rows past the step's
        tokens are padding: not written, and zero in the result, [rows, q_heads, v_head_dim].
        """
        began = perf_counter()
        rows, tokens = q.shape[0], self.bad_tokens.shape[0]
        q, k, v = q[:tokens], k[:tokens], v[:tokens]
        if self.observer is not None:
            self.observer(layer, k, v)
        batch = self.batches[self.cache.group_of[layer]]
        self.bad_tokens |= self.cache.write(layer, k, v, batch.slots)
        options = options.within(self.geometry.layers[layer].window).within(self.window_limit)
        out, _ = self.cache.attend(layer, q, batch, options)
        if rows > tokens:
            out = functional.pad(out, (0, 0, 0, 0, 0, rows - tokens))
        self.attention_s += perf_counter() - began
        return out


Integers = npt.NDArray[np.int64]


def positions_of(counts: Sequence[int], ends: Sequence[int]) -> Integers:
    """int64 [tokens]: where each of `counts` new tokens lies in its sequence, which then ends at `ends`."""
    new, last = np.array(counts), np.array(ends)
    before = np.cumsum(new) - new  # new tokens of the sequences packed before
    first: Integers = np.repeat(last - new - before, new)
    return first + np.arange(len(first))


def run_packed(
    weights: LoadedWeights,
    step: PackedStep,
    tokens: Sequence[int] | Tensor,
    positions: Integers,
    wanted: Sequence[int],
) -> Tensor:
    """Layer by layer write, then attend; then logits of the `wanted` rows, [len(wanted), vocab].

    `tokens`: one id per position, as int64 [tokens] on the device where only the device knows them. Rows are
    padded where results would depend on their number else.
    """
    rows, device = weights.step_rows(len(positions)), weights.device
    output = weights.model(
        input_ids=padded(tokens, rows, device)[None],
        position_ids=padded(positions, rows, device)[None],
        use_cache=False,
        logits_to_keep=padded(wanted, weights.logit_rows(len(wanted)), device),
        kvq_step=step,
    )
    logits: Tensor = output.logits[0, : len(wanted)]
    return logits


def padded(values: Sequence[int] | Integers | Tensor, rows: int, device: torch.device) -> Tensor:
    """int64 [rows] on the device: the values, then zeros; on a GPU through pinned memory, without waiting."""
    if isinstance(values, Tensor):
        return functional.pad(values, (0, rows - len(values)))
    whole = np.zeros(rows, dtype=np.int64)
    whole[: len(values)] = values
    host = torch.from_numpy(whole)
    host = host.pin_memory() if device.type == "cuda" else host
    return host.to(device, non_blocking=True)
