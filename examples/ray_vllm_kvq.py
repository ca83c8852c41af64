"""Serve a large model by vLLM with kvq's plug-in, each replica on 16 GPUs of two nodes, under Ray Serve.

    pip install 'ray[llm]' '.[vllm]'     # in a clone of kvq, at every node: vLLM's workers load the plug-in
    python examples/ray_vllm_kvq.py                # at the head node

It was never run, because no cluster of GPUs was available. It was checked that Ray's `LLMConfig` accepts it.
Layers are divided between two nodes (pipeline), and their heads among the eight GPUs of a node (tensor).
vLLM makes the blocks. kvq's formats are values of `kv_cache_dtype`; `kvq:FILE` names a recipe, whose file
is on every node.
"""

from typing import Any

CONFIG: dict[str, Any] = {
    "model_loading_config": {"model_id": "llama-3.1-405b", "model_source": "/models/llama-3.1-405b"},
    "accelerator_type": "H100",
    "engine_kwargs": {
        "kv_cache_dtype": "kvq_int4",
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 2,
        "enable_prefix_caching": True,
        "max_model_len": 32_768,
    },
    "placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}] * 16, "strategy": "PACK"},
    "deployment_config": {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64},
        "request_router_config": {
            "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
            "request_router_kwargs": {"imbalanced_threshold": 8, "do_eviction": True},
        },
        "graceful_shutdown_timeout_s": 60,
    },
}


def make_app() -> Any:
    """The application, with the OpenAI routes of Ray."""
    from ray.serve.llm import LLMConfig, build_openai_app

    return build_openai_app({"llm_configs": [LLMConfig(**CONFIG)]})


if __name__ == "__main__":
    from ray import serve

    serve.run(make_app(), blocking=True)
