"""Plans for GPUs against the code that sizes an engine's pools there, over devices as drivers tell them."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, AutoModelForCausalLM

from kvq.cache.memory import available_bytes
from kvq.cache.transformers.attention import PACKED_NAME, register_attention
from kvq.capacity.lengths import Demand, fixed
from kvq.capacity.plan.gpus import find_gpu
from kvq.capacity.plan.memory import Engine
from kvq.capacity.plan.plan import make_plan
from kvq.capacity.plan.target import find_model, make_target
from kvq.commands.capacity.plan_verify import _planned_pool
from kvq.engine.config import EngineConfig
from kvq.engine.device.memory import planned_pools
from kvq.geometry import parse_geometry
from kvq.models.loading.footprint import planned_activations, planned_weights
from kvq.models.loading.prepared import prepare
from kvq.models.parts.step import PackedStep
from kvq.sizing.memory import ACTIVATION_TERM, Split, activation_term, kv_layout
from kvq.sizing.needs import bytes_of
from kvq.sizing.parameters import count_parameters
from tests.helpers_models import save_model

CUDA = torch.device("cuda")
RUNTIME = 600_000_000  # bytes, of the CUDA context
KEPT = 40 << 20  # bytes of freed tensors that PyTorch keeps


@pytest.fixture
def record(monkeypatch):
    """Makes torch.cuda tell what it tells on a GPU that holds so many bytes of tensors."""

    def recorded(gpu, held):
        total = find_gpu(gpu).memory_bytes
        told = SimpleNamespace(
            mem_get_info=lambda _=None: (total - RUNTIME - held - KEPT, total),
            memory_allocated=lambda _=None: held,
            memory_reserved=lambda _=None: held + KEPT,
        )
        for name, value in vars(told).items():
            monkeypatch.setattr(torch.cuda, name, value)

    return recorded


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("llama-3-8b", "h100"),
        ("llama-3-8b", "l4"),
        ("gemma-3-27b", "h200"),
        ("gemma-2-9b", "a100-40"),
        ("mistral-7b-v0.1", "a10"),
        ("gpt-oss-20b", "l40s"),
    ],
)
@pytest.mark.parametrize("kv", ["fp16", "k8v4", "int4"])
def test_a_default_engine_on_that_gpu_has_the_pools_that_were_planned(record, name, gpu, kv):
    target = make_target(name)
    plan = make_plan(target, find_gpu(gpu), kv, Demand(lengths=fixed(1024)), engine=Engine(sequences=128))
    [activations] = [term.nbytes for term in plan.terms if term.name == ACTIVATION_TERM]
    record(gpu, sum(term.nbytes for term in target.terms()))
    found = planned_pools(
        kv_layout(target.geometry, kv),
        EngineConfig(),
        on_gpu=True,
        free_bytes=available_bytes(CUDA),
        max_context=target.geometry.max_context,
        activation_bytes=activations,
    )
    assert found.num_blocks == list(plan.num_blocks)
    assert sum(term.nbytes for term in plan.terms) == find_gpu(gpu).memory_bytes


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss"])
def test_verify_predicts_the_pool_from_what_is_free_before_the_weights_load(record, tmp_path, family):
    folder = save_model(tmp_path / "model", family)
    on_cpu = prepare(folder, device="cpu")
    model = replace(on_cpu, device=CUDA, dtype=torch.bfloat16, order=on_cpu.order)
    weights = sum(term.nbytes for term in planned_weights(model))
    layout, engine = model.layout(model.recipe("int4")), EngineConfig(max_num_seqs=100_000)
    record("h100", 0)
    predicted = _planned_pool(model, "int4", engine)
    free = available_bytes(CUDA)
    record("h100", weights)
    assert available_bytes(CUDA) == free - weights
    found = planned_pools(
        layout,
        engine,
        on_gpu=True,
        free_bytes=available_bytes(CUDA),
        max_context=model.max_context,
        activation_bytes=planned_activations(model, engine.max_num_batched_tokens).nbytes,
    )
    assert bytes_of(layout, found.num_blocks) == predicted > 0


class _Live(TorchDispatchMode):
    """The most bytes of tensors that live at once, of those made under it."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata)
        return out

    def _gone(self, key):
        self.live -= self._sizes.pop(key, 0)


class _NoCache(PackedStep):
    """Attention that computes nothing: kernels hold no more than their output."""

    def attend(self, layer, q, k, v, options):
        return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-13b", "qwen3-8b", "gemma-2-9b", "phi-3-mini"])
def test_a_step_of_full_size_holds_what_is_planned_for_it(name):
    """Two layers of the live model on the meta device, every tensor counted while it lives."""
    config = dict(find_model(name).config) | {"num_hidden_layers": 2}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2]
    geometry, tokens = parse_geometry(config), 2048
    planned = activation_term(
        geometry, count_parameters(config, geometry), step_tokens=tokens, split=Split()
    ).nbytes
    register_attention()
    live = _Live()
    with torch.inference_mode(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation=PACKED_NAME
        ).eval()
        step = object.__new__(_NoCache)
        step.geometry = geometry
        ids, keep = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        with live:
            model(
                input_ids=ids,
                position_ids=ids.clone(),
                use_cache=False,
                logits_to_keep=keep,
                kvq_step=step,
            )
    assert live.peak == pytest.approx(planned, rel=0.05)
