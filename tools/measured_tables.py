"""Write the measured tables of the documentation from the JSON that benchmark runs left.

python tools/measured_tables.py          # rewrite the tables
python tools/measured_tables.py --check  # exit 1 if a page and its JSON differ
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- end -->)", re.S)


# Rows of `kvq bench blocks` that docs/blocks.md shows, in words, and the limit each was built to.
BLOCK_ROWS = {
    "allocate": ("take a block for a sequence, free ones left", "0.30"),
    "allocate_evicting": ("take a block that has to leave the prefix index first", ""),
    "allocate_with_slots": ("take a block and list its 16 slots", ""),
    "free": ("give back an indexed block", "0.21"),
    "append": ("one more token for a sequence, all of them in one step", "0.65"),
    "commit": ("commit a sampled token", ""),
    "hash": ("chained SHA-256 of a 16-token block", "1.0"),
    "publish": ("index a computed block", ""),
    "lookup": ("look up a prefix, per block, hashing included", ""),
    "lookup_long": ("look up a cached prompt of 100,000 tokens, hashing included", "10,000"),
    "start_long": ("start a sequence from that hit, sharing 6,249 blocks", ""),
    "fork": ("fork a sequence of 64 blocks", ""),
    "append_after_fork": ("the first write after a fork, with its copy order", ""),
}
REAL_MODELS = {
    "smollm2": "SmolLM2 135M",
    "gemma3": "Gemma 3 270M",
    "qwen05": "Qwen2.5-Coder 0.5B",
    "qwen15": "Qwen2.5-Coder 1.5B",
}
_SIZES = (
    (1 << 13, "up to 8 Ki"),
    (1 << 16, "up to 64 Ki"),
    (1 << 18, "up to 256 Ki"),
    (1 << 21, "up to 1 Mi"),
)
Cells = Sequence[str | None]


def markdown(heads: str, rows: Iterable[Cells], note: str = "") -> str:
    """Return a Markdown table with a note below it.

    `heads`: separated by bars; heads of figures, which are right-aligned, end with a colon. A cell that is
    None has no text.
    """
    names = [head.strip() for head in heads.split("|")]
    rules = "|".join("--:" if name.endswith(":") else "---" for name in names)
    lines = [_line([name.removesuffix(":") or None for name in names]), f"|{rules}|", *map(_line, rows)]
    return "\n".join([*lines, "", note] if note else lines)


def _line(cells: Cells) -> str:
    return "".join("| " if cell is None else f"| {cell} " for cell in cells) + "|"


def _origin(result: dict, *packages: str) -> str:
    """Return date, hardware, versions and commit of a result."""
    versions = ", ".join(f"{package} {result['versions'][package]}" for package in ("torch", *packages))
    return f"{result['date'][:10]}, {result['device']}, {versions}, commit {result['commit']}."


def _range(row: dict, name: str, form: str, *, median: str = "", to: str = "-") -> str:
    """Return a median with its 10th and 90th percentiles."""
    middle = row[name + median]
    return f"{middle:{form}} ({row[f'{name}_p10']:{form}} {to} {row[f'{name}_p90']:{form}})"


def _optional(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else f"{value:{form}}"


def _falls_short(holds: bool) -> str:
    return "" if holds else "falls short"


def real_table(result: dict) -> str:
    """Return the table of a part of `python -m benchmarks.real`: formats by models, at the usual length."""
    of_sizes: dict[str, Counter[int]] = {}
    for row in result["rows"]:
        of_sizes.setdefault(row["model"], Counter())[row["settings"]["tokens"]] += 1
    most = {model: max(sizes, key=lambda n: (sizes[n], n)) for model, sizes in of_sizes.items()}
    longest = [row for row in result["rows"] if row["settings"]["tokens"] == most[row["model"]]]
    cells, bits = {}, {}
    for row in longest:
        if row["kv"] == "fp32":
            continue
        bits[row["kv"]] = max(row["bits_per_element"], bits.get(row["kv"], 0))
        cells[row["kv"], row["model"]] = _load_check(row) if "said" in row else _closeness(row)
    models = [model for model in REAL_MODELS if any(model == name for _, name in cells)]
    rows = [
        [f"`{kv}`", f"{bits[kv]:g}", *(cells.get((kv, model), "") for model in models)]
        for kv in sorted(bits, key=lambda kv: -bits[kv])
    ]
    dates = sorted(row["date"][:10] for row in result["rows"])
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    tokens = {model: max(row["tokens"] for row in longest if row["model"] == model) for model in models}
    counts = f"{max(tokens.values()):,} tokens"
    if fewer := {model: n for model, n in tokens.items() if n < max(tokens.values())}:
        counts += f" ({'; '.join(f'{REAL_MODELS[model]}: {n:,}' for model, n in fewer.items())})"
    base = "each engine's unquantized KV" if "logits" in longest[0] else "KV in fp32"
    versions = result["versions"]
    devices = sorted({row.get("device", result["device"]) for row in longest})
    return markdown(
        " | ".join(["KV", "bits / element:", *(f"{REAL_MODELS[model]}:" for model in models)]),
        rows,
        f"{counts} in windows of {longest[0]['settings']['context']:,}, compared with {base}. "
        f"{when}, {'; '.join(devices)}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}.\n",
    )


def _closeness(row: dict) -> str:
    """Return mean KL with half its interval, change of perplexity, and the share of equal tokens."""
    span, change, same = row["intervals"]["kl_mean"], row["perplexity_change"], row["top1_agreement"]
    half = f" ± {(span[1] - span[0]) / 2:.5f}" if span else ""  # few tokens have no interval
    return f"{row['kl_mean']:.5f}{half}, {change:+.2%}, {same:.1%}"


def _load_check(row: dict) -> str:
    """Return the verdict of the load check on a format, and what was measured."""
    said = row["said"] if row["check_kl_mean"] is None else f"{row['said']} ({row['check_kl_mean']:.3f})"
    return f"{said}; {row['measured']} ({row['kl_mean']:.4f}, {row['perplexity_change']:+.1%})"


def real_speed_table(result: dict) -> str:
    """Return the table of `python -m benchmarks.real.speed`: two formats, and the second over the first."""

    def cells(row: dict) -> Cells:
        first = row.get("first_ms")
        return [
            *(REAL_MODELS[row["model"]], f"{row['depth']:,}", str(row["sequences"]), f"`{row['kv']}`"),
            *(_range(row, "between_ms", ".1f"), f"{row['between_ms_ratio']:.2f}"),
            *((f"{first:,.0f}", f"{row['first_ms_ratio']:.2f}") if first else ("", "")),
        ]

    heads = "model | depth: | sequences: | KV | ms between tokens (p10 - p90): | relative to `int8`:"
    return markdown(
        f"{heads} | TTFT, ms: | relative to `int8`:",
        map(cells, result["rows"]),
        f"Weights in INT4. {_origin(result)}\n",
    )


def snapshots_table(result: dict) -> str:
    """Return the table of a benchmarks/snapshots.py result."""

    def cells(row: dict) -> Cells:
        first, again, turn = (row["ttft_s"][kind]["median"] for kind in ("first", "again", "next turn"))
        hits = [f"{s * 1000:.0f} ms ({s / first:.1%})" for s in (again, turn)]
        return [f"`{row['family']}`", f"{row['state_bytes']:,} B", f"{first:.2f} s", *hits]

    tokens, repeats = result["rows"][0]["prompt_tokens"], len(result["rows"][0]["ttft_s"]["first"]["all"])
    return markdown(
        "family | state of a sequence: | TTFT of a new prompt: | of the same prompt: | of the next turn:",
        map(cells, result["rows"]),
        f"Medians of {repeats} prompts of {tokens:,} tokens. {_origin(result)}\n",
    )


def speculation_table(result: dict) -> str:
    """Return the table of a `kvq bench speculation` result: every format and number of drafts."""
    first, load = result["rows"][0], result["load"]
    return markdown(
        "KV | drafts | right: | found offline: | tokens a step, expected: | tokens/s (p10 - p90): "
        "| faster, expected:",
        [
            [
                f"`{row['kv']}`",
                "as many as pay" if row["adapts"] else str(row["k"] or "none"),
                _optional(row["acceptance"], ".1%"),
                _optional(row["offline_acceptance"], ".1%"),
                f"{row['tokens_per_step']:.2f}, {_optional(row['expected_tokens_per_step'], '.2f')}",
                _range(row, "output_tokens_per_s", ",.0f"),
                f"{row['speedup']:.2f}, {_optional(row['expected_speedup'], '.2f')}",
            ]
            for row in result["rows"]
        ],
        f"{result['model']}; {load['requests']} requests of {load['input_len']} tokens and "
        f"{load['output_len']} more, {first['batch']} at a time, temperature {load['temperature']:g}, "
        f"medians of {load['repeats']} runs. {_origin(result)}\n",
    )


def watermarks_table(result: dict) -> str:
    """Return the tables of a benchmarks/watermark.py result: marked texts, then unmarked ones."""

    def marked(row: dict) -> Cells:
        shares = [
            f"{row[kind] / row['texts']:.1%} ({low:.1%} to {high:.1%})"
            for kind in ("detected", "detected_in_text")
            for low, high in [row[f"{kind}_interval"]]
        ]
        low, high = row["perplexity_change_interval"]
        change = f"{row['perplexity_change']:+.0%} ({low:+.0%} to {high:+.0%})"
        return [f"`{row['scheme']}`", str(row["temperature"]), *shares, f"{row['z_median']:.1f}", change]

    def unmarked(name: str, row: dict) -> Cells:
        least, most = row["below_1_percent_of_keys"]
        alarms = f"{row['false_alarms']} ({row['false_alarms'] / row['tests']:.4%})"
        below = f"{row['below_1_percent'] / row['tests']:.2%}"
        return [f"`{name}`", f"{row['tests']:,}", alarms, below, f"{least:.2%}, {most:.2%}"]

    first = result["rows"][0]
    return "\n\n".join(
        [
            markdown(
                "scheme | temperature: | found: | in their text alone: | median z: | perplexity:",
                map(marked, result["rows"]),
                f"{first['texts']} texts of {first['tokens']} tokens each, with {result['marking_keys']} "
                f"keys, found at p below {result['false_alarm_bar']}; perplexity of the drawn tokens under "
                f"the model as it is, against unmarked texts; 95% intervals.",
            ),
            markdown(
                "unmarked texts | tests: | p below 0.0001: | p below 0.01: "
                "| of the luckiest and the unluckiest key:",
                [
                    unmarked(*one)
                    for one in {r["scheme"].partition(",")[0]: r for r in result["rows"]}.items()
                ],
                f"{result['windows']:,} windows of WikiText-2's test split and {first['texts']} texts of the "
                f"model, each tested with {result['other_keys']} keys. Model: {result['model']}. "
                f"{_origin(result, 'transformers')}",
            ),
        ]
    )


def latents_table(result: dict) -> str:
    """Return the table of `kvq bench attention --expanded`: decode over latents and over heads."""
    times = {(row["name"], row["kv"]): row for row in result["rows"]}

    def cells(kv: str) -> Cells:
        latents, heads = pair = [times[f"kvq, {kind}", kv] for kind in ("latents", "heads")]
        spans = [f"{row['ms_median']:.1f} ms ({row['ms_p10']:.1f} to {row['ms_p90']:.1f})" for row in pair]
        return [f"`{kv}`", *spans, f"{heads['ms_median'] / latents['ms_median']:.1f}"]

    return markdown(
        "KV | latents: | heads: | heads / latents:",
        map(cells, dict.fromkeys(row["kv"] for row in result["rows"])),
        f"Medians, 10th to 90th percentile. {_origin(result)}\n",
    )


def weights_table(result: dict) -> str:
    """Return the table of a benchmarks/weights_quality.py result."""
    texts = {None: "", "default": "help topics", "valid.txt": "WikiText-2 valid"}

    def cells(row: dict) -> Cells:
        low, high = row.get("perplexity_change_interval", (None, None))
        change = "" if low is None else f"{row['perplexity_change']:+.2%} ({low:+.2%} to {high:+.2%})"
        bits = _optional(row.get("bits_per_weight"), ".3g", "")
        return [row["name"], texts[row.get("calibrated_on")], bits, f"{row['perplexity']:.2f}", change]

    return markdown(
        "weights | calibrated on | bits / weight: | perplexity: | change:",
        map(cells, result["rows"]),
        f"Model: {result['model']}, KV in fp32. Text: WikiText-2 test, {result['windows']} windows of "
        f"{result['context']} tokens; changes with 95% intervals, resampled in pairs. 128 samples where a "
        f"text is named. {_origin(result, 'transformers')}",
    )


def quantizing_table(result: dict) -> str:
    """Return the table of a benchmarks/weights_speed.py result."""
    first = result["rows"][0]
    return markdown(
        "method | seconds, median (least): | peak memory beside its inputs: | error of outputs:",
        [
            [
                row["name"],
                f"{row['seconds_median']:.1f} ({row['seconds_min']:.1f})",
                f"{row['peak_bytes_beyond_inputs'] / 2**20:,.0f} MiB",
                f"{row['relative_error']:.3f}",
            ]
            for row in result["rows"]
        ],
        f"One layer of {first['in_features']:,} x {first['out_features']:,} to {first['format']}, "
        f"{first['repeats']} times each. {_origin(result, 'transformers')}",
    )


def gguf_table(result: dict) -> str:
    """Return the table of a benchmarks/gguf_files.py result."""
    first = result["rows"][0]
    return markdown(
        "model | type | MB: | seconds to write: | perplexity: | in llama.cpp: | difference:",
        [
            [
                row["name"],
                row["type"],
                f"{row['file_bytes'] / 1e6:,.0f}",
                f"{row['seconds']:.1f}",
                f"{row['perplexity']:.3f}",
                f"{row['perplexity_llama_cpp']:.3f}",
                f"{row['change']:+.2%}",
            ]
            for row in result["rows"]
        ],
        f"Unquantized: {_before(result)}. {result['text']}, {first['tokens']:,} tokens in windows of "
        f"{result['context']}; llama.cpp of node-llama-cpp {result['node_llama_cpp']}, which keeps K and V "
        f"in F16 and rounds inputs to 8 bits. {_origin(result, 'transformers')}",
    )


def _before(result: dict) -> str:
    """Return the perplexity of every model of a benchmarks/gguf_files.py result without quantization."""
    found = {row["name"]: row["perplexity_before"] for row in result["rows"]}
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())


def decode_table(result: dict) -> str:
    """Return the table of weights-decode-cpu.json, whose benchmark benchmarks/peers replaces."""
    return markdown(
        "| weights | tokens/s, median (p10 - p90): | over fp32: | over llama.cpp's: | MB:",
        [
            [
                f"{row['name']} {row.get('version', '')}",
                row["weights"],
                _range(row, "tokens_per_s", ".0f", median="_median"),
                *(
                    "" if ratio is None else f"{ratio:.2f}x"
                    for ratio in (row["over_fp32"], row["over_llama_cpp"])
                ),
                f"{row['weights_bytes'] / 1e6:.0f}" if "weights_bytes" in row else "",
            ]
            for row in result["rows"]
        ],
        f"One sequence, {result['tokens']} tokens decoded after {result['depth']}, fp32 KV, "
        f"{result['repeats']} turns of each, one after another. A random Llama of 78.7 M parameters; "
        f"llama.cpp's f32, q8_0 and q4_0 are compared with fp32, int8 and int4. "
        f"{_origin(result, 'transformers')}",
    )


def peers_table(result: dict) -> str:
    """Return the table of a `python -m benchmarks.peers` result."""

    def cells(row: dict) -> Cells:
        begin = [row["part"], row["engine"], row["weights"], f"`{row['kv']}`"]
        if row["reason"] is not None:
            return [*begin, None, row["reason"].splitlines()[-1], None, None]
        between = "" if row["itl_ms_p50"] is None else f"{row['itl_ms_p50']:.1f}, {row['itl_ms_p99']:.1f}"
        rate = _range(row, "tokens_per_s", ",.0f", median="_median")
        agree = f"{row['check_equal']} of {row['check_tokens']}"
        return [*begin, str(row["threads"] or "its own"), rate, between, agree]

    versions = {row["engine"]: row["settings"]["version"] for row in result["rows"] if row["reason"] is None}
    rivals = ", ".join(f"{engine} {version}" for engine, version in versions.items() if engine != "kvq")
    busy = {0: "with nothing beside", 1: "beside a busy process"}
    beside = busy.get(result["neighbours"], f"beside {result['neighbours']} busy processes")
    quota = f"a quota of {result['quota_cores']:g} cores each" if result["quota_cores"] else "no quota"
    how = "; ".join(filter(None, (f"{result['turns']} turns of each, {beside}, {quota}", rivals)))
    return markdown(
        "| | weights | KV | threads: | tokens/s, median (p10 - p90): | between tokens p50, p99, ms: "
        "| tokens that agree:",
        map(cells, result["rows"]),
        f"{how}. {_origin(result, 'transformers')}",
    )


def caches_table(result: dict) -> str:
    """Return the table of a benchmarks/quantized_cache.py result."""
    first = result["rows"][0]
    return markdown(
        "cache | batch: | ms a step, median (p10 - p90): | bytes / token: | perplexity: | change: | mean KL:",
        [
            [
                row["name"],
                str(row["batch"]),
                _range(row, "step_ms", ".1f", median="_median"),
                f"{row['kv_bytes_per_token']:,.0f}",
                f"{row['perplexity']:.2f}",
                f"{row['perplexity_change']:+.2%} ± {row['perplexity_change_error']:.2%}",
                f"{row['kl_mean']:.4f}",
            ]
            for row in result["rows"]
        ],
        f"{first['steps']} steps of one token after {first['prompt_tokens']} tokens. {first['repeats']} "
        f"repeats; each runs all caches one after another. Perplexity over {result['perplexity_tokens']:,} "
        f"such steps; its change with the standard error. "
        f"Model (very small): {result['model']}, fp32 weights. Text: {result['text']}. "
        f"{_origin(result, 'transformers', 'optimum-quanto')}\n",
    )


def recipes_table(result: dict) -> str:
    """Return the table of a `kvq tune` result: recipes, and the best uniform format within their bytes."""
    rows = result["rows"][1:]
    is_held = any(row["bits_held"] > row["bits_per_element"] + 0.005 for row in rows)
    held = f"held at {result['context']:,} tokens: | " if is_held else ""
    recipes = {row["kv_bytes_per_token"]: row for row in reversed(rows) if row["kind"] != "uniform"}

    def cells(size: int, recipe: dict) -> Cells:
        rivals = [row for row in rows if row["kind"] == "uniform" and row["kv_bytes_per_token"] <= size]
        found = [f"{recipe['bits_per_element']:.4g}" + " (requested)" * (recipe["kind"] == "chosen")]
        found += [f"{recipe['bits_held']:.4g}"] * is_held
        # The sum is None for a uniform format that was better than the search's recipe
        found += [_with_interval(recipe), _optional(recipe["expected_kl"], ".5f")]
        found += [f"{recipe['perplexity_change']:+.2%}"]
        if not rivals:
            return found + ["-"] * 4
        best = min(rivals, key=lambda row: row["kl_mean"])
        found += [f"`{best['kv']}`", f"{best['bits_per_element']:.4g}", _with_interval(best)]
        return [*found, f"{recipe['kl_mean'] / best['kl_mean']:.2f}"]

    return markdown(
        f"bits / element: | {held}mean KL, 95% interval: | sum of halves: | perplexity: "
        "| best uniform format of the same size or less | its bits / element: | its mean KL, 95% interval: "
        "| KL, recipe / uniform:",
        [cells(*one) for one in sorted(recipes.items())],
        f"Model: {result['model']}. Searched on {result['text']}, measured on {result['held_out']}, "
        f"{result['rows'][0]['tokens']:,} tokens in windows of {result['context']}; "
        f"{result['seconds']:,.0f} s. {_origin(result)}\n",
    )


def _with_interval(row: dict) -> str:
    """Return a mean divergence with its 95% interval, if there were enough windows for one."""
    bounds = row["kl_mean_interval"]
    return f"{row['kl_mean']:.5f}" + (f" ({bounds[0]:.5f} to {bounds[1]:.5f})" if bounds else "")


def quality_table(result: dict) -> str:
    """Return the table of `kvq eval --tasks perplexity,kl`: divergence and perplexity with intervals."""
    first, *rows = result["rows"]
    is_held = any(row.get("bits_held", 0) > row["bits_per_element"] + 0.005 for row in result["rows"])
    columns = {
        "KV": "`{kv}`",
        "bits / element:": "{bits_per_element:.4g}",
        **({f"held at {result['context']:,} tokens:": "{bits_held:.4g}"} if is_held else {}),
        "mean KL, 95% interval:": "{kl_mean:.5f} ({kl[0]:.5f} to {kl[1]:.5f})",
        "KL 99.9%:": "{kl_p999:.3f}",
        "perplexity, 95% interval:": "{perplexity_change:+.2%} ({ppl[0]:+.2%} to {ppl[1]:+.2%})",
        "same top token:": "{top1_agreement:.1%}",
    }

    def cells(row: dict) -> Cells:
        spans = {"kl": row["intervals"]["kl_mean"], "ppl": row["intervals"]["perplexity_change"]}
        return [form.format(**row, **spans) for form in columns.values()]

    took = sum(task["seconds"] for task in result["tasks"])
    peak = max(task["peak_bytes"] for task in result["tasks"])
    return markdown(
        " | ".join(columns),
        map(cells, rows),
        f"Compared with {first['kv']}. Model: {result['model']}. Text: {result['text']}, {first['tokens']:,} "
        f"tokens in {first['documents']} windows of {result['context']}; {took:,.0f} s, peak memory "
        f"{peak / 2**20:,.0f} MiB. {_origin(result)}\n",
    )


def needle_table(result: dict) -> str:
    """Return the table of `kvq eval --tasks needle`: retrieved by length, over the whole grid, and inside.

    Records at depths 0 and 1 lie at a prompt's ends, where recipes may keep tokens exact.
    """
    rows = result["needle"]
    lengths = sorted({row["length"] for row in rows})

    def cells(summary: dict) -> Cells:
        own = [row for row in rows if row["kv"] == summary["kv"]]
        return [
            f"`{summary['kv']}`",
            *(f"{_retrieved([row for row in own if row['length'] == length]):.0%}" for length in lengths),
            f"{summary['retrieved']:.1%}",
            f"{summary['retrieved_low']:.1%} to {summary['retrieved_high']:.1%}",
            f"{_retrieved([row for row in own if 0 < row['depth'] < 1]):.1%}",
        ]

    trials = result["needle_summary"][0]["trials"]
    return markdown(
        " | ".join(
            ["KV", *(f"{n:,} tokens:" for n in lengths), "all:", "95% interval:", "not at either end:"]
        ),
        map(cells, result["needle_summary"]),
        f"Model: {result['model']}. Text: {result['text']}. {trials:,} prompts per format. "
        f"{_origin(result)}\n",
    )


def _retrieved(rows: list[dict]) -> float:
    return sum(row["hits"] for row in rows) / sum(row["trials"] for row in rows)


def findings_table(result: dict) -> str:
    """Return the table of a result of benchmarks/reliability.py, floods.py or fuzz."""
    more = "" if result.get("scale", 1) == 1 else f" Counts and times scaled by {result['scale']:g}."
    if busy := result.get("neighbours", 0):
        more += f" Beside {busy} busy process{'es' if busy > 1 else ''}."
    return markdown(
        "what | found: | asked |",
        [
            [row["what"], _found(row["found"]), str(row["asked"]), _falls_short(row["holds"])]
            for row in result["rows"]
        ],
        f"{result['seconds']:,.0f} s.{more} {_origin(result)}\n",
    )


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_found(one)}" for name, one in value.items())
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def _simulated(row: dict, name: str, form: str) -> str:
    """Return a measured figure, the simulated one, and the latter's error."""
    return f"{row[name]:{form}}, {row[f'simulated_{name}']:{form}} ({row[f'ratio_{name}'] - 1:+.0%})"


