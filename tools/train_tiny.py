"""Train the small Llama-architecture model that ships as `tiny`, from plain English text.

    python tools/train_tiny.py --text corpus.txt --out kvq/models/tiny --minutes 75

Writes a Hugging Face model folder (config.json, model.safetensors, tokenizer files):
LlamaForCausalLM, grouped-query attention, head_dim 64, rotary embeddings, tied embeddings.
CPU is enough; a GPU is used when there is one. `--bf16` runs the matrix products in bfloat16,
which is several times faster on GPUs and on CPUs with AMX or AVX512-BF16, and slower elsewhere.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>\n{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix by five Newton-Schulz steps, in fp32
    unless `bf16` (torch.optim.Muon is always bf16, which CPUs without bf16 units do very slowly).
    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024."""

    def __init__(self, params, lr, momentum, weight_decay, bf16=False):
        self.compute_dtype = torch.bfloat16 if bf16 else torch.float32
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(m, group["momentum"])
                if x.shape[0] > x.shape[1]:
                    x = x.T
                x = (x / (x.norm() + 1e-7)).to(self.compute_dtype)
                for _ in range(5):
                    g = x @ x.T
                    x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
                if p.shape[0] > p.shape[1]:
                    x = x.T
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x.to(p.dtype), alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(text.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def train(model, ids, *, minutes, seq, batch, lr, lr_muon, seed, bf16, repeats=0, loss_of=None) -> None:
    """Train a model on int32 token ids for some minutes, Muon for its matrices and AdamW for the rest.

    `repeats`: of a batch's sequences, how many say their first half twice, which teaches to look far back.
    `loss_of`: makes the loss of a batch of ids, [batch, seq], where it isn't that of the next tokens.
    """
    dev = next(model.parameters()).device
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=lr_muon, momentum=0.95, weight_decay=0.05, bf16=bf16),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for opt in optimizers:
        for g in opt.param_groups:
            g["peak"] = g["lr"]
    start, budget, step, ema = time.time(), minutes * 60, 0, None
    gen = torch.Generator().manual_seed(seed)
    while (done := (time.time() - start) / budget) < 1:
        warm = min(1.0, (step + 1) / 50)
        scale = warm * min(1.0, 0.02 + (1 - done) / 0.4)  # constant, then linear decay over the last 40%
        for opt in optimizers:
            for g in opt.param_groups:
                g["lr"] = g["peak"] * scale
        at = torch.randint(0, len(ids) - seq - 1, (batch,), generator=gen)
        x = torch.stack([ids[i : i + seq] for i in at]).long().to(dev)
        x[:repeats, seq // 2 :] = x[:repeats, : seq // 2]
        with torch.autocast(dev.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=x, labels=x).loss if loss_of is None else loss_of(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        ema = loss.item() if ema is None else 0.98 * ema + 0.02 * loss.item()
        if step % 50 == 0:
            speed = step * seq * batch / (time.time() - start)
            print(f"step {step} done {done:.1%} loss {ema:.3f}, {speed:.0f} tok/s", flush=True)
    print(f"trained for {step} steps, loss {ema:.3f}")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--text", required=True)
    p.add_argument("--out", default=".")
    p.add_argument("--minutes", type=float, default=80)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--ffn", type=int, default=768)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3, help="embeddings and norms (AdamW)")
    p.add_argument("--lr-muon", type=float, default=3e-3, help="matrices (Muon)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    a = p.parse_args()

    torch.manual_seed(a.seed)
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    out = Path(a.out)
    text = Path(a.text).read_text(encoding="utf8")
    tok = train_tokenizer(text, a.vocab)
    tok.save_pretrained(out)
    ids = torch.tensor(tok(text, return_attention_mask=False)["input_ids"], dtype=torch.int32)
    print(f"{len(ids) / 1e6:.2f} M tokens, {len(text.encode()) / len(ids):.2f} bytes/token", flush=True)

    cfg = LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.ffn, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )
    model = LlamaForCausalLM(cfg).to(dev)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {dev}", flush=True)
    train(
        model, ids, minutes=a.minutes, seq=a.seq, batch=a.batch, lr=a.lr, lr_muon=a.lr_muon, seed=a.seed, bf16=a.bf16
    )
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main()
