"""Snapshots of hybrid models: time to answer a long prompt that was seen before.

    OMP_NUM_THREADS=1 python -m benchmarks.snapshots --json benchmarks/results/snapshots-cpu.json

Random models of a few layers of each kind. In every repeat each prompt comes for the first time, again, and
as the next turn of a conversation, one after another; all must give the tokens that they give without prefix
caching.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvq.bench.random_model import random_model
from kvq.engine import LLM, SamplingParams
from kvq.evals.report.results import envelope, write_json

_COMMON = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 16384, "vocab_size": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "falcon_h1": {
        "num_hidden_layers": 2, "mamba_d_ssm": 512, "mamba_n_heads": 16, "mamba_d_head": 32,
        "mamba_d_state": 64, "mamba_chunk_size": 128,
    },
    "lfm2": {
        "num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2,
        "full_attn_idxs": [2, 5], "block_ff_dim": 512, "block_multiple_of": 64,
    },
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


def measure(family: str, tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    """TTFT in seconds of every kind of request, and how many tokens it found."""
    config = {"model_type": family, **_COMMON, **MODELS[family]}
    model = random_model(config, folder / family, torch.device("cpu"))
    llm = LLM(model, "int8", kv_memory="256MiB", max_num_seqs=4)
    plain = LLM(model, "int8", kv_memory="256MiB", max_num_seqs=4, prefix_caching=False)
    ttft: dict[str, list[float]] = {"first": [], "again": [], "next turn": []}
    found: dict[str, int] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(repeats):
        prompt, answer = torch.randint(3, 4096, (tokens,), generator=generator).tolist(), list[int]()
        for kind in ttft:
            if kind == "next turn":
                prompt = prompt + answer + torch.randint(3, 4096, (40,), generator=generator).tolist()
            output = llm.generate([prompt], PARAMS)[0]
            answer = output.outputs[0].token_ids
            if answer != plain.generate([prompt], PARAMS)[0].outputs[0].token_ids:
                raise SystemExit(
                    f"{family}: a prompt that came {kind} gave other tokens than without caching"
                )
            ttft[kind].append(output.timing.ttft_s)
            found[kind] = output.receipt.cached_tokens
    medians = {kind: statistics.median(seconds) for kind, seconds in ttft.items()}
    state = model.layout.states
    return {
        "family": family,
        "prompt_tokens": tokens,
        "state_bytes": state.block_bytes if state is not None else 0,
        "kv_bytes_per_token": model.layout.kv_bytes_per_token,
        "ttft_s": {k: {"median": medians[k], "all": sorted(v)} for k, v in ttft.items()},
        "found_tokens": found,
        "share_of_first": {k: medians[k] / medians["first"] for k in ("again", "next turn")},
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", dest="path")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(family, options.tokens, options.repeats, Path(folder)) for family in MODELS]
    for row in rows:
        times = ", ".join(f"{k} {v['median']:.3f} s" for k, v in row["ttft_s"].items())
        print(f"{row['family']}: {times}; again takes {row['share_of_first']['again']:.1%} of it")
    if options.path:
        command = ["python", "-m", "benchmarks.snapshots", *sys.argv[1:]]
        write_json(options.path, envelope(command, torch.device("cpu"), rows))


if __name__ == "__main__":
    main()