def predictions_table(result: dict) -> str:
    """Return the table of the loads that benchmarks/capacity.py simulated."""
    return markdown(
        "load | KV | tokens/s, measured, simulated: | TTFT p50, ms: | ITL p50, ms: | preempted: |",
        [
            [
                row["load"],
                f"`{row['kv']}`",
                _simulated(row, "output_tokens_per_s", ",.1f"),
                _simulated(row, "ttft_ms_p50", ",.0f"),
                _simulated(row, "itl_ms_p50", ",.1f"),
                f"{row['preemptions']:.0f}, {row['simulated_preemptions']:.0f}",
                _falls_short(row["holds"] or row["load"] == "calibration"),
            ]
            for row in result["rows"]
        ],
        _of_random_weights(result, f"Medians of {result['rows'][0]['repeats']} repeats. "),
    )


def routing_table(result: dict) -> str:
    """Return the table of Ray's routers, measured and simulated."""
    first = result["rows"][0]
    return markdown(
        "router | hits, measured, simulated: | TTFT p50, ms: | TTFT mean, ms: | HTTP and Ray, ms: |",
        [
            [
                row["routing"],
                _simulated(row, "prefix_hit_rate", ".1%"),
                _simulated(row, "ttft_ms_p50", ",.0f"),
                _simulated(row, "ttft_ms_mean", ",.0f"),
                f"{row['way_ms']:,.0f}",
                _falls_short(row["holds"]),
            ]
            for row in result["rows"]
        ],
        _of_random_weights(
            result, f"{first['requests']} requests, {first['rate']:g} a second, `{first['kv']}`. "
        ),
    )


