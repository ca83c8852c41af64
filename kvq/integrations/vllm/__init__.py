"""kvq's KV formats and kernels inside vLLM, as a plug-in that vLLM finds automatically.

`pip install '.[vllm]'` in a clone of kvq, then `vllm serve MODEL --kv-cache-dtype kvq_int4`. docs/scale.md
lists the features of vLLM that work with it, and the limits of each version of vLLM.
"""
