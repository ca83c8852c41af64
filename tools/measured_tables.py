"""Write the measured tables of the documentation from the JSON that benchmark runs left.

python tools/measured_tables.py          # rewrite the tables
python tools/measured_tables.py --check  # exit 1 if a page and its JSON differ
"""

import json
import re
import sys
from collections import Counter
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


def table(result: dict) -> str:
    """Return the Markdown table of a result, with what it was measured on."""
    if "between_ms" in result["rows"][0]:
        return real_speed_table(result)
    if "licences" in result:
        return real_table(result)
    if "quota_cores" in result:
        return peers_table(result)
    if "load" in result["rows"][0]:
        return predictions_table(result)
    if "expanded" in result["rows"][0]:
        return latents_table(result)
    if "tokens_per_step" in result["rows"][0]:
        return speculation_table(result)
    if "detected" in result["rows"][0]:
        return watermarks_table(result)
    if "share_of_first" in result["rows"][0]:
        return snapshots_table(result)
    if "routing" in result["rows"][0]:
        return routing_table(result)
    if "terms" in result["rows"][0]:
        return memory_table(result)
    if "preempted_of_5_percent_more" in result["rows"][0]:
        return users_table(result)
    if "holds" in result["rows"][0]:
        return findings_table(result)
    if "ttft_ms_p99" in result["rows"][0]:
        return engine_table(result)
    if "utilization" in result:
        return blocks_table(result)
    if "variant" in result:
        return kernels_table(result)
    if "sensitivities" in result:
        return recipes_table(result)
    if "needle_summary" in result:
        return needle_table(result)
    if "quantize_seconds" in result["rows"][-1]:
        return weights_table(result)
    if "statistics_seconds_per_1024_tokens" in result["rows"][0]:
        return quantizing_table(result)
    if "over_fp32" in result["rows"][0]:
        return decode_table(result)
    if "intervals" in result["rows"][0]:
        return quality_table(result)
    return caches_table(result) if "step_ms_median" in result["rows"][0] else perplexity_table(result)


REAL_MODELS = {
    "smollm2": "SmolLM2 135M",
    "gemma3": "Gemma 3 270M",
    "qwen05": "Qwen2.5-Coder 0.5B",
    "qwen15": "Qwen2.5-Coder 1.5B",
}


def real_table(result: dict) -> str:
    """The table of a part of `python -m benchmarks.real`: formats by models, of the tokens with most rows."""
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
        cells[row["kv"], row["model"]] = _checked(row) if "said" in row else _closeness(row)
    models = [model for model in REAL_MODELS if any(model == name for _, name in cells)]
    lines = [
        f"| KV | bits / element | {' | '.join(REAL_MODELS[model] for model in models)} |",
        f"|---|--:|{'--:|' * len(models)}",
    ]
    for kv in sorted(bits, key=lambda kv: -bits[kv]):
        told = " | ".join(cells.get((kv, model), "") for model in models)
        lines.append(f"| `{kv}` | {bits[kv]:g} | {told} |")
    dates = sorted(row["date"][:10] for row in result["rows"])
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    tokens = {model: max(row["tokens"] for row in longest if row["model"] == model) for model in models}
    counts = f"{max(tokens.values()):,} tokens"
    if fewer := {model: n for model, n in tokens.items() if n < max(tokens.values())}:
        counts += f" ({', '.join(f'{REAL_MODELS[model]} {n:,}' for model, n in fewer.items())})"
    base = "each engine's unquantized KV" if "logits" in longest[0] else "KV in fp32"
    told = f"{counts} in windows of {longest[0]['settings']['context']:,}, against {base}."
    versions = result["versions"]
    devices = sorted({row.get("device", result["device"]) for row in longest})
    libraries = f"torch {versions['torch']}, transformers {versions['transformers']}"
    where = f"{when}, {' and '.join(devices)}, {libraries}."
    return "\n".join([*lines, "", f"{told} {where}\n"])


def _closeness(row: dict) -> str:
    """Mean KL with half its interval, change of perplexity, and the share of tokens that stay."""
    span, change, same = row["intervals"]["kl_mean"], row["perplexity_change"], row["top1_agreement"]
    half = f" ± {(span[1] - span[0]) / 2:.5f}" if span else ""  # of few tokens there is none
    return f"{row['kl_mean']:.5f}{half}, {change:+.2%}, {same:.1%}"


