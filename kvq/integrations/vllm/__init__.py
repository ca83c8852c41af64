"""kvq's KV formats and kernels inside vLLM, as a plug-in that vLLM finds automatically.

Run `pip install '.[vllm]'` in a clone of kvq, then `vllm serve MODEL --kv-cache-dtype kvq_int4`. See
docs/scale.md for the vLLM features that work with the plug-in, and the limits of each version of vLLM.
"""
