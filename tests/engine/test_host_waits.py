"""No step makes the host wait, and graphs hold only what they can repeat; on a GPU that isn't there."""

from array import array

import pytest
import torch

import kvq
from kvq.cache import KVCache
from kvq.engine.device.graphs import DecodeGraphs, Tables
from kvq.engine.device.transfers import Readback, readbacks
from kvq.kernels.attend import gathered
from kvq.models.parts.device import pick_device
from kvq.scheduler import Branch, Request, StepPlan
from tests.engine.gpu_kit import model_on, runner_on
from tests.engine.guard import no_host_waits
from tests.engine.imaginary_gpu import imaginary_gpu

FIRST, SECOND = (torch.device("cuda", i) for i in range(2))


@pytest.fixture
def gpu():
    """The second of two; the first one is current."""
    with imaginary_gpu(SECOND.index) as there:
        yield there


@pytest.mark.parametrize("family", ["tiny", "qwen3", "gpt_oss"])
def test_the_work_of_graphs_is_all_on_the_device_and_leaves_only_logits(gpu, family):
    model = model_on(gpu, family)
    groups = model.layout.groups
    cache = KVCache(model.layout, num_blocks=[5] * len(groups), device=gpu.device)
    there = [torch.zeros(3, 4, dtype=torch.int32, device=gpu.device) for _ in groups]
    tables = Tables(there, [table.cpu().numpy() for table in there], 100)
    kept = []

    def capture(work):
        if not kept:  # of the largest size; the others do the same
            work()  # what is compiled or made once
            gpu.launches.clear()
            with no_host_waits(gpu, captured=True) as made:
                work()
            kept.append(made)
        return work

    graphs = DecodeGraphs(model, cache, tables, max_num_seqs=2, capture=capture)
    layers = len(model.geometry.layers)
    assert [launch.kernel for launch in gpu.launches].count("rope_write_kernel") == layers
    assert kept[0].left(besides=[graphs._logits]) == []


@pytest.fixture
def waits_for_tokens(gpu, monkeypatch):
    """The one place where an engine waits, for tokens of the step before the one that it launched."""
    wait = Readback.wait

    def waited(readback):
        refused, gpu.waits[:] = gpu.waits[:], []
        try:
            return wait(readback)
        finally:
            gpu.waits[:] = refused

    monkeypatch.setattr(Readback, "wait", waited)


@pytest.mark.usefixtures("waits_for_tokens")
@pytest.mark.parametrize("is_captured", [True, False], ids=["graphs", "eager"])
def test_no_step_of_an_engine_waits_but_for_its_tokens(gpu, is_captured, monkeypatch):
    """Of prefill, of decodes and a prefill chunk, of decodes, and of forks that copy blocks."""
    if not is_captured:
        monkeypatch.setattr("kvq.engine.device.runner.decode_graphs", lambda *_, **__: None)
    model = model_on(gpu, "qwen3")
    llm = kvq.LLM(model, num_blocks=40, max_num_seqs=3, max_context=64, max_num_batched_tokens=16)
    step, kinds, copies = llm.core.step, set(), []

    def guarded():
        with no_host_waits(gpu):
            return step()

    monkeypatch.setattr(llm.core, "step", guarded)
    prepare = llm.core.runner.prepare
    monkeypatch.setattr(
        llm.core.runner, "prepare", lambda plan: (copies.extend(plan.orders), prepare(plan))[1]
    )
    llm.on_step(lambda stats: kinds.add((stats.decode_tokens > 0, stats.prefill_tokens > 0, gpu.current)))
    gpu.made.clear()
    params = kvq.SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    several = kvq.SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, n=2)
    outputs = llm.generate([[5] * 3, [7] * 20], [several, params])
    assert [output.error for output in outputs] == [None, None]
    assert kinds == {(False, True, SECOND), (True, True, SECOND), (True, False, SECOND)}
    assert copies
    assert ("a graph" in {launch.kernel for launch in gpu.launches}) == is_captured
    assert {where for _, where in gpu.made} == {SECOND}
    assert gpu.current == FIRST
    llm.close()


