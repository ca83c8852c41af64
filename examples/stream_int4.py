"""Stream text from one prompt, with an unquantized and with a 4-bit KV cache.

python examples/stream_int4.py [PROMPT]
"""

import sys

import kvq

prompt = sys.argv[1] if len(sys.argv) > 1 else "In the north of the country"
options = kvq.SamplingParams(max_tokens=40, temperature=0.7, seed=1)
model = kvq.load("tiny", kv="fp32")

for kv in ("fp32", "int4"):
    with kvq.LLM(model, kv, max_num_seqs=1) as llm:
        print(f"--- {kv}, {llm.model.kv_bytes_per_token:.0f} bytes of KV a token ---")
        print(prompt, end="")
        for piece in llm.stream(prompt, options):
            print(piece.text, end="", flush=True)
        print()
