"""What the backend for GPUs tells kernels of a step, on a CPU: its builder in the place of the CPU's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from kvq.errors import ConfigError
from kvq.integrations.vllm import backend, cpu_backend, gpu_backend
from tests.scale.vllm.kit import greedy, served

CONFIG = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=6), model_config=SimpleNamespace(max_model_len=512)
)


def builder() -> Any:
    return gpu_backend._KvqGpuBuilder(None, [], CONFIG, torch.device("cpu"))


def step(new: list[int], contexts: list[int], known: bool = True) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    lens, tokens = torch.tensor(contexts, dtype=torch.int32), sum(new)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(new),
        num_actual_tokens=tokens,
        max_query_len=max(new),
        max_seq_len=max(contexts),
        block_table_tensor=torch.zeros(6, 4, dtype=torch.int32),
        slot_mapping=torch.arange(tokens),
        seq_lens_cpu_upper_bound=lens if known else None,
    )


def test_lengths_lie_where_graphs_look_for_them() -> None:
    """Padding at the end has nothing new, and a later step of as many requests uses the same memory."""
    one = builder()
    first = one.build(0, step([5, 1, 1], [9, 30, 4])).batch
    assert first.lens.tolist() == [[0, 5, 6], [5, 1, 1], [9, 30, 4]]
    assert (first.query_lens, first.context_lens, first.is_captured) == ((5, 1, 1), (9, 30, 4), False)
    second = one.build(0, step([1, 1, 0], [10, 31, 0])).batch
    assert second.lens.tolist() == [[0, 1, 2], [1, 1, 0], [10, 31, 0]]
    assert second.lens.data_ptr() == first.lens.data_ptr()


def test_what_the_host_does_not_know_is_an_upper_limit() -> None:
    unknown = builder().build(0, step([1, 1], [9, 30], known=False)).batch
    captured = builder().build_for_cudagraph_capture(step([1, 1], [1, 1])).batch
    for batch in (unknown, captured):
        assert batch.context_lens == (512, 512)
        assert batch.is_captured  # nothing is gathered


def test_more_requests_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs is 6"):
        builder().build(0, step([1] * 7, [3] * 7))


def test_another_backend_beside_kvqs_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-backend FLASH_ATTN"):
        gpu_backend.require_own(AttentionBackendEnum.FLASH_ATTN, None, None)


def test_vllms_platform_takes_kvqs_backend_for_kvqs_formats_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded twice, as plug-ins may be; what vLLM can't have is refused with vLLM's reasons."""

    class Platform:
        @classmethod
        def get_device_capability(cls) -> None:
            return None

        @classmethod
        def get_attn_backend_cls(cls, selected: Any, selector: Any, num_heads: Any = None) -> str:
            return "vllm's"

    names = iter([None, "int4", "int4", "int4"])
    selector = AttentionSelectorConfig(128, torch.bfloat16, "auto", 32)
    monkeypatch.setattr(gpu_backend, "current_platform", Platform())
    monkeypatch.setattr(gpu_backend, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(gpu_backend, "wanted_format", lambda config: next(names))
    gpu_backend.register()
    gpu_backend.register()
    assert Platform.get_attn_backend_cls(None, selector) == "vllm's"
    assert Platform.get_attn_backend_cls(None, selector).endswith("gpu_backend.KvqGpuBackend")
    monkeypatch.setattr(gpu_backend, "wanted_format", lambda config: "int4")
    with pytest.raises(ConfigError, match="MLA not supported"):
        Platform.get_attn_backend_cls(None, selector._replace(use_mla=True))


def test_layers_that_got_another_backend_or_other_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(impl=None, attn_backend=gpu_backend.KvqGpuBackend)
    monkeypatch.setattr(backend, "wanted_format", lambda config: "int4")
    with pytest.raises(ConfigError, match="vLLM took CUSTOM for a layer"):
        backend._with_own_bytes(lambda layer, config: "a spec")(layer, None)
    impl = object.__new__(backend.KvqImpl)
    impl._store = None

    class Chunked:
        def get_kv_cache_spec(self) -> None: ...

    with pytest.raises(ConfigError, match="vLLM's Chunked"):
        impl._over(Chunked(), torch.zeros(1, 2, 16, 8, dtype=torch.uint8))


def test_steps_of_a_real_engine_attend_to_the_same(  # D345: vLLM's Python alone, five operators in torch
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces, decodes beside them, requests that end: the same tokens."""
    options = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
    with served("int4", **options) as llm:
        want = greedy(llm, prompts[:12], 10)
    steps = []

    class Builder(gpu_backend._KvqGpuBuilder):
        def build(self, *args: Any, **named: Any) -> Any:
            steps.append(super().build(*args, **named))
            return steps[-1]

    monkeypatch.setattr(cpu_backend.KvqCpuBackend, "get_builder_cls", staticmethod(lambda: Builder))
    with served("int4", **options) as llm:
        assert greedy(llm, prompts[:12], 10) == want
    assert any(1 in step.batch.query_lens and max(step.batch.query_lens) > 1 for step in steps)