@pytest.mark.usefixtures("waits_for_tokens")
def test_steps_that_gather_rows_wait_for_nothing(gpu, monkeypatch):
    """Prompts in chunks, beside decodes; torch here was built without flash attention for GPUs."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(gathered, "LEAST_ROWS", 4)
    monkeypatch.setattr(gathered, "LEAST_PAIRS", 1)
    llm = kvq.LLM(
        model_on(gpu, "qwen3"), num_blocks=40, max_num_seqs=3, max_context=64, max_num_batched_tokens=16
    )
    step = llm.core.step
    flash, rows = gathered._flash, []

    def guarded():
        with no_host_waits(gpu):
            return step()

    def noted(q, *args, **options):
        rows.append(len(q))
        return flash(q, *args, **options)

    monkeypatch.setattr(llm.core, "step", guarded)
    monkeypatch.setattr(gathered, "_flash", noted)
    params = kvq.SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    outputs = llm.generate([[5] * 3, [7] * 40], params)
    assert [output.error for output in outputs] == [None, None]
    assert max(rows) > 4
    assert "_gather_kernel" in {launch.kernel for launch in gpu.launches}
    llm.close()


def plan_of(counts):
    """A prefill of so many tokens each."""
    request = Request(id="some", tokens=array("I", (0,)), max_tokens=1)
    return StepPlan(
        number=0,
        branches=[Branch(request=request, tokens=request.tokens, row=row) for row in range(len(counts))],
        num_decodes=0,
        counts=counts,
        ends=counts,
        samples=[True] * len(counts),
        token_ids=[0] * sum(counts),
        orders=[],
        table_changes=[(row, 0, 0, [row]) for row in range(len(counts))],
    )


@pytest.mark.parametrize("when", ["warming", "captured", "ending"])
def test_a_capture_that_fails_leaves_streams_and_memory_as_they_were(gpu, when, monkeypatch, caplog):
    begun = []
    own_work = DecodeGraphs._work

    def failing(self, size):
        work = own_work(self, size)

        def raises():
            begun.append(size)
            work()
            if len(begun) == {"warming": 4, "captured": 6, "ending": 0}[when]:  # of the second size
                raise RuntimeError("this can't be captured")

        return raises

    def never_ends(self):
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(DecodeGraphs, "_work", failing)
    if when != "warming":
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", never_ends)
    before = gpu.current_stream(SECOND)
    runner = runner_on(gpu, "qwen3", "fp16", max_num_seqs=2)
    assert runner._graphs is None
    assert "decode steps run without CUDA graphs" in caplog.text
    assert gpu.current_stream(SECOND) is before
    assert gpu.current == FIRST
    [stream] = {id(other): other for other in before.waits_for}.values()
    assert stream.device == SECOND
    assert not gpu.kept
    with no_host_waits(gpu):
        plan = plan_of([3, 2])
        runner.prepare(plan)
        output = runner.forward(plan)
    assert output.logits.shape[0] == 2


def test_captures_are_of_the_models_device(gpu):
    runner = runner_on(gpu, "qwen3", "fp16", max_num_seqs=2)
    assert runner._graphs is not None
    assert [what for what, _ in gpu.made] == ["stream", "graph", "graph"]
    assert {where for _, where in gpu.made} == {SECOND}
    assert gpu.current == FIRST


def test_a_gpu_is_named_with_its_index(gpu):
    assert pick_device("cuda") == FIRST
    assert pick_device("cuda:1") == SECOND


def test_reading_is_behind_the_stream_of_the_values_device(gpu):
    read = readbacks(gpu.device)(torch.zeros(3, 2, device=gpu.device))
    assert gpu.made == [("event", SECOND)]
    assert read.wait() == [[0, 0]] * 3