def memory_table(result: dict) -> str:
    """Return the table of planned memory against an engine's: every term, and the process."""

    def cells(row: dict) -> Cells:
        *terms, pool, whole = (
            (term["name"], f"{term['found_bytes'] / 1e6:,.1f} ({term['off']:+.2%})") for term in row["terms"]
        )
        return [row["model"], f"`{row['kv']}`", ", ".join(map(" ".join, terms)), pool[1], whole[1]]

    return markdown(
        "model | KV | terms, MB (off) | pool, MB (off): | process, MB (off):",
        map(cells, result["rows"]),
        _of_random_weights(result, "Benchmark: "),
    )


def users_table(result: dict) -> str:
    """Return the table of planned users that run together."""

    def cells(rows: list[dict]) -> Cells:
        return [
            f"`{rows[0]['kv']}`",
            ", ".join(f"{row['users']} ({row['block_size']})" for row in rows),
            ", ".join(str(row["preempted"]) for row in rows),
            ", ".join(str(row["preempted_of_5_percent_more"]) for row in rows),
            _falls_short(all(row["holds"] for row in rows)),
        ]

    formats: dict[str, list[dict]] = {}
    for row in result["rows"]:
        formats.setdefault(row["kv"], []).append(row)
    return markdown(
        "KV | planned (block size) | preempted | preempted with 5% more |",
        map(cells, formats.values()),
        _of_random_weights(result),
    )


