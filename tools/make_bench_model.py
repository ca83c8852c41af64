"""Write a random model for benchmarks, seed 0: of benchmarks/engine.py a Llama of 78.7 M parameters.

    python tools/make_bench_model.py --out FOLDER [--experts]

12 layers, hidden size 768, 12 query and 4 KV heads of 64, a context of 16,384 tokens, and the tokenizer of
the embedded model. With `--experts` a Mixtral of 371 M parameters: 4 layers, hidden size 1,024, 8 experts of
3,584, as wide for their hidden size as those of Mixtral 8x7B, of which a token takes 2. Texts mean nothing;
steps cost what those of a trained model cost.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

TINY = Path(__file__).parents[1] / "kvq" / "models" / "tiny"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_model() -> LlamaForCausalLM:
    """The model, fp32; the same weights every time."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_mixture() -> MixtralForCausalLM:
    """The one with experts, fp32; the same weights every time."""
    config = MixtralConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


def main() -> None:
    """Make it, save it, and copy the tokenizer beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--experts", action="store_true", help="the Mixtral in place of the Llama")
    given = parser.parse_args()
    out: Path = given.out
    model = make_mixture() if given.experts else make_model()
    model.save_pretrained(out)
    for name in TOKENIZER:
        shutil.copy(TINY / name, out / name)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters written to {out}")


if __name__ == "__main__":
    main()
