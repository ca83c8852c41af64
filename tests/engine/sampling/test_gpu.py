"""Promises: on a GPU the sampler chooses as on a CPU, in few launches, and the host waits for nothing."""

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kvq.engine.params import SamplingParams
from kvq.engine.sampling import sampler
from kvq.engine.sampling.sampler import Sampler
from kvq.kernels.draw import reference, triton
from kvq.watermark import Green, Tournament
from kvq.watermark.key import key_from
from tests.engine.guard import no_host_waits
from tests.engine.imaginary_gpu import ImaginaryGPU, imaginary_gpu
from tests.engine.launches import Launches
from tests.engine.sampling.reference import add, bitmask
from tests.engine.sampling.test_sampler import _random_request, _run
from tests.kernels.draw.kit import interpreted_masses

_MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.3, top_k=5000, top_p=0.95),
]
_ALL = SamplingParams(
    temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={3: 1.0},
    min_tokens=4, logprobs=3,
)  # fmt: skip


def _on(gpu: ImaginaryGPU, params: list[SamplingParams], vocab: int) -> Sampler:
    target = Sampler(max_rows=len(params), vocab_size=vocab, device=gpu.device)
    for row, each in enumerate(params):
        add(target, row, each, prompt=range(50), generated=[row, 7], seed=row, stop_ids=[1, 2])
    return target


def _launched(params: list[SamplingParams], masks: bool = False) -> tuple[int, int, int]:
    """Launches of Triton's kernels, of torch's, and copies of a step that waits for nothing."""
    vocab = 5000
    with imaginary_gpu() as gpu:
        target = _on(gpu, params, vocab)
        logits = torch.zeros(len(params), vocab, dtype=torch.bfloat16, device=gpu.device)
        allowed = {0: bitmask({1}, vocab), 2: bitmask({9}, vocab)} if masks else None
        rows, launches = list(range(len(params))), Launches()
        for row in rows:
            target.record(row, 100)
        with no_host_waits(gpu), launches:
            target.sample(logits, rows, [1] * len(rows), masks=allowed)
        return len(gpu.launches), len(launches.kernels), launches.copies


@pytest.mark.parametrize("batch", [6, 60])
def test_a_step_of_any_mix_takes_few_launches_and_waits_for_nothing(batch: int) -> None:
    triton_launches, kernels, copies = _launched(_MIX * (batch // len(_MIX)))
    assert (triton_launches, kernels) == (7, 0)
    assert copies == 2, "the parameters go up, the tokens come down"


def test_greedy_rows_take_two_launches() -> None:
    assert _launched([SamplingParams(temperature=0.0)] * 3) == (2, 0, 1)


def test_penalties_biases_masks_and_logprobs_wait_for_nothing() -> None:
    few, many = (_launched([_ALL, *_MIX] * times, masks=True) for times in (1, 9))
    assert few == many, "launches grow with the rows"


@pytest.mark.parametrize("seed", range(2))
def test_a_gpu_chooses_what_a_cpu_chooses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "masses", interpreted_masses)
    pick = random.Random(seed)
    requests = [_random_request(pick, 33) for _ in range(10)]
    wanted = _run(requests, 33, list(range(10)))
    monkeypatch.setattr(sampler, "kernel_for", lambda device: triton.draw)
    with warnings.catch_warnings():  # NumPy reports the casts of what is masked
        warnings.simplefilter("ignore", RuntimeWarning)
        assert _run(requests, 33, list(range(10))) == wanted


def test_what_steps_launch_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[object] = set()

    def run(kernel: Any, *, grid: object, warmup: bool, **given: Any) -> None:
        dtypes = tuple(x.dtype for x in given.values() if isinstance(x, torch.Tensor))
        compiled_in = {k: v for k, v in given.items() if k.isupper() or k not in kernel.arg_names}
        seen.add((kernel.fn.__name__, dtypes, tuple(compiled_in.items())))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(sampler, "kernel_for", lambda device: triton.draw)
    target = Sampler(max_rows=8, vocab_size=5000, device=torch.device("cpu"))
    target.compile(torch.bfloat16)
    before = seen.copy()
    for row, params in enumerate([*_MIX, replace(_ALL, logprobs=None)]):
        add(target, row, params)
    logits = torch.zeros(7, 5000, dtype=torch.bfloat16)
    for rows in ([0], [1], [1, 2, 3], [6, 5], range(7)):
        for masks in (None, {0: bitmask({1}, 5000)}):
            target.sample(logits[: len(rows)], list(rows), [9] * len(rows), masks=masks)
    assert seen == before


@pytest.mark.parametrize("scheme", [Green(), Tournament()], ids=str)
def test_marking_rows_makes_nobody_wait(scheme: Green | Tournament) -> None:
    key = key_from(b"the key of these tests")
    marked = [replace(params, watermark=True) for params in (*_MIX, _ALL)]
    with imaginary_gpu() as gpu:
        target = Sampler(max_rows=8, vocab_size=5000, device=gpu.device, watermark=(scheme, key))
        for row, each in enumerate(marked):
            add(target, row, each, prompt=range(50), generated=[row, 7], seed=row)
        logits = torch.zeros(len(marked), 5000, dtype=torch.bfloat16, device=gpu.device)
        rows, contexts = list(range(len(marked))), {row: [*range(50), row, 7] for row in range(len(marked))}
        with no_host_waits(gpu):
            target.sample(logits, rows, [2] * len(rows), contexts=contexts)
