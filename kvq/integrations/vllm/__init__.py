"""kvq's KV formats and kernels inside vLLM, as a plug-in that vLLM finds by itself.

`pip install '.[vllm]'` in a clone of kvq, then `vllm serve MODEL --kv-cache-dtype kvq_int4`. docs/scale.md
says what works on top of it and what a version of vLLM lacks.
"""
