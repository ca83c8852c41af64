"""KvqCache beside transformers' QuantizedCache and DynamicCache, on the embedded model, in one run.

    OMP_NUM_THREADS=1 python benchmarks/quantized_cache.py --json benchmarks/results/quantized-cache-cpu.json

Needs `optimum-quanto` for the rival (`pip install optimum-quanto`). Every repeat runs all caches
one after another: prefill, then single-token steps, greedily. Perplexity and KL divergence from
DynamicCache in fp32 are taken over the steps of one token, as each cache serves them: 512 tokens of
held-out text after a prefill of 512, with the standard error of the change. QuantizedCache keeps 0 to 127
recent tokens unquantized, KvqCache with residual_length=128 always 128; by itself KvqCache quantizes
every token as it is written.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

from kvq.cache import KvqCache, register_attention
from kvq.evals import default_text, read_text
from kvq.evals.report.results import envelope, source_commit, write_json

TINY = Path(__file__).parents[1] / "kvq" / "models" / "tiny"
RIVAL = "QuantizedCache quanto int4"
RECENT = 128  # tokens, QuantizedCache's own default


@dataclass(frozen=True)
class Contender:
    """A cache and the model and attention it runs with."""

    name: str
    model: Any
    attention: str
    make: Callable[[Any], Any]  # from a config

    def open(self) -> Any:
        """Choose the attention and make an empty cache."""
        self.model.set_attn_implementation(self.attention)
        return self.make(self.model.config)


def contenders(fp32: Any, bf16: Any) -> list[Contender]:
    """All caches of the comparison, the reference first."""

    def quanto(config: Any) -> Any:
        return QuantizedCache("quanto", config, nbits=4)

    found = [
        Contender("DynamicCache fp32", fp32, "sdpa", lambda config: DynamicCache(config=config)),
        Contender("DynamicCache bf16", bf16, "sdpa", lambda config: DynamicCache(config=config)),
        Contender(RIVAL, fp32, "sdpa", quanto),
    ]
    for kv, recent in (("int4", RECENT), ("int4", 0), ("fp32", 0)):
        for attention in ("kvq", "sdpa"):
            found.append(
                Contender(
                    f"KvqCache {kv}{f', {recent} recent' if recent else ''}, attention {attention}",
                    fp32,
                    attention,
                    lambda config, kv=kv, recent=recent: KvqCache(config, kv=kv, residual_length=recent),
                )
            )
    return found


@torch.inference_mode()
def run(contender: Contender, ids: Tensor, steps: int) -> dict[str, Any]:
    """Prefill and `steps` greedy steps: seconds of both, tokens, and the bytes held at the end."""
    cache = contender.open()
    begin = time.perf_counter()
    logits = contender.model(ids, past_key_values=cache, logits_to_keep=1).logits
    prefilled = time.perf_counter()
    tokens = [logits[:, -1].argmax(-1, keepdim=True)]
    for _ in range(steps):
        logits = contender.model(tokens[-1], past_key_values=cache).logits
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    end = time.perf_counter()
    return {
        "prefill": prefilled - begin,
        "steps": end - prefilled,
        "tokens": torch.cat(tokens, dim=1),
        "bytes": held_bytes(cache),
    }


@torch.inference_mode()
def quality(contender: Contender, windows: Tensor, prefill: int, exact: list[Tensor]) -> dict[str, Any]:
    """Perplexity and mean KL divergence (nats) over the tokens after `prefill`, one a step.

    `exact`: the reference's log-probabilities by step, [windows, vocab]; filled by the first contender.
    """
    is_first = not exact
    changes, losses, divergence = [], [], 0.0
    cache = contender.open()
    contender.model(windows[:, :prefill], past_key_values=cache, logits_to_keep=1)
    for at in range(prefill, windows.shape[1] - 1):
        logits = contender.model(windows[:, at : at + 1], past_key_values=cache).logits[:, 0].float()
        found = logits.log_softmax(dim=-1)
        if is_first:
            exact.append(found)
        wanted = exact[at - prefill]
        target = windows[:, at + 1 : at + 2]
        losses.append(-found.gather(1, target))
        changes.append(wanted.gather(1, target) - found.gather(1, target))
        divergence += float((wanted.exp() * (wanted - found)).sum())
    change = torch.cat(changes).double()
    return {
        "perplexity": float(torch.cat(losses).double().mean().exp()),
        "perplexity_change": float(change.mean().exp() - 1),
        "perplexity_change_error": float(change.std() / change.numel() ** 0.5),
        "kl_mean": divergence / change.numel(),
    }


def held_bytes(cache: Any) -> int:
    """Bytes of K and V that a cache keeps between two steps."""
    if isinstance(cache, KvqCache):
        return cache.nbytes
    total = 0
    for layer in cache.layers:
        total += layer.keys.nbytes + layer.values.nbytes
        for quantized in (getattr(layer, "_quantized_keys", None), getattr(layer, "_quantized_values", None)):
            if quantized is not None:
                total += quantized._data._data.nbytes + quantized._scale.nbytes + quantized._shift.nbytes
    return total


def check(all_of_them: list[Contender], ids: Tensor) -> None:
    """fp32 blocks must give DynamicCache's tokens, int4 blocks the same in both attentions' reach."""
    by_name = {contender.name: contender for contender in all_of_them}
    want = run(by_name["DynamicCache fp32"], ids, 16)["tokens"]
    for attention in ("kvq", "sdpa"):
        got = run(by_name[f"KvqCache fp32, attention {attention}"], ids, 16)["tokens"]
        if not torch.equal(got, want):
            sys.exit(
                f"KvqCache fp32 under {attention} gave other tokens than DynamicCache; nothing was timed"
            )
    logits = []
    for attention in ("kvq", "sdpa"):
        contender = by_name[f"KvqCache int4, attention {attention}"]
        with torch.inference_mode():
            logits.append(contender.model(ids, past_key_values=contender.open(), logits_to_keep=1).logits)
    worst = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    if worst > 1e-2:
        sys.exit(f"KvqCache int4 differs by {worst:.1e} between both attentions; nothing was timed")


def measure(found: list[Contender], windows: Tensor, shape: tuple[int, int, int], repeats: int) -> list[dict]:
    """Rows of one workload (batch, prompt, steps): caches interleaved, medians and percentiles."""
    batch, prompt, steps = shape
    ids = windows[:batch, :prompt]
    results: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in found}
    for repeat in range(repeats + 1):  # the first one warms up
        for contender in found[repeat % len(found) :] + found[: repeat % len(found)]:
            result = run(contender, ids, steps)
            if repeat:
                results[contender.name].append(result)
    rows = []
    for name, several in results.items():
        step_ms = sorted(1e3 * r["steps"] / steps for r in several)
        rows.append(
            {
                "name": name,
                "batch": batch,
                "prompt_tokens": prompt,
                "steps": steps,
                "repeats": repeats,
                "step_ms_median": statistics.median(step_ms),
                "step_ms_p10": quantile(step_ms, 0.1),
                "step_ms_p90": quantile(step_ms, 0.9),
                "prefill_s_median": statistics.median(r["prefill"] for r in several),
                "total_s_median": statistics.median(r["prefill"] + r["steps"] for r in several),
                "kv_bytes_per_token": several[0]["bytes"] / (batch * (prompt + steps)),
            }
        )
    return rows


def quantile(ordered: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    at = q * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--text", help="a text file; default: held-out text that ships with Python")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens, for the perplexity")
    parser.add_argument("--quick", action="store_true", help="a small run that shows only that it works")
    options = parser.parse_args()
    source_commit()
    register_attention()
    fp32, bf16 = (
        AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    text = read_text(options.text) if options.text else default_text()
    ids = torch.tensor(AutoTokenizer.from_pretrained(TINY)(text.text)["input_ids"])
    length, prefill, rows_of_text = (192, 128, 2) if options.quick else (1024, 512, options.windows)
    windows = ids[: length * rows_of_text].view(rows_of_text, length)
    shapes = [(2, 128, 4)] if options.quick else [(8, 960, 160), (1, 960, 160)]
    found = contenders(fp32, bf16)
    check(found, windows[:2])
    reference: list[Tensor] = []
    scores = {contender.name: quality(contender, windows, prefill, reference) for contender in found}
    reference.clear()
    rows = []
    for shape in shapes:
        rows += measure(found, windows, shape, 1 if options.quick else options.repeats)
    for row in rows:
        row |= scores[row["name"]]
        print(
            f"{row['name']:42s} batch {row['batch']}  step {row['step_ms_median']:6.2f} ms "
            f"({row['step_ms_p10']:.2f} to {row['step_ms_p90']:.2f})  prefill "
            f"{row['prefill_s_median']:.2f} s  {row['kv_bytes_per_token']:7.0f} B/token  "
            f"perplexity {row['perplexity']:.3f} ({row['perplexity_change']:+.2%} "
            f"+- {row['perplexity_change_error']:.2%})  KL {row['kl_mean']:.5f}"
        )
    if options.json:
        facts = {
            "model": "tiny",
            "text": text.name,
            "text_digest": text.digest,
            "perplexity_tokens": windows.shape[0] * (windows.shape[1] - 1 - prefill),
        }
        result = envelope(sys.argv, torch.device("cpu"), rows, facts)
        result["versions"]["optimum-quanto"] = version("optimum-quanto")
        write_json(options.json, result)


if __name__ == "__main__":
    main()
