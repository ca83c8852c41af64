"""Steps that run in the kernels' threads while Python goes on: their bits, their ends, what else runs."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch

import kvq
import kvq.models.parts.angles as angles
from benchmarks.peers.neighbours import neighbours
from kvq.kernels.decoder.whole import ReadyPass
from kvq.kernels.native.library import load
from kvq.models.run.packing import positions_of, ready_pass
from tests.helpers_models import random_tokens
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="the C++ kernels were not built")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Steps:
    """One sequence of a model over blocks of its own, whose steps are made ready one by one."""

    def __init__(self, model: kvq.Model) -> None:
        self.session = model.session(max_tokens=256)
        self.sequence = self.session.new_sequence()

    @torch.inference_mode()
    def ready(self, tokens: list[int]) -> ReadyPass:
        session, count = self.session, len(tokens)
        slots = session.manager.append([(self.sequence, count)])
        session.cache.carry_out(session.manager.take_orders())
        lens, ends = [count], [self.sequence.length]
        step = session._step([self.sequence], slots, lens, ends)
        whole = ready_pass(session.weights, step, tokens, positions_of(lens, ends), range(count))
        assert whole is not None
        session.manager.commit(self.sequence)
        return whole


def pieces(seed: int) -> list[list[int]]:
    tokens, sizes = random_tokens(200, seed=seed), [1, 1, 3, 40, 1, 17, 1, 1, 90, 1]
    return [tokens[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def logits_of(model: kvq.Model, seed: int) -> list[torch.Tensor]:
    steps, found = Steps(model), []
    for tokens in pieces(seed):
        whole = steps.ready(tokens)
        whole.run()
        found.append(whole.logits)
    return found


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_a_step_aside_has_the_bits_of_one_that_is_waited_for_whatever_else_runs(kv: str) -> None:
    model = kvq.load("tiny", kv=kv)
    wanted, others = logits_of(model, 1), logits_of(model, 2)
    for meanwhile in ("nothing", "ready", "another"):
        steps, coming = Steps(model), None
        for i, tokens in enumerate(pieces(1)):
            whole = coming or steps.ready(tokens)
            whole.begin()
            coming = None
            if meanwhile == "ready" and i + 1 < len(wanted):
                coming = steps.ready(pieces(1)[i + 1])
            elif meanwhile == "another":
                assert all(map(torch.equal, logits_of(model, 2), others))
            whole.wait()
            assert torch.equal(whole.logits, wanted[i])
            assert whole.seconds > 0


@pytest.mark.parametrize("busy", [False, True])
def test_steps_aside_of_several_threads_each_have_their_bits(busy: bool) -> None:
    model = kvq.load("tiny", kv="int8")
    wanted = [logits_of(model, seed) for seed in range(3)]

    def run(seed: int) -> bool:
        torch.set_num_threads(2)
        steps = Steps(model)
        for tokens, logits in zip(pieces(seed), wanted[seed], strict=True):
            whole = steps.ready(tokens)
            whole.begin()
            whole.wait()
            if not torch.equal(whole.logits, logits):
                return False
        return True

    with neighbours(2 * busy * len(os.sched_getaffinity(0))), ThreadPoolExecutor(3) as pool:
        for _ in range(10):
            assert all(pool.map(run, range(3)))


def test_a_step_that_nobody_waits_for_ends_before_its_memory_is_gone() -> None:
    model = kvq.load("tiny", kv="int8")
    [wanted] = logits_of(model, 1)[:1]
    for _ in range(50):
        whole = Steps(model).ready(pieces(1)[0])
        logits = whole.logits
        whole.begin()
        del whole
        assert torch.equal(logits, wanted)


def test_a_step_that_begins_late_reads_the_angles_it_was_made_ready_with(monkeypatch) -> None:
    wanted = logits_of(kvq.load("tiny", kv="fp32"), 1)
    monkeypatch.setattr(angles, "_PAGE", 16)  # so tables grow from step to step
    steps = Steps(kvq.load("tiny", kv="fp32"))
    whole = steps.ready(pieces(1)[0])
    for i, logits in enumerate(wanted):
        coming = steps.ready(pieces(1)[i + 1]) if i + 1 < len(wanted) else None
        held = [(ctypes.c_void_p * size)(*[8] * size) for size in (1, 2) for _ in range(1000)]
        whole.run()
        del held  # it lay where something was freed
        assert torch.equal(whole.logits, logits)
        whole = coming


def test_a_step_that_ended_takes_nobodys_place_until_it_is_waited_for() -> None:
    model = kvq.load("tiny", kv="int8")
    wanted = logits_of(model, 1)
    first = Steps(model).ready(pieces(1)[0])
    first.begin()
    wait_for(lambda: first.took_s > 0, "it ended")
    steps, began = Steps(model), []
    for tokens, logits in zip(pieces(1), wanted, strict=True):
        whole = steps.ready(tokens)
        began.append(whole.begin())
        whole.wait()
        assert torch.equal(whole.logits, logits)
    assert all(began[1:])
    first.wait()
    assert torch.equal(first.logits, wanted[0])


def test_tokens_may_be_written_until_a_step_begins() -> None:
    model = kvq.load("tiny", kv="fp32")
    wanted = logits_of(model, 1)[0]
    whole = Steps(model).ready([0] * len(pieces(1)[0]))
    with torch.inference_mode():
        whole.tokens.copy_(torch.tensor(pieces(1)[0]))
    whole.begin()
    whole.wait()
    whole.wait()  # nothing is waited for twice
    assert torch.equal(whole.logits, wanted)


_FORK = """
import os
from concurrent.futures import ThreadPoolExecutor
import torch
import kvq
import tests.conftest  # the build that is tested
from tests.models.test_aside import Steps, logits_of, pieces

def begin():
    torch.set_num_threads(2)
    whole = Steps(shared["model"]).ready(pieces(1)[0])
    whole.begin()
    return whole

def load():
    torch.set_num_threads(2)
    shared["model"] = kvq.load("tiny", kv="int8")
    shared["wanted"] = logits_of(shared["model"], 1)

shared = {}
pool = ThreadPoolExecutor(1)  # for all that computes: libgomp does not survive a fork in the thread it ran in
pool.submit(load).result()
torch.set_num_threads(2)
for round in range(6):
    whole = pool.submit(begin).result()
    child = os.fork()
    if not child:
        whole.wait()  # its threads are the parent's: it has no end here
        os._exit(0 if all(map(torch.equal, logits_of(shared["model"], 1), shared["wanted"])) else 1)
    pool.submit(whole.wait).result()
    assert torch.equal(whole.logits, shared["wanted"][0])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (round, status)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""), reason="it takes no new threads after such forks"
)
def test_a_process_forked_while_a_step_runs_aside_has_no_part_in_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.stdout == "done\n", ran.stderr


_EXIT = """
import torch
import kvq
import tests.conftest  # the build that is tested
from tests.models.test_aside import Steps, pieces

torch.set_num_threads(2)
model = kvq.load("tiny", kv="int8")
steps = Steps(model)
whole = steps.ready(pieces(1)[8])
whole.begin()
print("done")
"""


def test_an_interpreter_that_ends_while_a_step_runs_aside_ends_in_order() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
    assert "Exception ignored" not in ran.stderr
