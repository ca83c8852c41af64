"""Generate with transformers' own `generate` over a 4-bit KV cache and over the default cache.

python examples/transformers_int4.py [PROMPT]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvq
from kvq.cache import KvqCache

folder = Path(kvq.__file__).parent / "models" / "tiny"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(sys.argv[1] if len(sys.argv) > 1 else "In the north of the country", return_tensors="pt")

for cache in (DynamicCache(config=model.config), KvqCache(model.config, kv="int4")):
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    held = f"{cache.nbytes:,} bytes in blocks" if isinstance(cache, KvqCache) else "unquantized"
    print(f"--- {type(cache).__name__}, {held} ---")
    print(tokenizer.decode(output[0], skip_special_tokens=True))
