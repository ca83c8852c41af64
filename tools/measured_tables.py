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


def table(result: dict) -> str:
    """Return the Markdown table of a `kvq perplexity` result, with what it was measured on."""
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
    for path in (ROOT / "README.md", ROOT / "docs" / "quality.md"):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old)
        differ |= old != new
        if "--check" not in sys.argv:
            path.write_text(new, encoding="utf-8")
    sys.exit("--check" in sys.argv and differ)


if __name__ == "__main__":
    main()
