"""Exactness of quantized KV, tried: the same requests under many schedules must give the same bits.

    python -m benchmarks.exact                                  # cases until a million tokens are compared
    python -m benchmarks.exact --family llama --kv int4 --tokens 20000 --seed 3

A case is a small random model, a KV format and a mix of requests: greedy ones, sampled ones with a seed, forks,
beams, penalties, log-probabilities of prompts. They run one after another, whole and cold, and then under every
schedule; tokens and log-probabilities are compared as doubles, for equality. Families, formats and schedules
are drawn by a seeded generator, the rarest first. The last lines say what differed and where it began.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import kvq
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import KVQError, first_lines
from kvq.kernels.native.library import loaded
from kvq.models import Model, load
from kvq.models.observe.tiny_copy import build_tiny_copy
from tests.engine.kit import EOS, one_character_tokenizer
from tests.helpers_hybrids import FAMILIES as HYBRIDS
from tests.helpers_models import FAMILY_OPTIONS, random_tokens, save_model
from tools.model_table import GIVEN

PROVED = (  # families on no list, served after a proof
    *("olmoe", "cohere2_moe", "flint", "minicpm3", "gemma4_text", "afmoe", "gemma3n_text", "llama4_text"),
    *("mimo_v2_flash", "bert", "stablelm", "deepseek_v2", "dots1", "nemotron", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "ernie4_5", "helium", "glm4_moe", "qwen2_moe", "olmo", "persimmon", "phimoe"),
)
FORMATS = (
    *("fp32", "bf16", "fp8", "int8", "int4", "int4/int4", "int4_g64_rot", "k8v4"),
    "int3_mean+sinks=4+recent=32",
)
WEIGHTS = (None, None, "int8", "int4_g16")
NEW = 20  # tokens of a result
CONTEXT = 200
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """A model with a KV format, requests, and the generator that schedules draw from."""

    model: Model
    prompts: list[list[int]]
    params: list[SamplingParams]
    rng: random.Random

    def engine(self, **options: Any) -> LLM:
        """Return an engine with small pools unless told otherwise."""
        given = {"num_blocks": 160, "max_num_seqs": 16, "async_scheduling": False, "max_context": CONTEXT}
        return LLM(self.model, **(given | options))


Results = list[list[Any]]  # by request: numbers, in order


def numbers(output: RequestOutput) -> list[Any]:
    """Return what a request's output says, token by token; doubles as they are."""
    if output.error is not None:
        return [str(output.error)]
    found: list[Any] = []
    for entry in output.prompt_logprobs or ():
        found.append(None if entry is None else (entry.token, entry.logprob, entry.top))
    for one in output.outputs:
        entries = one.logprobs or [None] * len(one.token_ids)
        for token, entry in zip(one.token_ids, entries, strict=True):
            found.append((token, None if entry is None else (entry.logprob, entry.top)))
        found.append(one.cumulative_logprob)
    return found


def ran(case: Case, llm: LLM) -> Results:
    """Run all requests in an engine."""
    with llm:
        return [numbers(output) for output in llm.generate(case.prompts, case.params)]


def alone(case: Case) -> Results:
    """One request after another, each cold and its prompt in one piece: what all others are compared with."""
    return ran(case, case.engine(max_num_seqs=4, prefix_caching=False, max_num_batched_tokens=CONTEXT)) if False else [
        x for i in range(len(case.prompts)) for x in _one(case, i)
    ]


def _one(case: Case, i: int) -> Results:
    return ran(
        replace(case, prompts=case.prompts[i : i + 1], params=case.params[i : i + 1]),
        case.engine(prefix_caching=False),
    )


def batched(case: Case) -> Results:
    return ran(case, case.engine(prefix_caching=False))


def after_hits(case: Case) -> Results:
    with case.engine() as llm:
        llm.generate(case.prompts, case.params)
        return [numbers(output) for output in llm.generate(case.prompts, case.params)]


def in_chunks(case: Case) -> Results:
    return ran(case, case.engine(max_num_batched_tokens=case.rng.randint(16, 60), prefix_caching=case.rng.random() < 0.5))


def ahead(case: Case) -> Results:
    return ran(case, case.engine(async_scheduling=True))


def _preempted(case: Case, *, swap: bool) -> Results:
    with case.engine(swap_memory="16MiB" if swap else 0, max_num_batched_tokens=case.rng.randint(24, 300)) as llm:
        outputs: dict[int, RequestOutput] = {}
        for i, (prompt, params) in enumerate(zip(case.prompts, case.params, strict=True)):
            def keep(event: Any, i: int = i) -> None:
                if isinstance(event, RequestOutput):
                    outputs[i] = event
            job = llm.core.intake.new_job(prompt, RequestOptions(params=params), listener=keep)
            llm.core.submit(job)
        scheduler, now = llm.core.scheduler, 0
        while llm.core.has_work:
            llm.step()
            now += 1
            running = [r for r in scheduler.running.requests if any(b in scheduler.running.active for b in r.live) and not (swap and len(r.live) > 1)]
            if running and now < 60 and case.rng.random() < 0.4:
                scheduler.preempt(case.rng.choice(running), float(now), swap=swap)
        return [numbers(outputs[i]) for i in range(len(case.prompts))]


def recomputed(case: Case) -> Results:
    return _preempted(case, swap=False)


def swapped(case: Case) -> Results:
    return _preempted(case, swap=True)


def small_pool(case: Case) -> Results:
    return ran(case, case.engine(num_blocks=case.rng.randint(40, 60)))


def drafted(case: Case) -> Results:
    method = case.rng.choice(["ngram", "self"])
    return ran(case, case.engine(speculation={"method": method, "k": case.rng.randint(1, 6), "adapts": False}))


