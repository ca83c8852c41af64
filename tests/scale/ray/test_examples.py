"""The examples are what Ray takes."""

import runpy
from pathlib import Path

import pytest

from kvq.integrations.ray.fleet import ROUTERS

ray = pytest.importorskip("ray.serve")
EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_one_of_kvqs_replicas_builds_an_application(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ray_kvq.py"])
    found = runpy.run_path(str(EXAMPLES / "ray_kvq.py"))
    assert (found["model"], found["kv"]) == ("tiny", "int4")
    assert isinstance(found["app"], ray.Application)
    monkeypatch.setattr("sys.argv", ["ray_kvq.py", "./mine"])
    assert runpy.run_path(str(EXAMPLES / "ray_kvq.py"))["kv"] == "int4"


def test_the_one_of_vllm_is_a_configuration_of_rays():
    configs = pytest.importorskip("ray.llm._internal.serve.core.configs.llm_config")
    given = runpy.run_path(str(EXAMPLES / "ray_vllm_kvq.py"))["CONFIG"]
    router = given["deployment_config"]["request_router_config"]
    assert router["request_router_class"] == "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
    router["request_router_class"] = ROUTERS["affinity"]  # Ray's own can be imported beside vLLM only
    config = configs.LLMConfig(**given)
    assert config.engine_kwargs["kv_cache_dtype"] == "kvq_int4"
    gpus = config.engine_kwargs["tensor_parallel_size"] * config.engine_kwargs["pipeline_parallel_size"]
    assert len(config.placement_group_config["bundles"]) == gpus
