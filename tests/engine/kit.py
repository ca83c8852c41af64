"""Small engines for tests: random models with a tokenizer of one character a token, and their reference."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvq.engine import LLM, Piece, RequestOutput, SamplingParams, TokenLogprobs
from kvq.engine.requests.request_options import RequestOptions
from kvq.models import Model
from kvq.scheduler import FixedCosts
from tests.helpers_models import VOCAB, eager_logits, load_eager, load_fp32, random_tokens, save_model

EOS = 2
BLOCK = 16  # tokens
_FIRST = 0x4E00  # the character of token 0
# A whole number of vectors: PyTorch computes the last few numbers of an activation in scalar code, whose
# exponentials round differently, so with odd widths the last row's bits depend on the number of rows.
_WIDTH = 96

opened: list[LLM] = []  # by the test that runs
# Of engines. Tests that preempt or look between two steps need those in turns; test_ahead.py has the others.
defaults: dict[str, Any] = {"max_num_seqs": 16, "async_scheduling": False}


def text_of(tokens: Sequence[int]) -> str:
    """What the tokenizer of the random models decodes; the end token has no text."""
    return "".join(chr(_FIRST + token) for token in tokens if token != EOS)


def one_character_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the character behind token i - 1's."""
    names = {("</s>" if i == EOS else chr(_FIRST + i)): i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(names, unk_token=chr(_FIRST)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@cache
def pair(family: str, seed: int = 0) -> tuple[Model, Any]:
    """A random model of a family under kvq, fp32 KV in blocks of 16, and under transformers."""
    folder = save_model(Path(mkdtemp(prefix=f"kvq-{family}-")), family, seed=seed, intermediate_size=_WIDTH)
    one_character_tokenizer().save_pretrained(folder)
    return load_fp32(folder, block_size=BLOCK), load_eager(folder)


def engine(model: Model, kv: str = "auto", **options: Any) -> LLM:
    """An engine over a loaded model with a pool of a few hundred blocks unless told otherwise.

    Its steps don't depend on how fast this machine is.
    """
    if "kv_memory" not in options:
        options = {"num_blocks": 256} | options
    opened.append(LLM(model, kv, **(defaults | options)))
    core = opened[-1].core
    core.scheduler.costs = FixedCosts()
    if core.speculator is not None:
        core.speculator.depth.costs = core.scheduler.costs
    return opened[-1]


def mixed_prompts(count: int, *, seed: int, longest: int = 100) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; every fourth begins as the one before it did."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        tokens = random_tokens(length, seed=1000 * seed + i)
        if i % 4 == 3:
            shared = prompts[-1][: 3 * length // 4]
            tokens = shared + tokens[len(shared) :]
        prompts.append(tokens)
    return prompts


def drive(llm: LLM, jobs: Sequence[Any], *, most_steps: int = 20_000) -> None:
    """Step until jobs that were submitted have ended; a hang fails."""
    for _ in range(most_steps):
        if not llm.core.has_work:
            return
        llm.step()
    raise AssertionError(f"{len(jobs)} jobs did not end in {most_steps} steps")


class Collector:
    """A listener that keeps the pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def __call__(self, event: Any) -> None:
        last = {"request_id": "", "index": 0, "text": "", "token_ids": []}
        self.pieces.append(event if isinstance(event, Piece) else Piece(**last, output=event))

    @property
    def output(self) -> RequestOutput:
        """The request's output, once it ended."""
        outputs = [piece.output for piece in self.pieces if piece.output is not None]
        assert len(outputs) == 1, f"a request ends once, got {len(outputs)} outputs"
        return outputs[0]


def preempt(llm: LLM, job: Any, now: float = 0.0, *, to_host: bool = False) -> None:
    """Preempt a request between two steps; with `to_host`, its blocks leave the pools at once."""
    core = llm.core
    core.scheduler.preempt(job, now)
    if to_host:
        core.scheduler.manager.below.give_up(core.scheduler.running.prompt(job), to_tiers=True)
        core.runner.cache.carry_out(core.scheduler.manager.take_orders())


def damage_host(llm: LLM, group: int | None = None) -> int:
    """Change the bytes of every third block in host memory, or of all of a layer group; returns how many."""
    tiers = llm.core.scheduler.manager.blocks.tiers
    assert tiers is not None
    held = [one for key, one in tiers._host.items() if group in (None, key.group)]
    for one in held if group is not None else held[::3]:
        one.content = np.array(one.content)
        one.content[7] ^= 1
    return len(held)


def submit(llm: LLM, prompt: Any, params: SamplingParams, **options: Any) -> tuple[Any, Collector]:
    """Queue one request; return its job and what collects its pieces."""
    collector = Collector()
    given = RequestOptions(params=params, **options)
    job = llm.core.intake.new_job(prompt, given, listener=collector)
    llm.core.submit(job)
    return job, collector


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The first result's tokens of every request; none may have failed."""
    for output in outputs:
        assert output.error is None, output.error
    return [output.outputs[0].token_ids for output in outputs]


@torch.inference_mode()
def reference_tokens(reference: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What transformers' own `generate` adds to a prompt."""
    ids = torch.tensor([prompt])
    found = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
    )
    return found[0, len(prompt) :].tolist()


def reference_logprobs(reference: Any, ids: list[int]) -> Tensor:
    """log_softmax after every token: fp64 [tokens, vocab]."""
    return eager_logits(reference, ids).double().log_softmax(dim=-1)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two lists part; None if they are equal."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def count_near_ties(
    reference: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    got: list[list[int]],
    *,
    gap: float = 1e-4,
) -> int:
    """How many results differ from the reference; fails unless each first difference is a near tie."""
    excused = 0
    for prompt, wanted, tokens in zip(prompts, expected, got, strict=True):
        at = first_difference(wanted, tokens)
        if at is None:
            continue
        best = eager_logits(reference, prompt + wanted[:at])[-1].topk(2).values
        assert float(best[0] - best[1]) <= gap, (
            f"{len(prompt)} prompt tokens, token {at}: {wanted[at:]} expected, got {tokens[at:]}"
        )
        excused += 1
    return excused


def gap_of(entry: TokenLogprobs) -> float:
    """How much likelier the best token was than the second, in nats."""
    (_, best), (_, second) = entry.top[:2]
    return best - second


def assert_balanced(llm: LLM) -> None:
    """Nothing runs and nothing leaked: no jobs, all rows free, every block free or only cached."""
    core = llm.core
    assert not core.has_work
    assert not core.scheduler.has_work
    assert core.scheduler.running.num_sequences == 0, "rows leaked"
    assert not core.scheduler.manager.sequences(), "sequences leaked"
    for pool in core.scheduler.manager.usage():
        assert pool.live == 0, "blocks leaked"
    core.scheduler.manager.check_integrity()
    assert not core.scheduler.loading._held, "loaded blocks leaked"
