"""LoRA adapters: speed of a mixed batch, the merged model's answers, prefixes, room, activated switches.

    python tools/make_bench_model.py --out build/bench-model
    python -m benchmarks.adapters --model build/bench-model [--rounds 12] [--out FILE]

Speed: 16 requests, two for each of 8 adapters of rank 16 for all layers, saved in bf16, against the same
requests without adapters, in turns in one process; tokens per second of processor time with one thread, so
that other processes matter little. Everything else is checked, not timed: a wrong answer ends the run.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvq import LLM, SamplingParams, load
from kvq.evals.report.results import envelope, write_json
from kvq.models.adapters.place import adaptable

RANK, ADAPTERS, REQUESTS = 16, 8, 16
PROMPT, NEW = 128, 128  # tokens
INVOCATION = [17, 23, 42]
PREFIX = "base_model.model."
Row = dict[str, Any]


def main() -> None:
    """Measure, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="what tools/make_bench_model.py wrote")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for row in measure(given.model, given.kv, given.rounds, Path(folder)):
            print(row, flush=True)
            rows.append(row)
    if given.out:
        about = {"model": given.model, "kv": given.kv, "threads": torch.get_num_threads()}
        write_json(given.out, envelope(sys.argv, torch.device("cpu"), rows, about))


def measure(name: str, kv: str, rounds: int, folder: Path) -> Iterator[Row]:
    """The row of every part."""
    model = load(name, kv=kv)
    shapes = adaptable(model.weights.model)
    folders = {f"a{i}": save(folder / f"a{i}", shapes, i) for i in range(100)}
    active = {"act": save(folder / "act", shapes, 999, alora_invocation_tokens=INVOCATION)}
    yield speed(LLM(model, **options(folders, ADAPTERS)), rounds)
    yield same_answers(load(name, kv="fp32"), folders)
    yield prefixes(LLM(model, **options(folders, 3)))
    yield room(LLM(model, **options(folders, 100)))
    yield switch(LLM(model, **options(active, 1), max_context=8192))


def save(folder: Path, shapes: Any, seed: int, **config: Any) -> Path:
    """A random adapter as PEFT saves it."""
    source, tensors = torch.Generator().manual_seed(seed), {}
    for layer, (inputs, outputs) in shapes.items():
        a, b = torch.randn(RANK, inputs, generator=source), torch.randn(outputs, RANK, generator=source)
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = (0.02 * a).bfloat16()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = (0.02 * b).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    return folder


def options(folders: dict[str, Path], count: int) -> dict[str, Any]:
    """Of an engine with some of the adapters."""
    some = dict(list(folders.items())[:count])
    return {"adapters": some, "max_adapters": ADAPTERS, "num_blocks": 1024, "max_num_seqs": REQUESTS}


def bytes_of(llm: LLM) -> int:
    """Of the adapters in memory."""
    return sum(adapter.nbytes for adapter in llm.core.adapters.held.values())


def random_prompts(source: random.Random, count: int, length: int) -> list[list[int]]:
    return [[source.randrange(100, 4000) for _ in range(length)] for _ in range(count)]


def speed(llm: LLM, rounds: int) -> Row:
    """Tokens per second with 8 adapters in a batch of 16, of those without."""
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    names: dict[bool, Any] = {True: [f"a{i % ADAPTERS}" for i in range(REQUESTS)], False: None}
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(rounds + 1):  # the first one warms up
        for with_adapters in (True, False) if number % 2 else (False, True):
            prompts = random_prompts(random.Random(2 * number + with_adapters), REQUESTS, PROMPT)
            began = time.process_time(), time.perf_counter()
            llm.generate(prompts, params, adapter=names[with_adapters])
            if number:
                spent = time.process_time() - began[0], time.perf_counter() - began[1]
                took[with_adapters].append(spent)
    pairs = list(zip(took[False], took[True], strict=True))
    processor, wall = (sorted(without[i] / own[i] for without, own in pairs) for i in (0, 1))
    low, high = len(pairs) // 10, -1 - len(pairs) // 10
    return {
        "part": "speed",
        "adapters": ADAPTERS,
        "rank": RANK,
        "adapter_bytes": bytes_of(llm),
        "requests": REQUESTS,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "pairs": len(pairs),
        "speed": median(processor),  # tokens per second of processor time, of those without adapters
        "speed_p10_p90": [processor[low], processor[high]],
        "wall_speed": median(wall),
        "wall_speed_p10_p90": [wall[low], wall[high]],
    }