def _of_random_weights(result: dict, how: str = "") -> str:
    return f"{how}{result['model']}, random weights. {_origin(result)}\n"


def engine_table(result: dict) -> str:
    """Return the table of a benchmarks/engine.py result."""

    def cells(row: dict) -> Cells:
        begin = [row["case"], row["name"], f"`{row['kv']}`"]
        if "reason" in row:
            return [*begin, row["reason"], None, None, None, None]
        return [
            *begin,
            _range(row, "output_tokens_per_s", ".1f"),
            f"{row['total_tokens_per_s']:,.0f}",
            f"{row['ttft_ms_p99']:,.0f}",
            "-" if row["itl_ms_p50"] is None else f"{row['itl_ms_p50']:.0f}, {row['itl_ms_p99']:.0f}",
            _optional(row["preemptions"], ".0f"),
        ]

    return markdown(
        "case | | KV | output tokens/s (p10 - p90): | total tokens/s: | TTFT p99, ms: | ITL p50, p99, ms: "
        "| preempted:",
        map(cells, result["rows"]),
        f"Medians of {result['rows'][0]['repeats']} repeats; each runs the cases one after another. "
        f"{result['model']}, random weights. {_origin(result, 'transformers')}\n",
    )


def kernels_table(result: dict) -> str:
    """Return the tables of a benchmarks/cpu.py result: kvq beside torch, then fewer bits beside more."""
    cases: dict[str, list[dict]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
    note = (
        f"{result['date'][:10]}, {result['device']}, kernels for {result['variant']}, torch "
        f"{result['versions']['torch']}, commit {result['commit']}. `{result['command']}`. SDPA runs "
        "over contiguous K and V, query heads folded into the query length or with `enable_gqa`; kvq over "
        "shuffled blocks of 64 tokens. Error: largest difference to fp64, relative to the largest output. "
        "Of reading: of what a sum over 512 MB reads a second in the same run."
    )
    return "\n\n".join(
        [
            markdown(
                "| K and V | ms, median (p10 - p90): | GB/s: | of reading: | error: | beside the best SDPA:",
                _attention_rows(cases),
            ),
            markdown(
                "query heads a KV head: | tokens: | batches x depths: | int8 / bf16: | int4 / int8:",
                _ratio_rows(cases),
            ),
            markdown(
                "one token of 8 sequences at depth 8,192 | write, us: | of its attention, GQA 4: | GQA 1:",
                _write_rows(cases),
                f"{note}\n",
            ),
        ]
    )


def _attention_rows(cases: dict[str, list[dict]]) -> Iterator[Cells]:
    for case, rows in cases.items():
        rivals = [row["ms_median"] for row in rows if row["name"].startswith("SDPA")]
        for row in rows if rivals else ():
            is_own = row["name"] == "kvq"
            yield [
                case if row is rows[0] else "",
                row["kv"] if is_own else f"{row['kv']}, {row['name'].replace('SDPA', 'torch SDPA')}",
                _range(row, "ms", ".2f", median="_median"),
                f"{row['gb_per_s']:.1f}",
                f"{row['fraction_of_bandwidth']:.0%}",
                f"{row['max_relative_error']:.0e}",
                f"{min(rivals) / row['ms_median']:.2f}x" if is_own else "",
            ]


def _ratio_rows(cases: dict[str, list[dict]]) -> Iterator[Cells]:
    """Yield the time of fewer bits over the time of more, by tokens in the batch."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case, rows in cases.items():
        ms = {row["kv"]: row["ms_median"] for row in rows if "ms_median" in row}
        if set(ms) != {"bf16", "int8", "int4"}:
            continue
        tokens = rows[0]["tokens"]
        size = next(text for most, text in _SIZES if tokens <= most)
        ratios = (ms["int8"] / ms["bf16"], ms["int4"] / ms["int8"])
        found.setdefault((case.partition("GQA ")[2], size), []).append(ratios)
    for (group, size), pairs in found.items():
        spans = [f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in zip(*pairs, strict=True)]
        yield [group, size, str(len(pairs)), *spans]


def _write_rows(cases: dict[str, list[dict]]) -> Iterator[Cells]:
    """Yield the time to store one token of every sequence, beside the attention of that step."""
    written = {group: cases.get(f"write 8 at 8192, GQA {group}", []) for group in (4, 1)}
    for row in written[4]:
        shares = []
        for group, rows in written.items():
            us = next(x["us_median"] for x in rows if x["kv"] == row["kv"])
            attended = next(x for x in cases[f"decode 8 x 8192, GQA {group}"][::-1] if x["kv"] == row["kv"])
            shares.append(f"{us / 1e3 / attended['ms_median']:.1%}")
        yield [row["kv"], f"{row['us_median']:.1f}", *shares]


def blocks_table(result: dict) -> str:
    """Return the table of a `kvq bench blocks` result."""
    scales = list(dict.fromkeys(row["scale"] for row in result["rows"]))[1:-1]  # loads of several sequences
    rows = {(row["operation"], row["scale"]): row for row in result["rows"]}
    for row in result["rows"]:  # operations on one prompt in a large pool
        rows.setdefault((row["operation"], scales[-1]), row)
    filled = result["utilization"]
    return markdown(
        " | ".join(["median us (10th to 90th percentile)", *(f"{scale}:" for scale in scales), "limit:"]),
        [
            [words, *(_times(rows.get((name, scale))) for scale in scales), limit]
            for name, (words, limit) in BLOCK_ROWS.items()
        ],
        f"Of the slots in live blocks {filled['paged_mean']:.1%} hold tokens ({filled['sequences']} "
        f"running sequences, log-normal lengths with median {filled['median_length']} tokens, "
        f"block {filled['block_size']}); one buffer of {filled['longest']:,} tokens each would be "
        f"{filled['contiguous_mean']:.1%} full. `{result['command']}`, {result['date'][:10]}, "
        f"{result['device']}, Python {result['versions']['python']}, commit {result['commit']}.\n",
    )


def _times(row: dict | None) -> str:
    """Return `median (p10 - p90)` in microseconds."""
    if row is None:
        return ""
    return _range(row, "us", f",.{0 if row['us_median'] >= 100 else 2}f", median="_median")


def perplexity_table(result: dict) -> str:
    """Return the table of a `kvq perplexity` result."""

    def cells(row: dict) -> Cells:
        window = row["attention_window"]
        return [
            f"`{row['kv']}`" + (f" with a {window}-token attention window" if window else ""),
            f"{row['bits_per_element']:g}",
            f"{row['kv_bytes_per_token']:,.0f}",
            f"{row['compression']:.2f}x",
            f"{row['perplexity']:.2f}",
            f"{row['perplexity_change']:+.2%}",
            f"{row['kl_mean']:.5f}",
            f"{row['top1_agreement']:.1%}",
        ]

    check = result["instrument"]
    return markdown(
        "KV format | bits / element: | bytes / token: | tokens in the same memory, bf16 = 1: | perplexity: "
        "| change: | mean KL: | same top token:",
        map(cells, result["rows"]),
        f"Model (very small): {result['model']}. "
        f"Text: {result['text']}, {result['rows'][0]['tokens']:,} tokens in windows of {result['context']}. "
        f"{result['date'][:10]}, {result['device']}, torch {result['versions']['torch']}, "
        f"transformers {result['versions']['transformers']}. "
        f"This model and text {'can' if check['passed'] else 'cannot'} show damage: perplexity "
        f"{check['window_change']:+.1%} with attention limited to "
        f"{check['window_tokens']} tokens, {check['int2_change']:+.1%} with {check['int2_format']}.\n",
    )


# Keys that only one kind of result has: in its first row, in its last row, or in the result itself. The first
# kind that fits is taken.
_KINDS: tuple[tuple[str, str, Callable[[dict], str]], ...] = (
    ("first", "between_ms", real_speed_table),
    ("result", "licences", real_table),
    ("result", "quota_cores", peers_table),
    ("first", "load", predictions_table),
    ("first", "expanded", latents_table),
    ("first", "tokens_per_step", speculation_table),
    ("first", "detected", watermarks_table),
    ("first", "share_of_first", snapshots_table),
    ("first", "routing", routing_table),
    ("first", "terms", memory_table),
    ("first", "preempted_of_5_percent_more", users_table),
    ("first", "holds", findings_table),
    ("first", "ttft_ms_p99", engine_table),
    ("result", "utilization", blocks_table),
    ("result", "variant", kernels_table),
    ("result", "sensitivities", recipes_table),
    ("result", "needle_summary", needle_table),
    ("last", "quantize_seconds", weights_table),
    ("first", "statistics_seconds_per_1024_tokens", quantizing_table),
    ("first", "over_fp32", decode_table),
    ("first", "perplexity_llama_cpp", gguf_table),
    ("first", "intervals", quality_table),
    ("first", "step_ms_median", caches_table),
    ("result", "rows", perplexity_table),
)


def table(result: dict) -> str:
    """Return the Markdown table of a result, with what it was measured on."""
    places = {"first": result["rows"][0], "last": result["rows"][-1], "result": result}
    made = next(make(result) for place, key, make in _KINDS if key in places[place])
    return made.replace(", 1 threads", ", 1 thread")


def rewritten(page: str) -> str:
    """Return a page's text with every marked table made again from its JSON."""

    def fill(match: re.Match[str]) -> str:
        result = json.loads((ROOT / match[2]).read_text(encoding="utf-8"))
        return match[1] + table(result) + match[3]

    return MARK.sub(fill, page)


def main() -> None:
    """Rewrite the pages, or check them."""
    differ = False
    folders = (ROOT / "docs", ROOT / "benchmarks" / "results")
    for path in (ROOT / "README.md", *(page for folder in folders for page in sorted(folder.glob("*.md")))):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old)
        differ |= old != new
        if "--check" not in sys.argv:
            path.write_text(new, encoding="utf-8")
    sys.exit("--check" in sys.argv and differ)


if __name__ == "__main__":
    main()