def _checked(row: dict) -> str:
    """Set what the load check said of a format beside what it costs."""
    said = row["said"] if row["check_kl_mean"] is None else f"{row['said']} ({row['check_kl_mean']:.3f})"
    return f"{said}; {row['measured']} ({row['kl_mean']:.4f}, {row['perplexity_change']:+.1%})"


def real_speed_table(result: dict) -> str:
    """The table of `python -m benchmarks.real.speed`: two formats, and what the second takes of the first."""
    lines = [
        "| model | depth | sequences | KV | ms between tokens (p10 - p90) | of `int8`'s "
        "| ms to the first token | of `int8`'s |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        first = row.get("first_ms")
        told = f"{first:,.0f} | {row['first_ms_ratio']:.2f}" if first else " | "
        lines.append(
            f"| {REAL_MODELS[row['model']]} | {row['depth']:,} | {row['sequences']} | `{row['kv']}` "
            f"| {row['between_ms']:.1f} ({row['between_ms_p10']:.1f} - {row['between_ms_p90']:.1f}) "
            f"| {row['between_ms_ratio']:.2f} | {told} |"
        )
    return "\n".join([*lines, "", f"Weights in INT4. {_measured(result)}"])


def snapshots_table(result: dict) -> str:
    """The table of a benchmarks/snapshots.py result."""
    lines = [
        "| family | state of a sequence | TTFT of a new prompt | again | as the next turn |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        first, again, turn = (row["ttft_s"][kind]["median"] for kind in ("first", "again", "next turn"))
        lines.append(
            f"| `{row['family']}` | {row['state_bytes']:,} B | {first:.2f} s | {again * 1000:.0f} ms "
            f"({again / first:.1%}) | {turn * 1000:.0f} ms ({turn / first:.1%}) |"
        )
    tokens, repeats = result["rows"][0]["prompt_tokens"], len(result["rows"][0]["ttft_s"]["first"]["all"])
    return "\n".join([*lines, "", f"Medians of {repeats} prompts of {tokens:,} tokens. {_measured(result)}"])


def speculation_table(result: dict) -> str:
    """The table of a `kvq bench speculation` result: every format and number of drafts."""
    lines = [
        "| KV | drafts | right | found offline | tokens a step, expected | tokens/s (p10 - p90) "
        "| faster, expected |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        drafts = "as many as pay" if row["adapts"] else str(row["k"] or "none")
        rate = "output_tokens_per_s"
        share = {key: _share(row[key]) for key in ("acceptance", "offline_acceptance")}
        lines.append(
            f"| `{row['kv']}` | {drafts} | {share['acceptance']} "
            f"| {share['offline_acceptance']} "
            f"| {row['tokens_per_step']:.2f}, {_number(row['expected_tokens_per_step'])} "
            f"| {row[rate]:,.0f} ({row[rate + '_p10']:,.0f} - {row[rate + '_p90']:,.0f}) "
            f"| {row['speedup']:.2f}, {_number(row['expected_speedup'])} |"
        )
    first = result["rows"][0]
    load = result["load"]
    told = (
        f"{result['model']}; {load['requests']} requests of {load['input_len']} tokens and "
        f"{load['output_len']} more, {first['batch']} at a time, temperature {load['temperature']:g}, "
        f"medians of {load['repeats']} runs"
    )
    return "\n".join([*lines, "", f"{told}. {_measured(result)}"])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def watermarks_table(result: dict) -> str:
    """The tables of a benchmarks/watermark.py result: marked texts, then unmarked ones."""
    lines = [
        "| scheme | temperature | found | in their text alone | median z | perplexity |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        shares = [
            f"{row[kind] / row['texts']:.1%} ({low:.1%} to {high:.1%})"
            for kind in ("detected", "detected_in_text")
            for low, high in [row[f"{kind}_interval"]]
        ]
        low, high = row["perplexity_change_interval"]
        lines.append(
            f"| `{row['scheme']}` | {row['temperature']} | {' | '.join(shares)} | {row['z_median']:.1f} "
            f"| {row['perplexity_change']:+.0%} ({low:+.0%} to {high:+.0%}) |"
        )
    first = result["rows"][0]
    lines += [
        "",
        f"{first['texts']} texts of {first['tokens']} tokens each, with {result['marking_keys']} keys, found "
        f"at p below {result['false_alarm_bar']}; perplexity of the drawn tokens under the model as it is, "
        f"against unmarked texts; 95% intervals.",
        "",
        "| unmarked texts | tests | p below 0.0001 | p below 0.01 | of the luckiest and the unluckiest key |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, row in {row["scheme"].partition(",")[0]: row for row in result["rows"]}.items():
        least, most = row["below_1_percent_of_keys"]
        share = row["false_alarms"] / row["tests"]
        lines.append(
            f"| `{name}` | {row['tests']:,} | {row['false_alarms']} ({share:.4%}) "
            f"| {row['below_1_percent'] / row['tests']:.2%} | {least:.2%}, {most:.2%} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"{result['windows']:,} windows of WikiText-2's test split and {first['texts']} texts of the "
            f"model, each tested with {result['other_keys']} keys. Model: {result['model']}. "
            f"{measured_on(result)}",
        ]
    )


def latents_table(result: dict) -> str:
    """The table of `kvq bench attention --expanded`: decode over latents and over heads."""
    lines = ["| KV | latents | heads | heads / latents |", "|---|--:|--:|--:|"]
    times = {(row["name"], row["kv"]): row for row in result["rows"]}
    for kv in dict.fromkeys(row["kv"] for row in result["rows"]):
        latents, heads = (times[f"kvq, {kind}", kv] for kind in ("latents", "heads"))
        cells = [
            f"{row['ms_median']:.1f} ms ({row['ms_p10']:.1f} to {row['ms_p90']:.1f})"
            for row in (latents, heads)
        ]
        lines.append(f"| `{kv}` | {' | '.join(cells)} | {heads['ms_median'] / latents['ms_median']:.1f} |")
    return "\n".join([*lines, "", f"Medians, 10th to 90th percentile. {_measured(result)}"])


def weights_table(result: dict) -> str:
    """The table of a benchmarks/weights_quality.py result."""
    lines = ["| weights | calibrated on | bits / weight | perplexity | change |", "|---|---|--:|--:|--:|"]
    for row in result["rows"]:
        low, high = row.get("perplexity_change_interval", (None, None))
        change = "" if low is None else f"{row['perplexity_change']:+.2%} ({low:+.2%} to {high:+.2%})"
        texts = {None: "", "default": "help topics", "valid.txt": "WikiText-2 valid"}
        text = texts[row.get("calibrated_on")]
        bits = row.get("bits_per_weight")
        lines.append(
            f"| {row['name']} | {text} | {'' if bits is None else f'{bits:.3g}'} "
            f"| {row['perplexity']:.2f} | {change} |"
        )
    lines.append(
        f"\nModel: {result['model']}, KV in fp32. Text: WikiText-2 test, {result['windows']} windows of "
        f"{result['context']} tokens; changes with 95% intervals, resampled in pairs. 128 samples where a "
        f"text is named. {measured_on(result)}"
    )
    return "\n".join(lines)


def quantizing_table(result: dict) -> str:
    """The table of a benchmarks/weights_speed.py result."""
    lines = [
        "| method | seconds, median (least) | peak memory beside its inputs | error of outputs |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {row['name']} | {row['seconds_median']:.1f} ({row['seconds_min']:.1f}) "
        f"| {row['peak_bytes_beyond_inputs'] / 2**20:,.0f} MiB | {row['relative_error']:.3f} |"
        for row in result["rows"]
    ]
    row = result["rows"][0]
    lines.append(
        f"\nOne layer of {row['in_features']:,} x {row['out_features']:,} to {row['format']}, "
        f"{row['repeats']} times each. {measured_on(result)}"
    )
    return "\n".join(lines)


def decode_table(result: dict) -> str:
    """The table of weights-decode-cpu.json, which was measured by what benchmarks/peers replaces."""
    lines = [
        "| | weights | tokens/s, median (p10 - p90) | over fp32 | over llama.cpp's | MB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        ratios = [row["over_fp32"], row["over_llama_cpp"]]
        own, theirs = ("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        size = f"{row['weights_bytes'] / 1e6:.0f}" if "weights_bytes" in row else ""
        lines.append(
            f"| {row['name']} {row.get('version', '')} | {row['weights']} | {row['tokens_per_s_median']:.0f} "
            f"({row['tokens_per_s_p10']:.0f} - {row['tokens_per_s_p90']:.0f}) | {own} | {theirs} | {size} |"
        )
    lines.append(
        f"\nOne sequence, {result['tokens']} tokens decoded after {result['depth']}, fp32 KV, "
        f"{result['repeats']} turns of each, one after another. A random Llama of 78.7 M parameters; "
        f"llama.cpp's f32, q8_0 and q4_0 are compared with fp32, int8 and int4. {measured_on(result)}"
    )
    return "\n".join(lines)


def peers_table(result: dict) -> str:
    """The table of a `python -m benchmarks.peers` result."""
    lines = [
        "| | | weights | KV | threads | tokens/s, median (p10 - p90) | between tokens p50, p99, ms "
        "| tokens that agree |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        start = f"| {row['part']} | {row['engine']} | {row['weights']} | `{row['kv']}` |"
        if row["reason"] is not None:
            lines.append(f"{start} | {row['reason'].splitlines()[-1]} | | |")
            continue
        between = "" if row["itl_ms_p50"] is None else f"{row['itl_ms_p50']:.1f}, {row['itl_ms_p99']:.1f}"
        lines.append(
            f"{start} {row['threads'] or 'its own'} | {row['tokens_per_s_median']:,.0f} "
            f"({row['tokens_per_s_p10']:,.0f} - {row['tokens_per_s_p90']:,.0f}) | {between} "
            f"| {row['check_equal']} of {row['check_tokens']} |"
        )
    versions = {row["engine"]: row["settings"]["version"] for row in result["rows"] if row["reason"] is None}
    rivals = ", ".join(f"{engine} {version}" for engine, version in versions.items() if engine != "kvq")
    busy = {0: "with nothing beside", 1: "beside a busy process"}
    beside = busy.get(result["neighbours"], f"beside {result['neighbours']} busy processes")
    quota = f"a quota of {result['quota_cores']:g} cores each" if result["quota_cores"] else "no quota"
    how = "; ".join(filter(None, (f"{result['turns']} turns of each, {beside}, {quota}", rivals)))
    return "\n".join([*lines, "", f"{how}. {measured_on(result)}"])


def measured_on(result: dict) -> str:
    """Date, hardware, versions and commit."""
    return (
        f"{result['date'][:10]}, {result['device']}, torch {result['versions']['torch']}, "
        f"transformers {result['versions']['transformers']}, commit {result['commit']}."
    )


def caches_table(result: dict) -> str:
    """The table of a benchmarks/quantized_cache.py result."""
    lines = [
        "| cache | batch | ms a step, median (p10 - p90) | bytes / token | perplexity | change | mean KL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['name']} | {row['batch']} "
            f"| {row['step_ms_median']:.1f} ({row['step_ms_p10']:.1f} - {row['step_ms_p90']:.1f}) "
            f"| {row['kv_bytes_per_token']:,.0f} | {row['perplexity']:.2f} "
            f"| {row['perplexity_change']:+.2%} ± {row['perplexity_change_error']:.2%} "
            f"| {row['kl_mean']:.4f} |"
        )
    first = result["rows"][0]
    lines.append(
        f"\nSteps of one token after {first['prompt_tokens']} tokens, {first['steps']} of them, "
        f"{first['repeats']} times, all caches one after another each time; perplexity over "
        f"{result['perplexity_tokens']:,} such steps, its change with standard error. "
        f"Model: {result['model']}, a very small one, fp32 weights. Text: {result['text']}. "
        f"{result['date'][:10]}, {result['device']}, torch {result['versions']['torch']}, "
        f"transformers {result['versions']['transformers']}, optimum-quanto "
        f"{result['versions']['optimum-quanto']}, commit {result['commit']}."
    )
    return "\n".join(lines) + "\n"


def recipes_table(result: dict) -> str:
    """The table of a `kvq tune` result: each recipe, and the best uniform format of at most its bytes."""
    rows = result["rows"][1:]
    is_held = any(row["bits_held"] > row["bits_per_element"] + 0.005 for row in rows)
    held_head = f" held at {result['context']:,} tokens |" if is_held else ""
    lines = [
        f"| bits / element |{held_head} mean KL, 95% interval | sum of halves | perplexity "
        "| best uniform format of at most these bytes | its bits / element | its mean KL, 95% interval "
        "| KL, recipe / uniform |",
        f"|--:|{'--:|' * is_held}--:|--:|--:|---|--:|--:|--:|",
    ]
    recipes = {row["kv_bytes_per_token"]: row for row in reversed(rows) if row["kind"] != "uniform"}
    for size, recipe in sorted(recipes.items()):
        rivals = [row for row in rows if row["kind"] == "uniform" and row["kv_bytes_per_token"] <= size]
        cells = [f"{recipe['bits_per_element']:.4g}" + " (asked for)" * (recipe["kind"] == "chosen")]
        cells += [f"{recipe['bits_held']:.4g}"] * is_held
        total = recipe["expected_kl"]  # None of a uniform format that was better than the search's
        cells += [_with_interval(recipe), "-" if total is None else f"{total:.5f}"]
        cells += [f"{recipe['perplexity_change']:+.2%}"]
        if not rivals:
            cells += ["-"] * 4
        else:
            best = min(rivals, key=lambda row: row["kl_mean"])
            cells += [f"`{best['kv']}`", f"{best['bits_per_element']:.4g}", _with_interval(best)]
            cells += [f"{recipe['kl_mean'] / best['kl_mean']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    text = (
        f"Model: {result['model']}. Searched on {result['text']}, measured on {result['held_out']}, "
        f"{result['rows'][0]['tokens']:,} tokens in windows of {result['context']}; "
        f"{result['seconds']:,.0f} s. "
    )
    return "\n".join(lines) + "\n\n" + text + _measured(result)


def _with_interval(row: dict) -> str:
    """A mean divergence with its 95% interval, where windows were enough for one."""
    bounds = row["kl_mean_interval"]
    return f"{row['kl_mean']:.5f}" + (f" ({bounds[0]:.5f} to {bounds[1]:.5f})" if bounds else "")


def quality_table(result: dict) -> str:
    """The table of `kvq eval --tasks perplexity,kl`: divergence and perplexity with their intervals."""
    rows = result["rows"]
    held = any(row.get("bits_held", 0) > row["bits_per_element"] + 0.005 for row in rows)
    columns = {
        "KV": "`{kv}`",
        "bits / element": "{bits_per_element:.4g}",
        **({f"held at {result['context']:,} tokens": "{bits_held:.4g}"} if held else {}),
        "mean KL, 95% interval": "{kl_mean:.5f} ({kl[0]:.5f} to {kl[1]:.5f})",
        "KL 99.9%": "{kl_p999:.3f}",
        "perplexity, 95% interval": "{perplexity_change:+.2%} ({ppl[0]:+.2%} to {ppl[1]:+.2%})",
        "same top token": "{top1_agreement:.1%}",
    }
    lines = [f"| {' | '.join(columns)} |", f"|---|{'--:|' * (len(columns) - 1)}"]
    for row in rows[1:]:
        spans = {"kl": row["intervals"]["kl_mean"], "ppl": row["intervals"]["perplexity_change"]}
        lines.append(f"| {' | '.join(form.format(**row, **spans) for form in columns.values())} |")
    first = result["rows"][0]
    took = sum(task["seconds"] for task in result["tasks"])
    peak = max(task["peak_bytes"] for task in result["tasks"])
    text = (
        f"Against {first['kv']}. Model: {result['model']}. Text: {result['text']}, {first['tokens']:,} "
        f"tokens in {first['documents']} windows of {result['context']}; {took:,.0f} s, peak memory "
        f"{peak / 2**20:,.0f} MiB. "
    )
    return "\n".join(lines) + "\n\n" + text + _measured(result)


def needle_table(result: dict) -> str:
    """The table of `kvq eval --tasks needle`: retrieved by length, over the whole grid, and less its edges.

    Records at depths 0 and 1 lie at a prompt's ends, where recipes may keep tokens exact.
    """
    rows = result["needle"]
    lengths = sorted({row["length"] for row in rows})
    lines = [
        f"| KV | {' | '.join(f'{length:,} tokens' for length in lengths)} | all | 95% interval "
        "| not at either end |",
        "|---|" + "--:|" * (len(lengths) + 3),
    ]
    for summary in result["needle_summary"]:
        cells = []
        for length in lengths:
            some = [row for row in rows if (row["kv"], row["length"]) == (summary["kv"], length)]
            cells.append(f"{_retrieved(some):.0%}")
        inner = [row for row in rows if row["kv"] == summary["kv"] and 0 < row["depth"] < 1]
        span = f"{summary['retrieved_low']:.1%} to {summary['retrieved_high']:.1%}"
        lines.append(
            f"| `{summary['kv']}` | {' | '.join(cells)} | {summary['retrieved']:.1%} | {span} "
            f"| {_retrieved(inner):.1%} |"
        )
    first = result["needle_summary"][0]
    text = f"Model: {result['model']}. Text: {result['text']}. {first['trials']:,} prompts per format. "
    return "\n".join(lines) + "\n\n" + text + _measured(result)


def _retrieved(rows: list[dict]) -> float:
    return sum(row["hits"] for row in rows) / sum(row["trials"] for row in rows)


def _measured(result: dict) -> str:
    return (
        f"{result['date'][:10]}, {result['device']}, torch {result['versions']['torch']}, "
        f"commit {result['commit']}.\n"
    )


def findings_table(result: dict) -> str:
    """The table of a result of benchmarks/reliability.py floods.py or fuzz."""
    lines = ["| what | found | asked | |", "|---|--:|---|---|"]
    for row in result["rows"]:
        holds = "" if row["holds"] else "falls short"
        lines.append(f"| {row['what']} | {_found(row['found'])} | {row['asked']} | {holds} |")
    more = "" if result.get("scale", 1) == 1 else f" Counts and times scaled by {result['scale']:g}."
    if busy := result.get("neighbours", 0):
        more += f" Beside {busy} busy process{'es' if busy > 1 else ''}."
    lines.append(
        f"\n{result['seconds']:,.0f} s.{more} {result['date'][:10]}, {result['device']}, torch "
        f"{result['versions']['torch']}, commit {result['commit']}."
    )
    return "\n".join(lines) + "\n"


def predictions_table(result: dict) -> str:
    """The table of what benchmarks/capacity.py simulated."""
    lines = [
        "| load | KV | tokens/s, measured, simulated | TTFT p50, ms | ITL p50, ms | preempted | |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row[name]:,.{digits}f}, {row[f'simulated_{name}']:,.{digits}f} "
            f"({row[f'ratio_{name}'] - 1:+.0%})"
            for name, digits in (("output_tokens_per_s", 1), ("ttft_ms_p50", 0), ("itl_ms_p50", 1))
        ]
        preempted = f"{row['preemptions']:.0f}, {row['simulated_preemptions']:.0f}"
        holds = "" if row["holds"] or row["load"] == "calibration" else "falls short"
        lines.append(f"| {row['load']} | `{row['kv']}` | {' | '.join(cells)} | {preempted} | {holds} |")
    return "\n".join(lines) + "\n" + _origin(result, f"Medians of {result['rows'][0]['repeats']} repeats. ")


def routing_table(result: dict) -> str:
    """The table of Ray's routers, as they were and as they were simulated."""
    head = "| router | hits, measured, simulated | TTFT p50, ms | TTFT mean, ms | the way, ms | |"
    lines = [head, "|---|--:|--:|--:|--:|---|"]
    for row in result["rows"]:
        cells = [
            f"{row[name]:{form}}, {row[f'simulated_{name}']:{form}} ({row[f'ratio_{name}'] - 1:+.0%})"
            for name, form in (("prefix_hit_rate", ".1%"), ("ttft_ms_p50", ",.0f"), ("ttft_ms_mean", ",.0f"))
        ]
        cells.append(f"{row['way_ms']:,.0f}")
        lines.append(f"| {row['routing']} | {' | '.join(cells)} | {'' if row['holds'] else 'falls short'} |")
    first = result["rows"][0]
    load = f"{first['requests']} requests, {first['rate']:g} a second, `{first['kv']}`. "
    return "\n".join(lines) + "\n" + _origin(result, load)


def memory_table(result: dict) -> str:
    """The table of planned memory against an engine's: every term, and the process."""
    lines = ["| model | KV | terms, MB (off) | pool, MB (off) | process, MB (off) |", "|---|---|---|--:|--:|"]
    for row in result["rows"]:
        *terms, pool, whole = (
            f"{term['found_bytes'] / 1e6:,.1f} ({term['off']:+.2%})" for term in row["terms"]
        )
        names = [term["name"] for term in row["terms"]]
        told = ", ".join(f"{name} {term}" for name, term in zip(names, terms, strict=False))
        lines.append(f"| {row['model']} | `{row['kv']}` | {told} | {pool} | {whole} |")
    return "\n".join(lines) + "\n" + _origin(result, "Benchmark: ")


def users_table(result: dict) -> str:
    """The table of planned users that run together."""
    lines = ["| KV | planned (block size) | preempted | of 5% more | |", "|---|---|---|---|---|"]
    for rows in _by_format(result):
        cells = [
            ", ".join(f"{row['users']} ({row['block_size']})" for row in rows),
            ", ".join(str(row["preempted"]) for row in rows),
            ", ".join(str(row["preempted_of_5_percent_more"]) for row in rows),
            "" if all(row["holds"] for row in rows) else "falls short",
        ]
        lines.append(f"| `{rows[0]['kv']}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + _origin(result)


def _by_format(result: dict) -> list[list[dict]]:
    formats: dict[str, list[dict]] = {}
    for row in result["rows"]:
        formats.setdefault(row["kv"], []).append(row)
    return list(formats.values())


def _origin(result: dict, how: str = "") -> str:
    return (
        f"\n{how}{result['model']}, random weights. {result['date'][:10]}, {result['device']}, torch "
        f"{result['versions']['torch']}, commit {result['commit']}.\n"
    )


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_found(one)}" for name, one in value.items())
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def engine_table(result: dict) -> str:
    """The table of a benchmarks/engine.py result."""
    lines = [
        "| case | | KV | output tokens/s (p10 - p90) | total tokens/s | TTFT p99, ms "
        "| ITL p50, p99, ms | preempted |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        if "reason" in row:
            lines.append(f"| {row['case']} | {row['name']} | `{row['kv']}` | {row['reason']} | | | | |")
            continue
        itl = "-" if row["itl_ms_p50"] is None else f"{row['itl_ms_p50']:.0f}, {row['itl_ms_p99']:.0f}"
        preempted = "-" if row["preemptions"] is None else f"{row['preemptions']:.0f}"
        lines.append(
            f"| {row['case']} | {row['name']} | `{row['kv']}` | {row['output_tokens_per_s']:.1f} "
            f"({row['output_tokens_per_s_p10']:.1f} - {row['output_tokens_per_s_p90']:.1f}) "
            f"| {row['total_tokens_per_s']:,.0f} | {row['ttft_ms_p99']:,.0f} | {itl} | {preempted} |"
        )
    lines.append(
        f"\nMedians of {result['rows'][0]['repeats']} repeats, cases one after another in each. "
        f"{result['model']}, random weights. {result['date'][:10]}, {result['device']}, "
        f"torch {result['versions']['torch']}, transformers {result['versions']['transformers']}, "
        f"commit {result['commit']}."
    )
    return "\n".join(lines) + "\n"


def kernels_table(result: dict) -> str:
    """The tables of a benchmarks/cpu.py result: beside torch's attention, then fewer bits beside more."""
    cases: dict[str, list[dict]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
    lines = [
        "| | K and V | ms, median (p10 - p90) | GB/s | of reading | error | beside the best SDPA |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case, rows in cases.items():
        rivals = [row["ms_median"] for row in rows if row["name"].startswith("SDPA")]
        for row in rows if rivals else ():
            speed = f"{min(rivals) / row['ms_median']:.2f}x"
            mine = row["name"] == "kvq"
            name = case if row is rows[0] else ""
            what = row["kv"] if mine else f"{row['kv']}, {row['name'].replace('SDPA', 'torch SDPA')}"
            lines.append(
                f"| {name} | {what} | {row['ms_median']:.2f} ({row['ms_p10']:.2f} - {row['ms_p90']:.2f}) "
                f"| {row['gb_per_s']:.1f} | {row['fraction_of_bandwidth']:.0%} "
                f"| {row['max_relative_error']:.0e} | {speed if mine else ''} |"
            )
    lines += ["", *_ratio_lines(cases), "", *_write_lines(cases)]
    lines.append(
        f"\n{result['date'][:10]}, {result['device']}, kernels for {result['variant']}, torch "
        f"{result['versions']['torch']}, commit {result['commit']}. `{result['command']}`. SDPA runs "
        "over contiguous K and V, query heads folded into the query length or with `enable_gqa`; kvq over "
        "shuffled blocks of 64 tokens. Error: largest difference to fp64, relative to the largest output. "
        "Of reading: of what a sum over 512 MB reads a second in the same run."
    )
    return "\n".join(lines) + "\n"


def _ratio_lines(cases: dict[str, list[dict]]) -> list[str]:
    """Time of fewer bits over time of more, by tokens in the batch."""
    lines = [
        "| query heads a KV head | tokens | batches x depths | int8 / bf16 | int4 / int8 |",
        "|--:|--:|--:|--:|--:|",
    ]
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
        eight, four = ([pair[i] for pair in pairs] for i in (0, 1))
        lines.append(
            f"| {group} | {size} | {len(pairs)} | {min(eight):.2f} to {max(eight):.2f} "
            f"| {min(four):.2f} to {max(four):.2f} |"
        )
    return lines


def _write_lines(cases: dict[str, list[dict]]) -> list[str]:
    """What storing one token of every sequence takes, beside the attention of that step."""
    lines = ["| one token of 8 sequences at depth 8,192 | write, us | of its attention, GQA 4 | GQA 1 |"]
    lines.append("|---|--:|--:|--:|")
    written = {group: cases.get(f"write 8 at 8192, GQA {group}", []) for group in (4, 1)}
    for row in written[4]:
        shares = []
        for group, rows in written.items():
            us = next(x["us_median"] for x in rows if x["kv"] == row["kv"])
            attended = next(x for x in cases[f"decode 8 x 8192, GQA {group}"][::-1] if x["kv"] == row["kv"])
            shares.append(f"{us / 1e3 / attended['ms_median']:.1%}")
        lines.append(f"| {row['kv']} | {row['us_median']:.1f} | {' | '.join(shares)} |")
    return lines


_SIZES = (
    (1 << 13, "up to 8 Ki"),
    (1 << 16, "up to 64 Ki"),
    (1 << 18, "up to 256 Ki"),
    (1 << 21, "up to 1 Mi"),
)


def blocks_table(result: dict) -> str:
    """The table of a `kvq bench blocks` result."""
    scales = list(dict.fromkeys(row["scale"] for row in result["rows"]))[1:-1]  # the loads of sequences
    rows = {(row["operation"], row["scale"]): row for row in result["rows"]}
    for row in result["rows"]:  # of one prompt in a large pool
        rows.setdefault((row["operation"], scales[-1]), row)
    lines = [
        f"| median us (10th to 90th percentile) | {' | '.join(scales)} | limit |",
        f"|---|{'--:|' * len(scales)}--:|",
    ]
    for name, (words, limit) in BLOCK_ROWS.items():
        cells = [_times(rows.get((name, scale))) for scale in scales]
        lines.append(f"| {words} | {' | '.join(cells)} | {limit} |")
    filled = result["utilization"]
    lines.append(
        f"\nOf the slots in live blocks {filled['paged_mean']:.1%} hold tokens ({filled['sequences']} "
        f"running sequences, log-normal lengths with median {filled['median_length']} tokens, "
        f"block {filled['block_size']}); one buffer of {filled['longest']:,} tokens each would be "
        f"{filled['contiguous_mean']:.1%} full. `{result['command']}`, {result['date'][:10]}, "
        f"{result['device']}, Python {result['versions']['python']}, commit {result['commit']}."
    )
    return "\n".join(lines) + "\n"


def _times(row: dict | None) -> str:
    """`median (p10 - p90)` in microseconds."""
    if row is None:
        return ""
    digits = 0 if row["us_median"] >= 100 else 2
    return f"{row['us_median']:,.{digits}f} ({row['us_p10']:,.{digits}f} - {row['us_p90']:,.{digits}f})"


def perplexity_table(result: dict) -> str:
    """The table of a `kvq perplexity` result."""
    lines = [
        "| KV format | bits / element | bytes / token | tokens in bf16's memory | perplexity | change "
        "| mean KL | same top token |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        name = f"`{row['kv']}`"
        if row["attention_window"]:
            name += f" with a {row['attention_window']}-token attention window"
        lines.append(
            f"| {name} | {row['bits_per_element']:g} | {row['kv_bytes_per_token']:,.0f} "
            f"| {row['compression']:.2f}x "
            f"| {row['perplexity']:.2f} | {row['perplexity_change']:+.2%} | {row['kl_mean']:.5f} "
            f"| {row['top1_agreement']:.1%} |"
        )
    check = result["instrument"]
    verdict = "can" if check["passed"] else "can not"
    lines.append(
        f"\nModel: {result['model']}, a very small one. "
        f"Text: {result['text']}, {result['rows'][0]['tokens']:,} tokens in windows of {result['context']}. "
        f"{result['date'][:10]}, {result['device']}, torch {result['versions']['torch']}, "
        f"transformers {result['versions']['transformers']}. "
        f"This model and text {verdict} show damage: "
        f"{check['window_change']:+.1%} with attention cut to "
        f"{check['window_tokens']} tokens, {check['int2_change']:+.1%} with {check['int2_format']}."
    )
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """Return a page's text with every marked table made anew from its JSON."""

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
