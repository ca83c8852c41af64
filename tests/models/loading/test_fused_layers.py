"""Decoder layers in few calls on CPUs: the results of their own code, and that code where it must run."""

import ctypes
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

import kvq
from benchmarks.peers.neighbours import neighbours
from kvq.engine.steps.publisher import _LinearTime
from kvq.errors import ConfigError, ModelError
from kvq.kernels import SequenceBatch
from kvq.kernels.decoder.cpu import CpuDecoder
from kvq.kernels.decoder.stack import CpuStack
from kvq.kernels.decoder.whole import CpuPass
from kvq.kernels.native import library as native
from kvq.kernels.native.library import load
from kvq.kernels.rms_norm.reference import NormWeight
from kvq.models import model as loading
from kvq.models.loading.cpu_layers import CpuLayers
from kvq.models.loading.fused_layers import is_fused, unfuse_layers
from kvq.models.parts.angles import Angles
from tests.helpers_models import random_tokens, save_model
from tests.schedstat import needs_schedstat
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")
FUSED = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "seed_oss",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
)
IDS = random_tokens(60, seed=3)


@pytest.mark.parametrize("weights", ["int8_g16", "auto"])
@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_give_the_results_of_their_own_code(family: str, weights: str, tmp_path) -> None:
    model = kvq.load(save_model(tmp_path, family), kv="fp32", weights=weights, device="cpu")
    assert is_fused(model.weights.model)
    fused, chunked = model.logits(IDS), model.logits(IDS, chunk=7)
    unfuse_layers(model.weights.model)
    assert not is_fused(model.weights.model)
    own = model.logits(IDS)
    assert (fused - own).abs().max() < 2e-3 * own.abs().max()
    assert (chunked - fused).abs().max() < 1e-5 * own.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_layers_in_bf16_are_fused_and_give_a_row_the_same_bits_in_any_step(family: str, tmp_path) -> None:
    model = kvq.load(save_model(tmp_path, family), kv="bf16", dtype="bf16", device="cpu")
    assert is_fused(model.weights.model)
    whole = model.logits(IDS)
    assert all(torch.equal(model.logits(IDS, chunk=size), whole) for size in (1, 7))
    assert (model.weights.step_rows(3), model.weights.logit_rows(3)) == (3, 3)
    unfuse_layers(model.weights.model)
    own = model.logits(IDS)
    assert (whole - own).abs().max() < 0.1 * own.abs().max()


@pytest.mark.parametrize("family", ["granite", "olmo2", "cohere", "glm", "mixtral", "gpt_neox", "smollm3"])
def test_other_layers_run_their_own_code(family: str, tmp_path) -> None:
    model = kvq.load(save_model(tmp_path, family), kv="fp32", weights="int8_g16", device="cpu")
    assert not is_fused(model.weights.model)
    assert model.logits(IDS).isfinite().all()


