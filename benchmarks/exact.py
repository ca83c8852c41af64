"""Exactness of quantized KV, tried: the same requests under many schedules must give the same bits.

    python -m benchmarks.exact                      # until a million tokens are compared
    python -m benchmarks.exact --family llama --kv int4 --schedule brought_back --tokens 20000 --seed 3
    python -m benchmarks.exact --variant avx2       # another variant of the C++ kernels
    python -m benchmarks.exact --wrong-order        # sums whose order depends on the batch: are they found?
    python -m benchmarks.exact --receipts 1000      # answers replayed in another process, and damaged ones
    python -m benchmarks.exact --cost ./my-model    # what exact costs, interleaved with an engine without it

A case is a small random model loaded with `exact`, a KV format, weights in some format, and requests of all
kinds: greedy, sampled, forked, beams, with penalties, with log-probabilities of prompts. Every request runs
alone and cold with its prompt in one piece, then together with the others under every schedule. Compared for
equality: tokens, log-probabilities as doubles, digests of the K and V that were read, and receipts. A seeded
generator draws the cases; every family comes before any comes again. Results go to
benchmarks/results/exact-<variant>-cpu.json.
"""

import argparse
import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig

from benchmarks.findings import RESULTS, finding, report
from kvq.bench.timing import percentile
from kvq.cache.prefix_file import load_prefix, save_prefix
from kvq.engine import LLM, RequestOutput, SamplingParams, TokenLogprobs
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, KVQError, first_lines
from kvq.evals.report.results import envelope, write_json
from kvq.kernels.native import library
from kvq.models import Model, load
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.observe.tiny_copy import build_tiny_copy
from kvq.scheduler import Request
from kvq.weights.linear import PackedLinear
from tests.engine.kit import EOS, one_character_tokenizer
from tests.helpers_hybrids import FAMILIES as HYBRIDS
from tests.helpers_models import FAMILY_OPTIONS, random_tokens, save_model
from tools.model_table import GIVEN

