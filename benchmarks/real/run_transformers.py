"""transformers' QuantizedCache over windows of tokens, beside its own unquantized cache; `rivals.py` runs it.

Reads JSON from stdin: `model`, a folder; `windows`, lists of token ids of one length; `backend` and `bits`;
`prefill`, tokens that go in at once. Writes JSON of figures a token, [windows, tokens after the prefill].
It runs with packages in its path that kvq's environment lacks, so it imports nothing of the repository.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, QuantizedCache
from transformers.cache_utils import QuantizedLayer

AXES = {"quanto": 0, "hqq": 1}  # that transformers' documentation recommends
GROUP = 64  # elements
STEP = 8  # tokens that go in together; they see each other unquantized, as recent ones do anyway
RECENT = 128  # tokens that stay unquantized at most; both are the cache's own defaults


def cache_of(config: Any, backend: str, bits: int) -> QuantizedCache:
    """An empty cache."""
    axis = AXES[backend]
    return QuantizedCache(
        backend,
        config,
        nbits=bits,
        axis_key=axis,
        axis_value=axis,
        q_group_size=GROUP,
        residual_length=RECENT,
    )


@torch.inference_mode()
def figures(model: Any, windows: Tensor, cache: Any, prefill: int, told: Any) -> dict[str, Any]:
    """Feed windows in small steps, as they would be generated, and see what each token's logits are."""
    exact = model.model(windows).last_hidden_state  # [windows, tokens, hidden]: unquantized, all at once
    model(windows[:, :prefill], past_key_values=cache, logits_to_keep=1)
    found: dict[str, list[Tensor]] = {"nll": [], "exact_nll": [], "kl": [], "top1": []}
    for at in range(prefill, windows.shape[1] - 1, STEP):
        step = slice(at, min(at + STEP, windows.shape[1] - 1))
        own = model(windows[:, step], past_key_values=cache).logits.float().log_softmax(-1)
        wanted = model.lm_head(exact[:, step]).float().log_softmax(-1)
        target = windows[:, step.start + 1 : step.stop + 1, None]
        found["nll"].append(-own.gather(-1, target)[..., 0])
        found["exact_nll"].append(-wanted.gather(-1, target)[..., 0])
        found["kl"].append((wanted.exp() * (wanted - own)).sum(-1))
        found["top1"].append((wanted.argmax(-1) == own.argmax(-1)).float())
        told(at, windows.shape[1])
    return {name: torch.cat(values, dim=1).tolist() for name, values in found.items()}


def sizes(cache: Any) -> dict[str, float]:
    """Bits per element of what is quantized, and of all that is held.

    Numbers that are no codes count two bytes, as a model in bf16 would hold them.
    """
    quantized, codes, recent, others = 0, 0, 0, 0  # bytes, elements; bytes, elements
    for layer in cache.layers:
        assert isinstance(layer, QuantizedLayer)
        for held, young in ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values)):
            quantized += sum(map(_bytes, _tensors(held)))
            codes += layer._dequantize(held).numel()
            recent += _bytes(young)
            others += young.numel()
    return {
        "bits_per_element": 8 * quantized / codes,
        "bits_held": 8 * (quantized + recent) / (codes + others),
    }


def _bytes(tensor: Tensor) -> int:
    return 2 * tensor.numel() if tensor.is_floating_point() else tensor.nbytes


def _tensors(held: Any) -> Any:
    """Yield the tensors of a quantized tensor: quanto keeps attributes, HQQ a pair of codes and the rest."""
    if hasattr(held, "_data"):
        yield from (held._data._data, held._scale, held._shift)
        return
    codes, meta = held
    yield codes
    yield from (value for value in meta.values() if isinstance(value, Tensor))


def main() -> None:
    """One measurement."""
    asked = json.loads(sys.stdin.read())
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    cache = cache_of(model.config, asked["backend"], asked["bits"])

    def told(done: int, total: int) -> None:
        print(f"{done} {total}", file=sys.stderr, flush=True)

    found = figures(model, torch.tensor(asked["windows"]), cache, asked["prefill"], told)
    json.dump(found | sizes(cache), sys.stdout)


if __name__ == "__main__":
    main()
