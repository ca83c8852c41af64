"""Prefixes that move to an engine in another process over loopback TCP: tokens a second by KV format.

    OMP_NUM_THREADS=1 python -m benchmarks.handover.prefixes --json benchmarks/results/handover-cpu.json

The KV is made up, since its values don't matter here: random bytes, indexed for a prompt of each
repeat. The formats take turns within every repeat. Each prefix is read back in the receiving process, and
must have the bytes that were sent.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvq.bench.random_model import random_model
from kvq.engine import AsyncLLM
from kvq.evals.report.results import envelope, write_json

_CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 16, "max_position_embeddings": 16384,
    "vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def engine(folder: Path, kv: str, tokens: int, **options: Any) -> AsyncLLM:
    """An engine with room for one prefix, over the same random weights in both processes."""
    torch.manual_seed(0)
    model = random_model(_CONFIG, folder, torch.device("cpu"))
    blocks = tokens // model.layout.block_size + 64
    return AsyncLLM(model, kv, num_blocks=blocks, max_num_seqs=1, max_context=tokens, **options)


def do(llm: AsyncLLM, work: Any) -> Any:
    """Run something in the engine's thread."""
    return llm.hand_over._call(work)


def prompt_of(repeat: int, tokens: int) -> list[int]:
    """The tokens of a repeat."""
    return torch.randint(3, 4096, (tokens,), generator=torch.Generator().manual_seed(repeat)).tolist()


def make_up(llm: AsyncLLM, prompt: list[int]) -> None:
    """Index random bytes as the KV of a prompt."""
    core = llm.core
    manager, generator = core.scheduler.manager, torch.Generator().manual_seed(len(prompt))
    manager.drop_cached()
    sequence = manager.adopt(manager.prompt(prompt), len(prompt))
    for group, (start, table) in enumerate(zip(sequence.starts, sequence.tables, strict=True)):
        for block in table[start:]:
            size = core.model.layout.groups[group].block_bytes
            words = torch.randint(-(2**62), 2**62, (size // 8,), dtype=torch.int64, generator=generator)
            core.runner.cache.write_block(group, block, words.view(torch.uint8))
    manager.commit(sequence)
    manager.free(sequence)


def digest(llm: AsyncLLM, prompt: list[int]) -> str:
    """The digest of a cached prefix, and nothing is cached afterwards."""
    manager, hasher = llm.core.scheduler.manager, xxhash.xxh3_128()
    length, starts, tables = manager.prefixes.held(manager.prompt(prompt))
    for group, (start, table) in enumerate(zip(starts, tables, strict=True)):
        for block in table[start:]:
            hasher.update(llm.core.runner.cache.read_block(group, block).numpy())
    manager.drop_cached()
    return f"{length} {hasher.hexdigest()}"


def receive(folder: Path, kv: str, tokens: int) -> None:
    """Receive prefixes; print the address, and the digest of the prefix for every repeat that comes in."""
    llm = engine(folder, kv, tokens, hand_over_listen="0")
    print(llm.hand_over.address, flush=True)
    for line in sys.stdin:
        print(do(llm, lambda line=line: digest(llm, prompt_of(int(line), tokens))), flush=True)
    llm.close()


class _Route:
    """An engine, and the process that it sends to."""

    def __init__(self, folder: Path, kv: str, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.handover.prefixes", "--receive", str(folder / "b"), kv]
        self.process = subprocess.Popen(
            [*command, "--tokens", str(tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        address = self.process.stdout.readline().strip()
        self.llm, self.tokens = engine(folder / "a", kv, tokens, hand_over_to=address), tokens
        self.block_bytes = [group.block_bytes for group in self.llm.core.model.layout.groups]
        self.seconds: list[float] = []

    def run(self, repeat: int) -> None:
        """Send one prefix, and compare what arrived."""
        prompt = prompt_of(repeat, self.tokens)
        do(self.llm, lambda: make_up(self.llm, prompt))
        began = time.perf_counter()
        length = self.llm.hand_over.send_prefix(prompt).result()
        self.seconds.append(time.perf_counter() - began)
        self.process.stdin.write(f"{repeat}\n")
        self.process.stdin.flush()
        arrived = self.process.stdout.readline().strip()
        assert length == self.tokens, (length, self.tokens)
        assert arrived == do(self.llm, lambda: digest(self.llm, prompt)), "the bytes differ"

    def close(self) -> None:
        self.llm.close()
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Measure, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--receive", nargs=2, metavar=("FOLDER", "KV"))
    parser.add_argument("--kv", nargs="+", default=["bf16", "int4", "int4_mean"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if options.receive:
        receive(Path(options.receive[0]), options.receive[1], options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        routes = {kv: _Route(Path(folder) / kv, kv, options.tokens) for kv in options.kv}
        for repeat in range(options.repeats + 1):
            for route in routes.values():
                route.run(repeat)
        rows = []
        for kv, route in routes.items():
            route.close()
            rates = sorted(options.tokens / seconds for seconds in route.seconds[1:])  # the first warms up
            tenths = statistics.quantiles(rates, n=10)
            rows.append(
                {
                    "kv": kv,
                    "kv_bytes_per_token": route.llm.core.model.layout.kv_bytes_per_token,
                    "tokens_per_s": {"median": statistics.median(rates), "p10": tenths[0], "p90": tenths[-1]},
                }
            )
            first = routes[options.kv[0]].seconds[1:]
            pairs = [one / other for one, other in zip(first, route.seconds[1:], strict=True)]
            rows[-1]["times_the_first"] = statistics.median(pairs)  # within a repeat
            print(rows[-1])
    if options.json:
        facts = {"model": _CONFIG, "tokens": options.tokens, "repeats": options.repeats}
        command = ["python", "-m", "benchmarks.handover.prefixes", *sys.argv[1:]]
        write_json(options.json, envelope(command, torch.device("cpu"), rows, facts))


if __name__ == "__main__":
    main()