PROVED = (  # families on no list, served after a proof
    *("afmoe", "bert", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5", "flint", "gemma3n_text"),
    *("gemma4_text", "glm4_moe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "mimo_v2_flash", "minicpm3"),
    *("nemotron", "olmoe", "persimmon", "phimoe", "qwen2_moe", "stablelm"),
)
EXACT_HYBRIDS = ("lfm2", "lfm3")
INEXACT = (*sorted(HYBRIDS.keys() - {*EXACT_HYBRIDS}), "llama4_text")  # refused, which is tried, too
FAMILIES = ("tiny", *FAMILY_OPTIONS, *PROVED, *EXACT_HYBRIDS)
FORMATS = (
    *("fp32", "bf16", "fp8", "int8", "int6", "int4", "int4_g8/int4_g8", "k8v4", "int4_g16_rot"),
    "int3_mean+sinks=4+recent=32",
)
WEIGHTS = ("as stored", "as stored", "bf16", "int8", "int4_g16")
NEW = 50  # tokens of a result
CONTEXT, BLOCK = 200, 16  # tokens
Results = list[list[Any]]  # of each request: what it said, token by token, and its receipt


@dataclass(frozen=True)
class Case:
    """A model over a KV format, requests, and the generator that schedules draw from."""

    model: Model
    prompts: list[list[int]]
    params: list[SamplingParams]
    rng: random.Random

    def engine(self, **options: Any) -> LLM:
        """Return an engine with a pool for all requests, unless told otherwise."""
        given = {"num_blocks": 240, "max_num_seqs": 16, "async_scheduling": False, "max_context": CONTEXT}
        return LLM(self.model, **(given | options))


def said(output: RequestOutput) -> list[Any]:
    """Return a request's results, with doubles as they are, and the digests of its receipt."""
    if output.error is not None:
        return [str(output.error)]
    found: list[Any] = []
    for known in output.prompt_logprobs or ():
        found.append(known and (known.token, known.logprob, known.top))
    for one in output.outputs:
        entries: Sequence[TokenLogprobs | None] = one.logprobs or [None] * len(one.token_ids)
        for token, entry in zip(one.token_ids, entries, strict=True):
            found.append((token, entry and entry.logprob, entry and entry.top))
    exact = output.receipt.exact
    assert exact is not None, "the engine is exact"
    return [*found, exact, [one.cumulative_logprob for one in output.outputs]]


def ran(case: Case, llm: LLM) -> Results:
    """Run all requests at once."""
    with llm:
        return [said(output) for output in llm.generate(case.prompts, case.params)]


def alone(case: Case) -> Results:
    """Run each request in an engine of its own, its prompt in one step."""
    each = [replace(case, prompts=[x], params=[y]) for x, y in zip(case.prompts, case.params, strict=True)]
    return [ran(one, one.engine(prefix_caching=False))[0] for one in each]


def batched(case: Case) -> Results:
    return ran(case, case.engine(prefix_caching=False))


def hits(case: Case) -> Results:
    """Find all prompts in the prefix index, and the answers beyond them."""
    with case.engine() as llm:
        llm.generate(case.prompts, case.params)
        return [said(output) for output in llm.generate(case.prompts, case.params)]


def chunked(case: Case) -> Results:
    caching = case.rng.random() < 0.5
    return ran(case, case.engine(max_num_batched_tokens=case.rng.randint(16, 60), prefix_caching=caching))


def ahead(case: Case) -> Results:
    """Launch every step while the one before it runs."""
    return ran(case, case.engine(async_scheduling=True))


def crowded(case: Case) -> Results:
    return ran(case, case.engine(num_blocks=case.rng.randint(50, 80)))


def recomputed(case: Case) -> Results:
    return _preempted(case, prefix_caching=False)


def brought_back(case: Case) -> Results:
    """Evict what preempted requests lose, so that it comes back from host memory."""
    room = 240 * sum(group.block_bytes for group in case.model.layout.groups)
    return _preempted(case, kv_host=room)


def _preempted(case: Case, **options: Any) -> Results:
    outputs: dict[int, RequestOutput] = {}

    def keep(index: int) -> Callable[[Any], None]:
        return lambda event: outputs.update({index: event} if isinstance(event, RequestOutput) else {})

    chunk = case.rng.randint(24, 300)
    with case.engine(max_num_batched_tokens=chunk, **options) as llm:
        for i, (prompt, params) in enumerate(zip(case.prompts, case.params, strict=True)):
            given = RequestOptions(params=params)
            llm.core.submit(llm.core.intake.new_job(prompt, given, listener=keep(i)))
        scheduler = llm.core.scheduler
        for now in range(1 << 20):
            if not llm.core.has_work:
                break
            llm.step()
            running = list(scheduler.running.requests)
            if running and now < 60 and case.rng.random() < 0.4:
                _preempt(llm, case.rng.choice(running), float(now))
    return [said(outputs[i]) for i in range(len(outputs))]


def _preempt(llm: LLM, request: Request, now: float) -> None:
    """Preempt a request, and evict what it leaves cached."""
    manager = llm.core.scheduler.manager
    llm.core.scheduler.preempt(request, now)
    manager.below.give_up(llm.core.scheduler.running.prompt(request), to_tiers=True)
    llm.core.runner.cache.carry_out(manager.take_orders())


def drafted(case: Case) -> Results:
    """Draft by n-grams or by the model with rounded weights, and verify all drafts in a step."""
    drafts = {"method": case.rng.choice(["ngram", "self"]), "k": case.rng.randint(1, 6), "adapts": False}
    try:
        llm = case.engine(speculation=drafts)
    except ConfigError:  # "self" can't go back in states, and needs widths that groups divide
        llm = case.engine(speculation=drafts | {"method": "ngram"})
    return ran(case, llm)


def threads(case: Case) -> Results:
    before = torch.get_num_threads()
    torch.set_num_threads(case.rng.choice([1, 3, 5]))
    try:
        return batched(case)
    finally:
        torch.set_num_threads(before)


def restarted(case: Case) -> Results:
    """Save the prompts' prefixes to files, and run over them in another engine."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        with case.engine() as llm:
            llm.generate(case.prompts, case.params)
            cache, manager = llm.core.runner.cache, llm.core.scheduler.manager
            for i, prompt in enumerate(case.prompts):
                known = manager.prompt(prompt)
                if manager.prefixes.held(known)[0]:
                    save_prefix(Path(folder, str(i)), cache, manager, known)
                    files.append((Path(folder, str(i)), prompt))
        llm = case.engine()
        cache, manager = llm.core.runner.cache, llm.core.scheduler.manager
        for path, prompt in files:
            assert load_prefix(path, cache, manager, manager.prompt(prompt)), "the file is whole"
        return ran(case, llm)


def tiered(case: Case) -> Results:
    """Let blocks leave a small pool for host memory and a folder, and run again in a new engine over that."""
    with tempfile.TemporaryDirectory() as folder:
        for again in (False, True):
            options = {
                "num_blocks": case.rng.randint(50, 80),
                "kv_host": case.rng.choice(["0", "256KiB", "64MiB"]),
                "kv_disk": "64MiB",
                "kv_dir": folder,
            }
            with case.engine(**options) as llm:
                if again:
                    llm.generate(case.prompts[:4], case.params[:4])
                found = [said(output) for output in llm.generate(case.prompts, case.params)]
    return found


SCHEDULES: dict[str, Callable[[Case], Results]] = {
    run.__name__: run
    for run in (
        *(batched, hits, chunked, ahead, crowded, recomputed, brought_back),
        *(drafted, threads, restarted, tiered),
    )
}


def scored(case: Case, base: Results) -> tuple[Results, Results]:
    """Return the log-probabilities of answers, scored as one prompt with theirs, and the generated ones."""
    single = [i for i, x in enumerate(case.params) if x.logprobs is not None and x.num_sequences == 1]
    answers = {i: base[i][-2 - NEW : -2] for i in single}
    prompts = [case.prompts[i] + [token for token, _, _ in answers[i]] for i in single]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    with case.engine(max_num_batched_tokens=case.rng.choice([48, 2048])) as llm:
        outputs = llm.generate(prompts, params)
    found = [said(replace(x, outputs=[], prompt_logprobs=x.prompt_logprobs[-NEW:]))[:NEW] for x in outputs]  # type: ignore[index]
    return found, [answers[i] for i in single]


def drawn_requests(rng: random.Random, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, some of which begin alike, and sampling parameters of all kinds in random order."""
    prompts: list[list[int]] = []
    for i in range(11):
        tokens = random_tokens(rng.randint(1, 120), seed=rng.randrange(1 << 30), vocab=min(vocab, 199))
        if i % 3 == 2:
            tokens = prompts[-1][: len(prompts[-1]) * 3 // 4] + tokens[:40]
        prompts.append(tokens)
    kinds: list[dict[str, Any]] = [
        *(
            {},
            {},
            {},
            {"prompt_logprobs": 1},
            {"temperature": 0.8},
            {"beam_width": 3, "n": 2, "logprobs": None},
        ),
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5},
        {"temperature": 0.7, "n": 3},
        {"temperature": 1.0, "best_of": 3, "n": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    rng.shuffle(kinds)
    base = {"max_tokens": NEW, "ignore_eos": True, "logprobs": 2}
    seeds = [{} if "beam_width" in kind else {"seed": rng.randrange(1 << 60)} for kind in kinds]
    return prompts, [SamplingParams(**(base | kind | seed)) for kind, seed in zip(kinds, seeds, strict=True)]


def family_folder(family: str, folder: Path) -> Path:
    """Save a small random model of a family, with a tokenizer of one character a token."""
    if family in FAMILY_OPTIONS:
        save_model(folder, family)
    else:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **(HYBRIDS.get(family) or GIVEN.get(family, {})))
        build_tiny_copy(json.loads(config.to_json_string(use_diff=False))).save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | {"eos_token_id": EOS}))
        (folder / "generation_config.json").unlink(missing_ok=True)
    one_character_tokenizer().save_pretrained(folder)
    return folder


def compare(found: Results, wanted: Results) -> tuple[int, int, str]:
    """Return tokens compared, how many differ (a receipt counts as one), and where the first one is."""
    compared = differing = 0
    first = ""
    for i, (own, others) in enumerate(zip(found, wanted, strict=True)):
        compared += sum(isinstance(x, tuple) for x in others)
        if own == others:
            continue
        at = next((j for j, (x, y) in enumerate(zip(own, others, strict=False)) if x != y), len(own))
        differing += sum(x != y for x, y in zip(own, others, strict=False)) or 1
        first = first or f"request {i}, entry {at}: {own[at : at + 1]} != {others[at : at + 1]}"[:400]
    return compared, differing, first


@contextmanager
def wrong_order() -> Iterator[None]:
    """Sum products of an even number of rows in two halves: their order depends on the batch."""
    right = PackedLinear.forward

    def forward(self: PackedLinear, input: torch.Tensor) -> torch.Tensor:
        found = right(self, input)
        if found.numel() // self.out_features % 2:
            return found
        half = input.clone()
        half[..., self.in_features // 2 :] = 0
        bias = 0 if self.bias is None else self.bias
        return right(self, half) + right(self, input - half) - bias

    with patch.object(PackedLinear, "forward", forward):
        yield


class Trial:
    """Cases, until enough tokens were compared."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._rng = random.Random(given.seed)
        self.total: Counter[str] = Counter()
        self.met: dict[str, set[str]] = {"family": set(), "kv": set(), "schedule": set(), "weights": set()}
        self.differences: list[str] = []
        self.refused: dict[str, str] = {}

    def run(self) -> None:
        given = self._given
        families: list[str] = []
        began = time.monotonic()
        while self.total["tokens"] < given.tokens and time.monotonic() - began < given.minutes * 60:
            if not families:
                families = list(given.family or (PROVED if given.wrong_order else FAMILIES))
                self._rng.shuffle(families)
            self._case(families.pop(), self._rng.choice(given.kv or FORMATS), self._rng.choice(WEIGHTS))
            self.total["cases"] += 1
            if given.wrong_order and self.differences:
                return

    def refuse(self, families: Sequence[str]) -> None:
        """Load models that can't be exact; each must be refused."""
        for family in families:
            try:
                load(self._saved(family), "int8", dtype="fp32", device="cpu", block_size=BLOCK, exact=True)
            except KVQError as error:
                self.refused[family] = first_lines(error)
            else:
                self.differences.append(f"{family} was not refused")

    def _saved(self, family: str) -> Any:
        path = self._folder / family
        if family == "tiny" or Path(family).exists():
            return family
        return path if path.exists() else family_folder(family, path)

    def _case(self, family: str, kv: str, weights: str) -> None:
        name = f"{Path(family).name}, {kv}, weights {weights}"
        options: Any = {
            "dtype": "bf16" if weights == "bf16" else "fp32",
            "device": "cpu",
            "block_size": BLOCK,
        }
        if weights not in ("as stored", "bf16") and not family.endswith(".gguf"):
            options["weights"] = weights
        try:
            model = load(self._saved(family), kv, exact=True, **options)
        except KVQError as error:
            self.refused[name] = first_lines(error)
            return
        except Exception as error:  # noqa: BLE001 - one model's defect must not end the trial
            self.differences.append(f"{name} fails: {error!r}")
            print(self.differences[-1], flush=True)
            return
        prompts, params = drawn_requests(self._rng, model.geometry.vocab_size)
        case = Case(model, prompts, params, random.Random(self._rng.randrange(1 << 30)))
        base = alone(case)
        self.met["family"].add(family)
        self.met["kv"].add(kv)
        self.met["weights"].add(weights)
        with wrong_order() if self._given.wrong_order else warnings.catch_warnings():
            for schedule in self._given.schedule or [*SCHEDULES, "scored"]:
                run = SCHEDULES.get(schedule)
                found, wanted = scored(case, base) if run is None else (run(case), base)
                tokens, differing, first = compare(found, wanted)
                self.met["schedule"].add(schedule)
                self.total.update(tokens=tokens, differing=differing)
                if differing:
                    self.differences.append(f"{name}, {schedule}: {differing} differ; {first}")
                    print(self.differences[-1], flush=True)
                    if self._given.wrong_order:
                        return
        print(f"{self.total['tokens']:,} tokens, {self.total['differing']} differ; {name}", flush=True)


def receipts(count: int, folder: Path) -> list[dict[str, Any]]:
    """Replay answers of the embedded model in another process; then with a flipped bit, and other formats."""
    rng = random.Random(count)
    model, source, target = folder / "model", folder / "in.jsonl", folder / "out.jsonl"
    shutil.copytree(EMBEDDED["tiny"], model)
    with source.open("w") as file:
        for i in range(count):
            body: dict[str, Any] = {"model": "model", "prompt": random_tokens(rng.randint(1, 200), seed=i)}
            body |= {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0, 0.8]), "logprobs": 1}
            file.write(json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) + "\n")

    def kvq(command: str, kv: str = "int4") -> str:
        words = [
            sys.executable,
            "-m",
            "kvq",
            command,
            str(model),
            "--kv",
            kv,
            "--exact",
            str(source),
            str(target),
        ]
        return (
            subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip().splitlines()[-1]
        )

    rows = [finding("receipts", kvq("run-batch"), f"{count} answers", target.exists())]
    alike = f"replayed  {count:,} answers: {count:,} alike, 0 differ"
    none = f"replayed  {count:,} answers: 0 alike, {count:,} differ"
    rows += [finding("another process", said := kvq("replay"), alike, said == alike)]
    rows += [finding("another recipe", said := kvq("replay", "int8"), none, said == none)]
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)
    rows += [finding("a flipped bit in the weights", said := kvq("replay"), none, said == none)]
    return rows


