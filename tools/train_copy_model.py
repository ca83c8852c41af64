"""Train a small Llama that finds and copies: records read long ago, answered when their key comes again.

    python tools/train_copy_model.py --out FOLDER

The model has two layers, a context of 4,096 tokens, and no language: it says what followed a key the
last time, from however far away, which is what a KV cache is for. It is trained on stretches of
CPython's help topics (those that are not held out) with random records in them, each of which comes
twice; the loss is on the second value. Its first weights are near a circuit that copies, because
finding one from noise takes longer than all the rest. Nothing in training is quantized. It takes about
eleven minutes on one core (OMP_NUM_THREADS=1) of an AMD EPYC.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvq.evals.text import calibration_text, default_text

CONTEXT = 4096  # tokens
VOCAB = 1024
END = "<|endoftext|>"
SPREAD = 0.15  # standard deviation of the embeddings at first
SHARPNESS = 60.0  # score of the token that a head of the first layer looks back to, at first
PARTS = 4  # of the residual stream, at first
IGNORED = -100  # a label without loss
Batch = tuple[Tensor, Tensor]  # token ids and labels, int64 [sequences, tokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Steps over sequences of one length."""

    length: int  # tokens
    sequences: int  # per step
    steps: int
    filled: float = 0.05  # the least share of a sequence that is records


PHASES = (  # nearly all at full length: over shorter ones, what is learnt of long distances is little
    Phase(length=256, sequences=16, steps=40, filled=0.2),
    Phase(length=CONTEXT, sequences=1, steps=300),
    Phase(length=CONTEXT, sequences=2, steps=150),
)


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def make_model() -> LlamaForCausalLM:
    """The model near a circuit that copies, fp32.

    RoPE's base is so large that half of a head's dimensions hardly turn over the whole context: they
    compare contents at any distance, while the others tell neighbours apart.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    begin_near_copying(model)
    return model


@torch.no_grad()
def begin_near_copying(model: LlamaForCausalLM) -> None:  # D37
    """Add to random weights a rough circuit that copies; all of it is trained from there.

    The residual stream has four parts of equal width: a token, and those one, two and three before it,
    which heads 0 to 2 of the first layer bring there. The second layer compares the first three parts
    with the last three of every token before, and copies that token. Column 0 of the embeddings is a
    constant that positions are made from.
    Source: Olsson et al., "In-context learning and induction heads", 2022, for the circuit;
    Trockman and Kolter, "Mimetic initialization of self-attention layers", 2023, for beginning there.
    """
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    half, width = dim // 2, config.hidden_size // PARTS
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # radians per token
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=SPREAD)
    embedding[:, width:] *= 0.1
    embedding[:, 0] = 3 * SPREAD
    first, second = (layer.self_attn for layer in model.model.layers)
    for weight in (*first.parameters(), *second.parameters()):
        weight *= 0.1  # or it would drown what is added

    fast = angles > 0.05  # few turns would not tell neighbours apart
    constant = 3 / (8 / width + 1) ** 0.5 * PARTS**0.5  # column 0 after the norm
    strength = fast * (SHARPNESS * dim**0.5 / fast.sum()) ** 0.5 / constant
    first.k_proj.weight.view(kv_heads, 2, half, -1)[:, 0, :, 0] = strength
    for head, query in enumerate(first.q_proj.weight.view(heads, 2, half, -1)):
        query[0, :, 0] = strength * torch.cos(angles * (head + 1))
        query[1, :, 0] = -strength * torch.sin(angles * (head + 1))
    token = torch.eye(width)
    token[0, 0] = 0
    for layer in (first, second):
        layer.v_proj.weight.view(kv_heads, dim, -1)[:, :width, :width] += token
    for back in range(1, PARTS):
        brings = first.o_proj.weight.view(-1, heads, dim)[:, back - 1, :width]
        brings[back * width : (back + 1) * width] += 0.6 * SPREAD * token
    second.o_proj.weight.view(-1, heads, dim)[:width, :, :width] += SPREAD * token[:, None]

    slow = torch.nonzero((angles * CONTEXT < 1).repeat(2))[:, 0]  # dimensions that compare at any distance
    for back, weight in enumerate((1.7, 1.4, 1.2)):
        for group in range(kv_heads):
            match = weight * torch.nn.init.orthogonal_(torch.empty(len(slow), width))
            queries = second.q_proj.weight.view(kv_heads, heads // kv_heads, dim, -1)[group]
            queries[:, slow, back * width : (back + 1) * width] += match
            keys = second.k_proj.weight.view(kv_heads, dim, -1)[group]
            keys[slow, (back + 1) * width : (back + 2) * width] += match


class Records:
    """Sequences of text with random records in them, each of which comes twice."""

    def __init__(self, text: list[int], seed: int) -> None:
        """`text`: token ids of the text that the records stand in."""
        self._text = np.array(text, dtype=np.int64)
        self._rng = np.random.default_rng(seed)

    def batch(self, phase: Phase) -> Batch:
        """Draw the sequences of one step."""
        rows = [self._sequence(phase.length, phase.filled) for _ in range(phase.sequences)]
        ids, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return ids, labels

    def _sequence(self, length: int, filled: float) -> tuple[np.ndarray, np.ndarray]:
        """Records of one shape in random order over a text: ids and labels, int64 [length].

        A record is `before`, which all records share, its key, `between`, which all share, its value.
        """
        rng = self._rng
        before, between = self._shared(int(rng.integers(0, 6))), self._shared(int(rng.integers(0, 3)))
        values, keys = self._alphabet(fewest=10), self._alphabet(fewest=40)
        key_size, value_size = int(rng.integers(1, 4)), int(rng.integers(2, 11))
        size = len(before) + key_size + len(between) + value_size
        room = length * np.exp(rng.uniform(np.log(filled), np.log(0.9)))
        unambiguous = (
            len(values) ** 2 // value_size
        )  # records; with more, a value's own start names it no more
        count = max(1, min(int(room / (2 * size)), unambiguous))
        records = [
            np.concatenate([before, key, between, rng.choice(values, value_size)])
            for key in {tuple(rng.choice(keys, key_size)) for _ in range(count)}
        ]
        order = rng.permutation(np.repeat(np.arange(len(records)), 2))
        places = np.sort(rng.integers(0, length - len(order) * size + 1, len(order)))
        start = int(rng.integers(0, len(self._text) - length))
        ids = self._text[start : start + length].copy()
        labels = np.full(length, IGNORED, dtype=np.int64)
        seen: set[int] = set()
        for end, record in zip(places + size * np.arange(1, len(order) + 1), order, strict=True):
            ids[end - size : end] = records[record]
            if record in seen:
                labels[end - value_size : end] = records[record][-value_size:]
            seen.add(int(record))
        return ids, labels

    def _alphabet(self, *, fewest: int) -> np.ndarray:
        """Token ids to draw from: all, some at random, or those of a piece of text."""
        rng = self._rng
        every = np.arange(1, VOCAB)
        kind, size = rng.random(), int(np.exp(rng.uniform(np.log(fewest), np.log(VOCAB))))
        if kind < 0.4:
            return every
        if kind < 0.7:
            return rng.choice(every, size, replace=False)
        found = np.unique(self._piece(4 * size))
        return rng.choice(found, min(size, len(found)), replace=False)

    def _shared(self, count: int) -> np.ndarray:
        """Ids that all records of a sequence have in common: random ones, or a piece of text."""
        return self._piece(count) if self._rng.random() < 0.5 else self._rng.integers(1, VOCAB, count)

    def _piece(self, count: int) -> np.ndarray:
        at = int(self._rng.integers(0, len(self._text) - count))
        return self._text[at : at + count]


def answers(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where a label is wanted, fp32 [labels, vocab], and those labels."""
    ids, labels = batch
    wanted = labels[:, 1:] != IGNORED
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    return model.lm_head(hidden[wanted]), labels[:, 1:][wanted]


