"""Time a GGUF file in kvq and llama.cpp in turns: `python -m benchmarks.gguf_speed FILE --modules FOLDER`.

Rows are of one depth: tokens per second of a prompt, from its start to the first token, and of decoding after
it, with the share of what reading the weights once a step allows at the bandwidth that the same run measures.
With `--slots`, so many requests begin together; tokens over their whole time are `both_tokens_s`. With
`--once`, each engine computes one prompt, which all turns go on from. FOLDER is the node_modules in which npm
installed node-llama-cpp 3.21.1.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import kvq
from kvq.bench.timing import percentile
from kvq.evals.report.results import envelope, write_json
from kvq.fileio import check_writable
from kvq.kernels.draw.reference import likeliest
from kvq.weights import weight_bytes

_SCRIPT = Path(__file__).with_suffix(".mjs")
Row = dict[str, Any]


class Llama:
    """llama.cpp in a process of its own, which waits between turns."""

    def __init__(self, modules: Path, file: Path, threads: int) -> None:
        command = ["node", str(_SCRIPT), str(modules.resolve()), str(file.resolve()), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def turn(self, options: argparse.Namespace, depth: int, kind: str, seed: int) -> tuple[float, float]:
        """Return seconds until all requests have a token, and until they have all tokens."""
        assert self._process.stdin is not None
        asked = {"depth": depth, "tokens": options.tokens, "type": kind, "seed": seed, "slots": options.slots}
        asked["once"] = options.once
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return found["first_s"], found["all_s"]

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


class Kvq:
    """kvq in this process: a session for every depth and format."""

    def __init__(self, file: Path, activations: str) -> None:
        self.model = kvq.load(file, activations=activations)
        self._open: dict[str, Any] = {}  # sequences to go on with, by format

    def turn(self, options: argparse.Namespace, depth: int, kind: str, seed: int) -> tuple[float, float]:
        """Return seconds until all requests have a token, and until they have all tokens."""
        slots, room = options.slots, depth + (options.turns + 2) * options.tokens + 64
        if kind in self._open:
            session, sequences, tokens = self._open[kind]
            begin = perf_counter()
            tokens = _next(session, sequences, tokens)
            first = perf_counter()
            for _ in range(options.tokens):
                tokens = _next(session, sequences, tokens)
            return first - begin, perf_counter() - begin
        session = self.model.with_kv(kind).session(max_tokens=slots * room, max_sequences=slots)
        sequences, tokens = [session.new_sequence() for _ in range(slots)], []
        begin = perf_counter()
        for slot, sequence in enumerate(sequences):
            ids = [100 + (31 * i * (seed + 1) + 977 * seed + 13 * slot) % 20000 for i in range(depth)]
            for at in range(0, depth, 512):
                results = session.forward([(sequence, ids[at : at + 512])])
            tokens.append(int(likeliest(results[0].logits)[1]))
        first = perf_counter()
        for _ in range(options.tokens):
            tokens = _next(session, sequences, tokens)
        end = perf_counter()
        if options.once:
            self._open[kind] = session, sequences, tokens
        else:
            for sequence in sequences:
                session.free(sequence)
        return first - begin, end - begin


def _next(session: Any, sequences: Any, tokens: list[int]) -> list[int]:
    """Return the likeliest next tokens of all sequences."""
    work = [(sequence, [token]) for sequence, token in zip(sequences, tokens, strict=True)]
    return [int(likeliest(result.logits)[1]) for result in session.forward(work)]


def bandwidth() -> float:
    """Return bytes per second at which all threads read memory."""
    values = torch.ones(1 << 27, dtype=torch.int64)
    found = []
    for _ in range(5):
        begin = perf_counter()
        values.sum()
        found.append(values.nbytes / (perf_counter() - begin))
    return max(found)


def measured(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all depths."""
    own, rows = Kvq(options.file, options.activations), []
    llama = Llama(options.modules, options.file, options.threads)
    nbytes, speed = weight_bytes(own.model.weights.model), bandwidth()
    try:
        for depth in map(int, options.depths.split(",")):
            found: dict[str, list[tuple[float, float]]] = {}
            for turn in range(options.turns + 1):  # the first warms up
                for kind in options.kv.split(","):
                    found.setdefault(f"kvq {kind}", []).append(own.turn(options, depth, kind, turn))
                for kind in options.llama_kv.split(","):
                    name = f"llama.cpp {kind}"
                    found.setdefault(name, []).append(llama.turn(options, depth, kind, turn))
            for name, turns in found.items():
                row = row_of(name, options, depth, turns[1:])
                row["share_of_bandwidth"] = row["decode_tokens_s"] / options.slots * nbytes / speed
                rows.append(row)
                print({key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    finally:
        llama.close()
    return [{"weight_bytes": nbytes, "read_bytes_s": speed}, *rows]


def row_of(name: str, options: argparse.Namespace, depth: int, turns: list[tuple[float, float]]) -> Row:
    """Return medians, and tenths, of one engine at one depth."""
    slots, tokens = options.slots, options.tokens
    prompts = [slots * depth / first for first, _ in turns]
    decodes = [slots * tokens / (whole - first) for first, whole in turns]
    row = {"engine": name, "depth": depth, "slots": slots, "decode_tokens_s": median(decodes)}
    row["decode_p10_p90"] = [percentile(decodes, 10), percentile(decodes, 90)]
    if not options.once:
        row["both_tokens_s"] = median(slots * (depth + tokens) / whole for _, whole in turns)
        row["prompt_tokens_s"] = median(prompts)
        row["prompt_p10_p90"] = [percentile(prompts, 10), percentile(prompts, 90)]
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--modules", type=Path, required=True, help="node_modules with node-llama-cpp")
    parser.add_argument("--depths", default="128,2048")
    parser.add_argument("--tokens", type=int, default=32, help="decoded after each prompt (%(default)s)")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--slots", type=int, default=1, help="requests at once (%(default)s)")
    parser.add_argument("--once", action="store_true", help="one prompt for all turns, of one depth")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="bf16", help="formats of kvq (%(default)s)")
    parser.add_argument("--llama-kv", default="F16", help="types of llama.cpp (%(default)s)")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out:
        check_writable(options.out)
    torch.set_num_threads(options.threads)
    rows = measured(options)
    if options.out:
        command = ["python -m benchmarks.gguf_speed", *sys.argv[1:]]
        write_json(options.out, envelope(command, torch.device("cpu"), rows, {}))


if __name__ == "__main__":
    main()
