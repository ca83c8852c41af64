"""Measure three KV formats on a text and print what each saves and costs.

    python examples/measure_formats.py [MODEL] [TEXT_FILE]

MODEL is a Hugging Face folder, a hub name, or "tiny", the model inside kvq.
"""

import sys
from pathlib import Path

import kvq

model = kvq.load(sys.argv[1] if len(sys.argv) > 1 else "tiny")
text = Path(sys.argv[2]).read_text(encoding="utf-8") if len(sys.argv) > 2 else None

for row in kvq.perplexity(model, kv=["fp32", "int8", "int4"], text=text, context=512, max_windows=4):
    print(
        f"{row['kv']:6} {row['kv_bytes_per_token']:6.0f} bytes a token, "
        f"perplexity {row['perplexity']:.2f} ({row['perplexity_change']:+.2%})"
    )