def threads(case: Case) -> Results:
    before = torch.get_num_threads()
    torch.set_num_threads(case.rng.choice([1, 3, 5]))
    try:
        return batched(case)
    finally:
        torch.set_num_threads(before)


def restarted(case: Case) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        with case.engine() as llm:
            llm.generate(case.prompts, case.params)
            for i, prompt in enumerate(case.prompts):
                if len(prompt) >= BLOCK:
                    manager = llm.core.scheduler.manager
                    save_prefix(Path(folder) / str(i), llm.core.runner.cache, manager, manager.prompt(prompt))
                    paths.append((Path(folder) / str(i), prompt))
        llm = case.engine()
        for path, prompt in paths:
            manager = llm.core.scheduler.manager
            load_prefix(path, llm.core.runner.cache, manager, manager.prompt(prompt))
        return ran(case, llm)


SCHEDULES: dict[str, Callable[[Case], Results]] = {
    x.__name__: x
    for x in (batched, after_hits, in_chunks, ahead, recomputed, swapped, small_pool, drafted, threads)
}


def scored(case: Case, base: Results) -> tuple[Results, Results]:
    """Score greedy requests' prompts and answers as one prefill; return (found, wanted)."""
    found, wanted = [], []
    jobs = [i for i, p in enumerate(case.params) if p.logprobs is not None and p.n == 1 and p.best_of is None]
    prompts = [case.prompts[i] + [entry[0] for entry in base[i][-1 - NEW : -1]] for i in jobs]
    with case.engine(max_num_batched_tokens=case.rng.choice([64, 2048])) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=2)
        outputs = llm.generate(prompts, params)
    for i, output in zip(jobs, outputs, strict=True):
        entries = output.prompt_logprobs[-NEW:]
        found.append([(e.token, (e.logprob, e.top)) for e in entries])
        wanted.append(base[i][-1 - NEW : -1])
    return found, wanted


def requests(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts: list[list[int]] = []
    for i in range(10):
        tokens = random_tokens(rng.randint(1, 120), seed=rng.randrange(1 << 30))
        tokens = [max(3, t) for t in tokens]
        if i % 3 == 2:
            tokens = prompts[-1][: len(prompts[-1]) * 3 // 4] + tokens[:40]
        prompts.append(tokens)
    base = {"max_tokens": NEW, "ignore_eos": True, "logprobs": 2}
    kinds: list[dict[str, Any]] = [
        {}, {}, {},
        {"prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 6},
        {"temperature": 0.7, "seed": 7, "n": 3},
        {"temperature": 1.0, "seed": 8, "best_of": 3, "n": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"beam_width": 3, "n": 2, "logprobs": None},
    ]
    return prompts, [SamplingParams(**(base | kind)) for kind in kinds]


def family_folder(name: str, folder: Path) -> Path:
    """Save a small random model of a family, with a tokenizer of one character a token."""
    if name in FAMILY_OPTIONS:
        save_model(folder, name)
    else:
        config = AutoConfig.for_model(name, **(HYBRIDS.get(name) or GIVEN.get(name, {})))
        torch.manual_seed(0)
        build_tiny_copy(json.loads(config.to_json_string(use_diff=False))).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"eos_token_id": EOS}))
        (folder / "generation_config.json").unlink(missing_ok=True)
    one_character_tokenizer().save_pretrained(folder)
    return folder


def compare(found: Results, wanted: Results) -> tuple[int, int, str]:
    """Return (numbers compared, differing, where the first difference is)."""
    compared = differing = 0
    first = ""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if len(a) != len(b):
            differing += max(len(a), len(b))
            first = first or f"request {i}: {len(a)} entries, not {len(b)}: {a[:1]}"
            continue
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            compared += 1
            if x != y:
                differing += 1
                first = first or f"request {i}, entry {j}: {x} != {y}"
    return compared, differing, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", action="append")
    parser.add_argument("--kv", action="append")
    parser.add_argument("--schedule", action="append")
    parser.add_argument("--weights", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    families = given.family or [*FAMILY_OPTIONS, *HYBRIDS, *PROVED, "tiny"]
    total = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folders: dict[str, Any] = {}
        for number in range(given.cases):
            family = rng.choice(families) if given.family is None or len(given.family) > given.cases else families[number % len(families)]
            kv = rng.choice(given.kv or FORMATS)
            weights = rng.choice(given.weights or WEIGHTS)
            weights = None if weights == "none" else weights
            began = time.time()
            try:
                if family not in folders:
                    folders[family] = "tiny" if family == "tiny" else family_folder(family, Path(temporary) / family)
                model = load(folders[family], kv, dtype="fp32", device="cpu", block_size=BLOCK, **({} if weights is None else {"weights": weights}))
                prompts, params = requests(rng)
                case = Case(model, prompts, params, random.Random(rng.randrange(1 << 30)))
                base = alone(case)
            except KVQError as error:
                print(f"{family} {kv} {weights}: not run: {first_lines(error)}", flush=True)
                continue
            for name in given.schedule or [*SCHEDULES, "scored"]:
                try:
                    found, wanted = scored(case, base) if name == "scored" else (SCHEDULES[name](case), base)
                except KVQError as error:
                    print(f"{family} {kv} {weights} {name}: not run: {first_lines(error)}", flush=True)
                    continue
                compared, differing, first = compare(found, wanted)
                total["compared"] += compared
                total["differing"] += differing
                if differing:
                    line = f"{family} {kv} {weights} {name}: {differing} of {compared} differ; {first}"
                    bad.append(line)
                    print(line, flush=True)
            print(f"{number} {family} {kv} {weights} {time.time() - began:.1f} s, {total}", flush=True)


if __name__ == "__main__":
    main()