def same_answers(model: Any, folders: dict[str, Path]) -> Row:
    """Answers in fp32, compared with transformers' model in which the adapter is merged."""
    llm = LLM(model, **options(folders, 4))
    prompts = random_prompts(random.Random(1), 4, 60)
    params = SamplingParams(max_tokens=24, logprobs=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, adapter=list(folders)[:4])
    worst, compared = 0.0, 0
    for prompt, output, folder in zip(prompts, outputs, folders.values(), strict=False):
        merged = AutoModelForCausalLM.from_pretrained(model.prepared.folder, dtype=torch.float32)
        tensors = load_file(folder / "adapter_model.safetensors")
        with torch.inference_mode():
            for key in sorted(tensors)[::2]:
                layer = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                b = tensors[f"{PREFIX}{layer}.lora_B.weight"].float()
                merged.get_submodule(layer).weight += 2 * b @ tensors[key].float()
            found = output.outputs[0]
            rows = (
                merged(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 :].log_softmax(-1)
            )
        for row, entry in zip(rows, found.logprobs, strict=False):
            assert int(row.argmax()) == entry.token, "another token than the merged model's"
            for token, logprob in ((entry.token, entry.logprob), *entry.top):
                worst = max(worst, abs(float(row[token]) - logprob))
            compared += 1
    assert worst < 1e-4, worst
    return {"part": "same answers", "tokens": compared, "largest_logprob_difference": worst}


def prefixes(llm: LLM) -> Row:
    """Random prompts with common beginnings under three adapters and none: hits never cross."""
    source, params = random.Random(2), SamplingParams(max_tokens=1, ignore_eos=True)
    texts, known, probes, hits = random_prompts(source, 8, 120), {}, 1000, 0
    for _ in range(probes):
        name, tokens = source.choice([None, "a0", "a1", "a2"]), source.choice(texts)
        tokens = tokens[: source.randint(1, len(tokens))]
        seen = known.setdefault(name, [])
        longest = max((common(tokens, other) for other in seen), default=0)
        cached = llm.generate(tokens, params, adapter=name)[0].receipt.cached_tokens
        assert cached <= longest, "a prefix crossed adapters"
        hits += cached > 0
        seen.append(tokens)
    return {"part": "prefixes", "probes": probes, "hits": hits, "crossed": 0}


def common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def room(llm: LLM) -> Row:
    """A hundred adapters through room for 8: all are answered, and nothing is left when they are gone."""
    source, adapters, most = random.Random(3), llm.core.adapters, 0
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(3):
        names = source.sample(list(adapters.named), 100)
        outputs = llm.generate(random_prompts(source, 100, 20), params, adapter=names)
        assert all(output.error is None for output in outputs)
        most = max(most, len(adapters.held))
    size = bytes_of(llm)
    for name in list(adapters.named):
        llm.unload_adapter(name)
    left = {"names": len(adapters.named), "held": len(adapters.held), "bytes": bytes_of(llm)}
    live = sum(pool.live for pool in llm.core.scheduler.manager.usage())
    assert not live, live
    assert not any(left.values()), left
    llm.core.scheduler.manager.check_integrity()
    return {"part": "room", "adapters": 100, "requests": 300, "most_held": most, "bytes": size, "left": left}


def switch(llm: LLM) -> Row:
    """Switching to an activated adapter over 4,000 tokens of the base model's."""
    (prefix,) = random_prompts(random.Random(4), 1, 4000)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate(prefix, params)
    prompt = prefix + INVOCATION + random_prompts(random.Random(5), 1, 20)[0]
    receipt = llm.generate(prompt, params, adapter="act")[0].receipt
    computed = receipt.prompt_tokens - receipt.cached_tokens
    assert computed <= 0.05 * len(prefix), computed
    return {"part": "activated switch", "prefix_tokens": len(prefix), "computed_tokens": computed}


if __name__ == "__main__":
    main()
