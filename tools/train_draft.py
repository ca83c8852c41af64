"""Train a small Llama that drafts for a teacher: same tokenizer, the teacher's own probabilities as targets.

    python -m tools.train_draft --text corpus.txt.gz --out kvq/models/tiny_draft --minutes 15 --bf16

It learns on texts that the teacher went on with, since those are what a draft is asked about, and on the
plain text. A draft token is accepted with probability sum(min(p, q)) over the vocabulary, p the teacher's
probabilities and q the draft's (Leviathan et al., "Fast inference from transformers via speculative
decoding", 2023, theorem 3.5). The loss is KL(p || q), and the rejected share, 1 - sum(min(p, q)).
At the end the accepted share is measured on texts whose prompts were held out.
"""

import argparse
import gzip
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvq
from kvq.evals.text import default_text
from kvq.models.describe.resolve import resolve_model
from kvq.models.loading.tokenizer import load_tokenizer
from tools.train_tiny import train

SEQUENCE = 512  # tokens of a text, its prompt among them
PROMPT = 32  # tokens
HELD_OUT = 50  # of so many pieces of the text one is left out of training
MEASURED = 64  # texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """Quality of a draft model: how well it predicts its teacher, at temperature 1."""

    accepted: float  # the mean of sum(min(p, q))
    same_choice: float  # the share of positions whose most likely token is the same
    positions: int

    def __str__(self) -> str:
        """One line."""
        return (
            f"accepted {self.accepted:.4f}, the same most likely token {self.same_choice:.4f}, "
            f"{self.positions:,} positions"
        )


def read_text(path: Path) -> str:
    """A UTF-8 text, which may be compressed by gzip."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def make_draft(
    teacher: PreTrainedModel, *, hidden: int, layers: int, heads: int, ffn: int
) -> LlamaForCausalLM:
    """A draft with random layers, fp32; its embeddings are the teacher's along their main axes."""
    config = teacher.config
    draft = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )
    rows = teacher.get_input_embeddings().weight.detach().float()  # [vocab, the teacher's hidden size]
    axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh[:hidden]
    draft.get_input_embeddings().weight.data.copy_(rows @ axes.T)
    return draft