@pytest.mark.daily(24)
@pytest.mark.parametrize(
    "kv", ["fp32", "int8", "int4", "int4_g4", "int3_mean+sinks=9+recent=5", "bf16+recent=20"]
)
@pytest.mark.parametrize("family", FUSED)
def test_all_layers_in_one_call_give_the_bits_of_calls_one_by_one(
    family: str, kv: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kvq.load(save_model(tmp_path, family), kv=kv, device="cpu")
    wholes, stacks = counted(CpuPass, monkeypatch), counted(CpuStack, monkeypatch)
    together, chunked = model.logits(IDS), model.logits(IDS, chunk=7)
    assert (len(wholes) > 2) == (family != "gemma2")  # whose logits are capped
    monkeypatch.setattr(CpuLayers, "whole", lambda *_: None)
    assert torch.equal(model.logits(IDS), together)
    assert torch.equal(model.logits(IDS, chunk=7), chunked)
    assert len(stacks) > 2
    monkeypatch.setattr(CpuLayers, "_stack_of", lambda *_: None)
    assert torch.equal(model.logits(IDS), together)
    assert torch.equal(model.logits(IDS, chunk=7), chunked)


def counted(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call of its objects."""
    calls: list[int] = []
    run = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, *given: calls.append(1) or run(self, *given))
    return calls


_SCALED = {  # embeddings by sqrt(72), rounded to the dtype, or by 3.3
    "llama": {},
    "gemma": {"hidden_size": 72},
    "gemma3_text": {"hidden_size": 72},
    "granite": {"embedding_multiplier": 3.3, "residual_multiplier": 1.0, "logits_scaling": 1.0},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ties", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", _SCALED)
def test_a_step_in_one_call_gives_the_bits_of_several(
    family: str, dtype: str, ties: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, family, tie_word_embeddings=ties, **_SCALED[family])
    model, wholes = kvq.load(folder, kv="int8", dtype=dtype, device="cpu"), counted(CpuPass, monkeypatch)
    together, chunked = model.logits(IDS), model.logits(IDS, chunk=7)
    assert wholes
    monkeypatch.setattr(CpuLayers, "whole", lambda *_: None)
    assert torch.equal(model.logits(IDS), together)
    assert torch.equal(model.logits(IDS, chunk=7), chunked)


@pytest.mark.parametrize("kv", ["fp32", "int4"])
@pytest.mark.parametrize("family", ["llama", "ministral", "gemma3_text"])
def test_rows_nobody_wants_change_no_bit_of_the_others(
    family: str, kv: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer leaves them out; the keys and values of all are there for the steps that follow."""
    model = kvq.load(save_model(tmp_path, family), kv=kv, device="cpu")

    def logits(*, all_rows: bool) -> list[torch.Tensor]:
        session = model.session(max_tokens=64, max_sequences=3)
        a, b, c = (session.new_sequence() for _ in range(3))
        found = []
        for work in (
            [(a, IDS[:20]), (b, IDS[20:21])],
            [(c, IDS[:33]), (a, IDS[30:32]), (b, IDS[21:24])],
            [(b, IDS[:1]), (a, IDS[:1]), (c, IDS[:9])],
        ):
            found += [result.logits[-1:] for result in session.forward(work, all_rows=all_rows)]
        return found

    few, every = logits(all_rows=False), logits(all_rows=True)
    assert all(map(torch.equal, few, every))
    monkeypatch.setattr(CpuLayers, "whole", lambda *_: None)
    assert all(map(torch.equal, few, logits(all_rows=False)))


@pytest.mark.parametrize("kv", ["fp32", "int4", "int4_mean+recent=20"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_another_default_dtype_changes_no_result(backend: str, kv: str) -> None:
    """The default is the process's: transformers sets it while it loads another model in another thread."""
    model = kvq.load("tiny", kv=kv, backend=backend, device="cpu")
    wanted = model.logits(IDS, chunk=7)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = model.logits(IDS, chunk=7)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def test_engines_over_one_model_step_side_by_side() -> None:
    model, params = kvq.load("tiny"), kvq.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [random_tokens(n, seed=n) for n in (3, 70, 150, 31)]

    def run(kv: str) -> list[list[int]]:
        llm = kvq.LLM(model.with_kv(kv), num_blocks=64, max_num_batched_tokens=64)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    formats = ["int8", "fp32", "int8", "fp32"]
    alone = {kv: run(kv) for kv in set(formats)}
    with ThreadPoolExecutor(4) as pool:
        for kv, tokens in zip(formats, pool.map(run, formats), strict=True):
            assert tokens == alone[kv]


_FORK = """
import os, random, threading, time, torch, kvq
import tests.conftest  # the build that is tested
from benchmarks.peers.neighbours import neighbours

torch.set_num_threads(3)
PROMPT = [5 + i % 300 for i in range(400)]
PARAMS = kvq.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
shared, has_begun, stop = {}, threading.Event(), threading.Event()

def engine():
    return kvq.LLM(shared["model"], num_blocks=40, max_num_batched_tokens=512, prefix_caching=False)

def tokens(llm):
    return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids

def go_on():  # all in a thread that does not fork: libgomp does not survive it in the one that does
    shared.update(model=kvq.load("tiny"))
    llm = engine()
    shared.update(expected=tokens(llm))
    has_begun.set()
    while not stop.is_set():
        assert tokens(llm) == shared["expected"]

other = threading.Thread(target=go_on, daemon=True)
other.start()
has_begun.wait()
with neighbours(2 * len(os.sched_getaffinity(0))):  # so that some forks find a step between two threads
    for _ in range(3):
        time.sleep(random.uniform(0.01, 0.03))  # and so wake in the middle of a step
        child = os.fork()
        if not child:
            llm = engine()
            os._exit(0 if tokens(llm) == tokens(llm) == shared["expected"] else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, status
stop.set()
other.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""), reason="it takes no new threads after such forks"
)
def test_a_process_forked_while_a_thread_is_in_a_step_makes_steps_of_its_own() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.stdout == "done\n", ran.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="code changes its thread by glibc's means")
@needs_schedstat
@pytest.mark.parametrize("engines", [1, 2])
def test_a_step_that_goes_on_in_another_thread_beside_busy_processes_has_the_same_bits(engines: int) -> None:
    model, params = kvq.load("tiny"), kvq.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    prompts = [random_tokens(n, seed=n) for n in (3, 70, 150, 31)]

    def run(_: int = 0) -> list[list[int]]:
        torch.set_num_threads(2)
        llm = kvq.LLM(model, num_blocks=64, max_num_batched_tokens=128)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    count, before = ctypes.CDLL(str(native._path())).kvq_times_carried, torch.get_num_threads()
    count.restype = ctypes.c_int64
    alone, end, seen = run(), time.monotonic() + HANG_S, count()
    try:
        with neighbours(2 * len(os.sched_getaffinity(0))), ThreadPoolExecutor(engines) as pool:
            while count() < seen + 20:
                assert time.monotonic() < end, f"only {count() - seen} times"
                assert all(tokens == alone for tokens in pool.map(run, range(engines)))
    finally:
        torch.set_num_threads(before)


_SPARES = """
import os, time, torch, kvq
from pathlib import Path
import tests.conftest  # the build that is tested
from benchmarks.peers.neighbours import neighbours
from tests.waiting import HANG_S

torch.set_num_threads(2)
model, prompts = kvq.load("tiny"), [[5 + i] * (40 + 30 * i) for i in range(4)]
params = kvq.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
llm = kvq.LLM(model, num_blocks=64, prefix_caching=False)

def spares():
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("kvq-spare\\n")

def tokens():
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

alone = tokens()
end = time.monotonic() + HANG_S
with neighbours(2 * len(os.sched_getaffinity(0))):
    while not spares():
        assert time.monotonic() < end
        assert tokens() == alone
    for _ in range(5):
        assert tokens() == alone
print(spares())
"""


@needs_schedstat
def test_a_spare_thread_takes_part_where_all_cores_are_shared() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SPARES], capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert ran.stdout == "1\n", ran.stderr


def test_an_embedding_or_a_norm_of_another_width_is_refused() -> None:
    model = kvq.load("tiny").weights.model
    embedding, norm, head = model.model.embed_tokens.kernel, model.model.norm, model.lm_head.kernel
    fit = {"embedding": embedding, "norm": NormWeight(weight=norm.weight.detach(), eps=norm.eps)}
    fit |= {"head": head, "dtype": torch.float32}
    CpuPass(**fit)
    narrow = NormWeight(weight=norm.weight.detach()[:-1].clone(), eps=1e-5)
    for change in ({"norm": narrow}, {"dtype": torch.float64}, {"embedding": torch.zeros(8, 5)}):
        with pytest.raises(ConfigError, match="don't fit a head"):
            CpuPass(**fit | change)


def test_parameters_that_are_exchanged_are_used_from_then_on(tmp_path) -> None:
    model = kvq.load(save_model(tmp_path, "llama"), kv="fp32")
    before, inner = model.logits(IDS), model.weights.model.model
    own = inner.embed_tokens.weight, inner.norm.weight
    inner.embed_tokens.weight = torch.nn.Parameter(-own[0].detach(), requires_grad=False)
    assert not torch.equal(model.logits(IDS), before)
    inner.embed_tokens.weight = own[0]
    inner.norm.weight = torch.nn.Parameter(2 * own[1].detach(), requires_grad=False)
    torch.testing.assert_close(model.logits(IDS), 2 * before)
    inner.norm.weight = own[1]
    assert torch.equal(model.logits(IDS), before)


def test_a_piece_of_a_prompt_that_wants_no_logits_is_a_step_too() -> None:
    prompt, params = (
        random_tokens(150, seed=5),
        kvq.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )
    model = kvq.load("tiny", kv="int8")
    found = [
        kvq.LLM(model, num_blocks=32, max_num_seqs=4, max_num_batched_tokens=size).generate([prompt], params)
        for size in (2048, 40)
    ]
    assert found[0][0].outputs[0].token_ids == found[1][0].outputs[0].token_ids
    assert found[1][0].error is None


def test_a_step_in_one_call_refuses_what_is_not_there() -> None:
    model = kvq.load("tiny", kv="fp32")
    session = model.session(max_tokens=64)
    sequence = session.new_sequence()
    session.forward([(sequence, [1, 2, 3])])
    stack = next(iter(model.weights.model.model.forward._run._stacks.values()))
    make = model.weights.fused_pass._ends
    tables = model.weights.model.model.forward._angles.tables(torch.float32, 8)
    session.manager.append([(sequence, 2)])
    slots = torch.tensor([3, 4])
    batch = SequenceBatch(
        query_lens=(2,), context_lens=(5,), tables=torch.tensor([sequence.tables[0]]), slots=slots
    )
    good = {"tokens": torch.tensor([4, 5]), "positions": torch.tensor([3, 4]), "wanted": torch.tensor([1])}
    bad = torch.zeros(2, dtype=torch.bool)
    whole = make(stack, tables, *good.values(), (batch,), bad)
    whole.run()
    assert whole.logits.isfinite().all()
    for name, value in (("tokens", 1 << 20), ("tokens", -1), ("positions", 1 << 20), ("wanted", 2)):
        wrong = good | {name: torch.full_like(good[name], value)}
        whole = make(stack, tables, *wrong.values(), (batch,), bad)
        with pytest.raises(IndexError):
            whole.run()
        whole.begin()
        with pytest.raises(IndexError):
            whole.wait()
    for name, value in (("tokens", torch.tensor([4.0, 5.0])), ("positions", torch.tensor([3]))):
        with pytest.raises(ConfigError, match="int64"):
            make(stack, tables, *(good | {name: value}).values(), (batch,), bad)
    narrow = {kind: (cos[:, :2].contiguous(), sin[:, :2].contiguous()) for kind, (cos, sin) in tables.items()}
    with pytest.raises(ConfigError, match="tables"):
        make(stack, narrow, *good.values(), (batch,), bad)


@pytest.mark.parametrize(
    ("kv", "options"),
    [("int8+recent=32", {}), ("int4_mean+sinks=4", {}), ("fp32", {"backend": "reference"}), ("fp8", {})],
    ids=str,
)
def test_only_a_cache_that_takes_more_than_c_runs_layers_one_by_one(kv: str, options, monkeypatch) -> None:
    model, calls = kvq.load("tiny", kv=kv, **options), counted(CpuPass, monkeypatch)
    assert model.logits(IDS).isfinite().all()
    assert bool(calls) == (not options)


def test_a_model_that_does_more_than_its_head_keeps_its_wrapper(tmp_path, monkeypatch) -> None:
    folder = save_model(tmp_path, "llama")
    plain = kvq.load(folder, kv="fp32")
    assert plain.weights.fused_pass is not None
    before = LlamaForCausalLM.forward

    def doubled(self, *args, **given):
        output = before(self, *args, **given)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    model = kvq.load(folder, kv="fp32")
    assert is_fused(model.weights.model)
    assert model.weights.fused_pass is None
    assert torch.equal(model.logits(IDS), 2 * plain.logits(IDS))


def test_a_hook_on_the_head_is_called_and_the_wrapper_comes_back() -> None:
    model, seen = kvq.load("tiny"), []
    before = model.logits(IDS)
    hook = model.weights.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model.logits(IDS), before)
    assert seen
    assert not model.weights.fused_pass.is_free
    hook.remove()
    assert model.weights.fused_pass.is_free


def _turned_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CpuDecoder.before
    monkeypatch.setattr(CpuDecoder, "before", lambda self, x, cos, sin: before(self, x, -cos, sin))


def _turned_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what no observer of K and V sees."""
    before = Angles.tables

    def tables(self, *given):
        found = before(self, *given)
        return found and {kind: (-cos, sin) for kind, (cos, sin) in found.items()}

    monkeypatch.setattr(Angles, "tables", tables)


@pytest.mark.parametrize("spoil", [_turned_in_halves, _turned_in_one_call])
def test_layers_that_would_be_wrong_get_their_own_code_back(
    spoil, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, "llama")
    right = kvq.load(folder, kv="fp32", weights="int8_g16").logits(IDS)
    spoil(monkeypatch)
    model = kvq.load(folder, kv="fp32", weights="int8_g16")
    assert not is_fused(model.weights.model)
    torch.testing.assert_close(model.logits(IDS), right, rtol=1e-3, atol=1e-3)

    def refuse(weights: object) -> None:
        raise ModelError("no")

    monkeypatch.setattr(loading, "probe", refuse)
    with pytest.raises(ModelError, match="no"):
        kvq.load(folder, kv="fp32", weights="int8_g16")


@pytest.mark.parametrize("weights", ["int8_g16", "auto"])
def test_layers_that_stay_as_they_are_give_a_row_the_same_bits_in_any_step(weights: str, tmp_path) -> None:
    folder = save_model(tmp_path, "llama", hidden_act="gelu", intermediate_size=128)
    model = kvq.load(folder, kv="fp32", weights=weights, device="cpu")
    assert not is_fused(model.weights.model)
    whole = model.logits(IDS)
    assert all(torch.equal(model.logits(IDS, chunk=size), whole) for size in (1, 7))


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj", "mlp"])
def test_what_is_hooked_runs_as_a_layer_of_its_own(name: str) -> None:
    model = kvq.load("tiny")
    before = model.logits(IDS)
    seen: list[torch.Tensor] = []
    layer = model.weights.model.model.layers[3].get_submodule(name)
    hook = layer.register_forward_hook(lambda module, given, output: seen.append(output))
    watched = model.logits(IDS)
    assert [x.shape[-1] for x in seen] == [getattr(layer, "out_features", 256)]
    assert (watched - before).abs().max() < 1e-4 * before.abs().max()
    hook.remove()
    layer.register_forward_hook(lambda module, given, output: output * 0)
    assert (model.logits(IDS) - before).abs().max() > 1e-2 * before.abs().max()


def test_time_in_linear_layers_is_seen_while_somebody_looks() -> None:
    model = kvq.load("tiny", weights="int8")
    before = model.logits(IDS)
    watch = _LinearTime(model.weights.model)
    after = model.logits(IDS)
    assert watch.take() > 0
    watch.close()
    assert (after - before).abs().max() < 1e-3 * before.abs().max()
    assert is_fused(model.weights.model)


def test_transformers_runs_the_model_past_kvq_as_before() -> None:
    model = kvq.load("tiny", weights="int8")
    own = model.weights.model
    own.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = own(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, model_logits(model), rtol=1e-2, atol=1e-2)


def model_logits(model: kvq.Model) -> torch.Tensor:
    model.weights.model.set_attn_implementation("kvq_packed")
    return model.logits(IDS)
