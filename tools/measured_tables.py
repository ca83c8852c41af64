"""Write the measured tables of README.md and docs/ from the JSON that benchmark runs left.

python tools/measured_tables.py          # rewrite the tables
python tools/measured_tables.py --check  # exit 1 if a page and its JSON differ
"""

import json
import re
import sys
from pathlib import Path

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
    if "utilization" in result:
        return blocks_table(result)
    return caches_table(result) if "step_ms_median" in result["rows"][0] else perplexity_table(result)


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
        f"\nModel: {result['model']}, a very small one; nothing larger was measured yet. "
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
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old)
        differ |= old != new
        if "--check" not in sys.argv:
            path.write_text(new, encoding="utf-8")
    sys.exit("--check" in sys.argv and differ)


if __name__ == "__main__":
    main()