def sample(folder: Path, prompts: Tensor, seed: int) -> Tensor:
    """Prompts, [texts, PROMPT], gone on with by the teacher at temperature 1: int32 [texts, SEQUENCE]."""
    asked = [
        kvq.SamplingParams(max_tokens=SEQUENCE - PROMPT, temperature=1.0, ignore_eos=True, seed=seed + i)
        for i in range(len(prompts))
    ]
    with kvq.LLM(folder, kv="fp32", dtype="fp32", max_num_seqs=128, kv_memory="2GiB") as llm:
        results = llm.generate(prompts.tolist(), asked)
    return torch.tensor([[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in results], dtype=torch.int32)


def sampled_texts(
    folder: Path, prompts: dict[str, Tensor], *, kept: Path | None, seed: int
) -> dict[str, Tensor]:
    """Sample the teacher's texts from prompts of several kinds, or read the file `kept` if it exists."""
    if kept is not None and kept.is_file():
        return load_file(kept)
    start = time.time()
    texts = {
        name: sample(folder, those, seed + 1_000_000 * i) for i, (name, those) in enumerate(prompts.items())
    }
    print(f"sampled {sum(map(len, texts.values())):,} texts in {time.time() - start:.0f} s", flush=True)
    if kept is not None:
        save_file(texts, kept)
    return texts


def spread(pieces: Tensor) -> Tensor:
    """Return the pieces to measure on, spread from the first to the last."""
    return pieces[torch.linspace(0, len(pieces) - 1, min(MEASURED, len(pieces))).long()]


def mix(sampled: Tensor, learned: Tensor, *, share: float) -> Tensor:
    """Token ids of which sampled texts, said again and again, have a share: int32 [tokens]."""
    times = max(1, round(share / (1 - share) * learned.numel() / sampled.numel()))
    return torch.cat([sampled.flatten().repeat(times), learned.flatten()])


def divergence(teacher: Tensor, draft: Tensor, rejected: float) -> Tensor:
    """Return the training loss of a draft from both logits, [batch, seq, vocab]: a mean over positions.

    The teacher's cross-entropy, KL(p || q) and an entropy that no draft changes, and `rejected` times
    the share of draft tokens that would be rejected.
    """
    p, log_q = teacher.float().softmax(-1), draft.float().log_softmax(-1)
    kept = torch.minimum(p, log_q.exp()).sum(-1)
    return (rejected * (1 - kept) - (p * log_q).sum(-1)).mean()


def distillation(
    draft: PreTrainedModel, teacher: PreTrainedModel, *, rejected: float
) -> Callable[[Tensor], Tensor]:
    """The loss of a batch of ids; compiled, since passes over the vocabulary would take most of the time."""
    compiled = torch.compile(divergence)
    run_teacher, run_draft = teacher, draft

    def loss_of(ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = run_teacher(input_ids=ids, use_cache=False).logits
        return compiled(wanted, run_draft(input_ids=ids, use_cache=False).logits, rejected)

    return loss_of


@torch.inference_mode()
def measure(draft: PreTrainedModel, teacher: PreTrainedModel, texts: Tensor) -> Drafting:
    """Measure how well the draft predicts the teacher's samples after prompts of texts, [texts, length]."""
    accepted, same, positions = 0.0, 0, 0
    for ids in texts.long().split(4):
        p, q = (m(input_ids=ids).logits[:, PROMPT - 1 : -1].float().softmax(-1) for m in (teacher, draft))
        accepted += float(torch.minimum(p, q).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        positions += p.shape[0] * p.shape[1]
    return Drafting(accepted=accepted / positions, same_choice=same / positions, positions=positions)


def main() -> None:  # D220: distilled on texts of its teacher
    """Sample texts from the teacher, train the draft, write a Hugging Face folder in bf16, and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, or that in a .gz")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, without a tokenizer")
    parser.add_argument("--teacher", default="tiny", help="a folder, a hub name, or 'tiny'")
    parser.add_argument("--minutes", type=float, default=15, help="the time that training takes")
    parser.add_argument("--samples", type=int, default=2560, help="texts that the teacher goes on with")
    parser.add_argument(
        "--sampled", type=Path, help="a .safetensors with them: written, or read if it is there"
    )
    parser.add_argument("--share", type=float, default=0.7, help="of what is learned, the share they have")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--heads", type=int, default=2, help="query heads of 64 elements; there is one KV head"
    )
    parser.add_argument("--ffn", type=int, default=192)
    parser.add_argument("--rejected", type=float, default=1.0, help="weight of the rejected share beside KL")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3, help="embeddings and norms (AdamW)")
    parser.add_argument("--lr-muon", type=float, default=5e-3, help="matrices (Muon)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    folder = resolve_model(args.teacher).folder
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor(tokenizer(read_text(args.text))["input_ids"], dtype=torch.int32)
    pieces = ids[: len(ids) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    is_held_out = torch.arange(len(pieces)) % HELD_OUT == 0
    learned = pieces[~is_held_out]
    topics = torch.tensor(tokenizer(default_text().text)["input_ids"], dtype=torch.int32)
    texts = sampled_texts(
        folder,
        {
            "learned": learned[torch.randperm(len(learned))[: args.samples], :PROMPT],
            "the text": spread(pieces[is_held_out])[:, :PROMPT],
            "help topics": spread(topics[: len(topics) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE))[
                :, :PROMPT
            ],
        },
        kept=args.sampled,
        seed=args.seed,
    )
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft = make_draft(teacher, hidden=args.hidden, layers=args.layers, heads=args.heads, ffn=args.ffn)
    count = sum(p.numel() for p in draft.parameters())
    print(f"{count:,} parameters, {len(ids):,} tokens of text, {torch.get_num_threads()} threads", flush=True)
    train(
        draft,
        mix(texts["learned"], learned, share=args.share),
        minutes=args.minutes,
        seq=SEQUENCE,
        batch=args.batch,
        lr=args.lr,
        lr_muon=args.lr_muon,
        seed=args.seed,
        bf16=args.bf16,
        loss_of=distillation(draft, teacher, rejected=args.rejected),
    )
    draft.eval().to(torch.bfloat16).save_pretrained(args.out)
    draft = draft.float()
    for name in ("the text", "help topics"):
        print(f"prompts of {name}, held out: {measure(draft, teacher, texts[name])}", flush=True)


if __name__ == "__main__":
    main()
