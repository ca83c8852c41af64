"""Train a small model with multi-head latent attention, DeepSeek V3's code without experts, and see that its
latents matter.

    python -m tools.train_latent --out FOLDER

Its tokenizer is that of the embedded model, its text CPython's help topics that are not held out, or
--text. A layer keeps 128 elements of a latent and 32 that positions turn for 8 heads of 64 + 32 elements of
K and 32 of V: 160 a token in place of 1,024. Nothing in training is quantized. At the end it has to show
damage on the held-out topics, or the script fails: with the latents of other tokens in their places, with
only 64 tokens seen, and in INT2.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerBase

import kvq
from kvq.evals.text import calibration_text, default_text
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.tokenizer import load_tokenizer
from tools.train_tiny import train

CONTEXT = 2048  # tokens
SHOWN = 512  # tokens of the held-out text that damage is shown on
LEAST = {"shuffled latents": 0.5, "a window of 64 tokens": 0.05, "int2": 0.05}  # mean KL, nats


def make_model(vocab_size: int) -> DeepseekV3ForCausalLM:
    """The model with random numbers, fp32."""
    layers = 3
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=vocab_size,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=layers,
            first_k_dense_replace=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            q_lora_rank=None,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=32,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@contextmanager
def shuffled(model: DeepseekV3ForCausalLM) -> Iterator[None]:
    """Within it, every latent is another token's."""

    def shuffle(module: object, inputs: object, latents: Tensor) -> Tensor:
        order = torch.randperm(latents.shape[1], generator=torch.Generator().manual_seed(0))
        return latents[:, order]

    hooks = [layer.self_attn.kv_a_layernorm.register_forward_hook(shuffle) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def divergence(model: DeepseekV3ForCausalLM, ids: Tensor) -> float:
    """Mean KL of the model with shuffled latents from the model, in nats."""
    want = model(input_ids=ids).logits[0].log_softmax(-1)
    with shuffled(model):
        found = model(input_ids=ids).logits[0].log_softmax(-1)
    return float(functional.kl_div(found, want, log_target=True, reduction="batchmean"))


def damage(
    model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, float]:
    """Mean KL, in nats, of what must look bad, by its name."""
    text = default_text().text
    ids = torch.tensor([tokenizer(text)["input_ids"][:SHOWN]])
    rows = kvq.perplexity(
        str(folder), kv=["fp32", "int2"], text=text, context=SHOWN, max_windows=8, instrument=True
    )
    seen: dict[str, Any] = {row["instrument"]: row["kl_mean"] for row in rows}
    return {
        "shuffled latents": divergence(model, ids),
        "a window of 64 tokens": seen["window"],
        "int2": seen["int2"],
    }


def main() -> None:
    """Train it, write a Hugging Face folder in bf16, and check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=20, help="the time that it takes")
    parser.add_argument("--text", type=Path, help="UTF-8 text to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = calibration_text().text if args.text is None else args.text.read_text(encoding="utf8")
    tokenizer = load_tokenizer(EMBEDDED["tiny"])
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32)
    model = make_model(len(tokenizer))
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {len(ids):,} tokens of text, {torch.get_num_threads()} threads", flush=True)
    options = {
        "seq": SHOWN,
        "batch": 4,
        "repeats": 1,
        "lr": 4e-3,
        "lr_muon": 4e-3,
        "seed": args.seed,
        "bf16": args.bf16,
    }
    train(model, ids, minutes=args.minutes, **options)
    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    found = damage(model.float(), tokenizer, args.out)
    for name, kl in found.items():
        print(f"{name}: mean KL {kl:.3f}, at least {LEAST[name]} wanted")
    if any(found[name] < least for name, least in LEAST.items()):
        raise SystemExit("this model can't show damage to its latents: train it longer, or on more text")


if __name__ == "__main__":
    main()