def cost(model: str, kv: str) -> list[dict[str, Any]]:
    """Time requests in engines with and without `exact`, in turns."""
    loaded = {exact: load(model, kv, exact=exact) for exact in (False, True)}
    engines = {
        exact: LLM(own, num_blocks=400, max_num_seqs=8, prefix_caching=False) for exact, own in loaded.items()
    }
    vocab = loaded[True].geometry.vocab_size
    params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(22):
        prompts = [random_tokens(200, seed=8 * turn + i, vocab=vocab) for i in range(8)]
        for exact in (False, True) if turn % 2 else (True, False):
            began = time.perf_counter()
            engines[exact].generate(prompts, params)
            seconds[exact].append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(seconds[False][2:], seconds[True][2:], strict=True)]
    low, middle, high = (percentile(ratios, q) for q in (10, 50, 90))
    said = f"{middle:.3f} times the time, {low:.3f} to {high:.3f}"
    return [finding(f"{Path(model).name}, {kv}", said, "at most 1.01", middle <= 1.01, seconds=seconds[True])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("family", "kv", "schedule"):
        parser.add_argument(f"--{name}", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=600, help="limit")
    parser.add_argument("--variant", choices=library.VARIANTS)
    parser.add_argument("--wrong-order", action="store_true")
    parser.add_argument("--receipts", type=int, metavar="N")
    parser.add_argument("--cost", metavar="MODEL")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/exact-VARIANT-cpu.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("kvq").setLevel(logging.ERROR)
    if given.receipts is not None or given.cost is not None:
        with tempfile.TemporaryDirectory() as folder:
            if given.cost is None:
                rows = receipts(given.receipts, Path(folder))
            else:
                rows = cost(given.cost, (given.kv or ["int4"])[0])
        name = "receipts" if given.cost is None else f"cost-{Path(given.cost).stem}"
        sys.exit(not report(given.out or RESULTS / f"exact-{name}-cpu.json", rows))
    found = library.variants()
    built = [x for x in found if given.variant in (None, x.variant)] if isinstance(found, list) else []
    if not built:
        sys.exit(f"this machine does not run {given.variant}")
    with patch.object(library, "variants", lambda: built), tempfile.TemporaryDirectory() as folder:
        trial = Trial(given, Path(folder))
        trial.run()
        if not given.family and not given.wrong_order:
            trial.refuse(INEXACT)
    rows = [{name: sorted(found) for name, found in trial.met.items()} | dict(trial.total)]
    more = {"variant": built[0].variant, "differences": trial.differences, "refused": trial.refused}
    path = given.out or RESULTS / f"exact-{built[0].variant}-cpu.json"
    write_json(path, envelope(sys.argv, torch.device("cpu"), rows, more))
    met = {name: len(found) for name, found in trial.met.items()}
    count = f"{len(trial.differences)} differences, {len(trial.refused)} refused"
    print(f"{dict(trial.total)}, {met}, {count}; {path}")
    sys.exit(bool(trial.differences) != given.wrong_order)


if __name__ == "__main__":
    main()