@torch.inference_mode()
def retrieval(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    """Share of records whose value is said without an error."""
    wrong, first = [], []
    for ids, labels in batches:
        logits, expected = answers(model, (ids, labels))
        wanted = labels != IGNORED
        wrong.append(logits.argmax(-1) != expected)
        first.append((wanted & ~wanted.roll(1, 1))[wanted])
    record = torch.cat(first).cumsum(0) - 1
    mistakes = torch.bincount(record, weights=torch.cat(wrong).double())
    return float((mistakes == 0).double().mean())


def rates(peak: float) -> Iterator[float]:
    """The learning rate of every step: warm-up, then even, then falling over the last phase."""
    total, last = sum(phase.steps for phase in PHASES), PHASES[-1].steps
    for step in range(total):
        yield peak * min(1.0, (step + 1) / 40, 0.05 + 0.95 * (total - step) / last)


def train(model: LlamaForCausalLM, data: Records, held_out: Records, *, peak: float, budget_s: float) -> None:
    """Go through the phases, or as far as the budget of time allows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    exam = [held_out.batch(Phase(length=CONTEXT, sequences=1, steps=1)) for _ in range(4)]
    start, losses = time.perf_counter(), []
    steps = [phase for phase in PHASES for _ in range(phase.steps)]
    for step, (phase, rate) in enumerate(zip(steps, rates(peak), strict=True), start=1):
        optimizer.param_groups[0]["lr"] = rate
        logits, labels = answers(model, data.batch(phase))
        loss = cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        spent = time.perf_counter() - start
        if step % 25 == 0 or step == len(steps) or spent > budget_s:
            found = retrieval(model, exam)
            print(
                f"{spent:4.0f} s  step {step}/{len(steps)}  length {phase.length}  "
                f"loss {np.mean(losses[-25:]):.3f}  records of held-out text at {CONTEXT} right: {found:.1%}",
                flush=True,
            )
        if spent > budget_s:
            print(f"stopped after {step} steps: the time is over")
            return


def main() -> None:
    """Train it and write a Hugging Face folder, in bf16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--minutes", type=float, default=14, help="the most time it may take")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = calibration_text().text
    tokenizer = train_tokenizer(text)
    data = Records(tokenizer(text)["input_ids"], args.seed)
    held_out = Records(tokenizer(default_text().text)["input_ids"], args.seed)
    model = make_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads")
    train(model, data, held_out, peak=args.lr, budget_s=60 * args.minutes)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = (args.out / "model.safetensors").stat().st_size
    print(f"written to {args.out}: {size:,} bytes of weights")


if __name__ == "__main__":
    main()
