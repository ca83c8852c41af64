"""An engine stays in the process that made it."""

import asyncio
import copy
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest

import kvq
from kvq.errors import EngineError
from tests.waiting import HANG_S


def in_a_fork(work):
    """What `work` says in a forked child, which ends without a cleanup."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()
        except Exception as error:  # noqa: BLE001 - whatever it says
            said = f"{type(error).__name__}: {error}"
        os.write(writing, str(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_so_and_its_parent_goes_on():
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        structured = kvq.SamplingParams(max_tokens=4, structured=kvq.StructuredOutput(choice=["a", "b"]))
        before = llm.generate("Once", structured)[0].outputs[0].text
        for work in (lambda: llm.generate("Once"), lambda: list(llm.stream("Once")), llm.step):
            said = in_a_fork(work)
            assert said.startswith("EngineError: this engine was made in process")
            assert "start processes by 'spawn' (multiprocessing.get_context)" in said
        assert in_a_fork(llm.close) == "None"
        assert llm.generate("Once", structured)[0].outputs[0].text == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_of_a_stepping_engine_is_told_so():
    async def main():
        async with kvq.AsyncLLM("tiny", "int4", num_blocks=64) as engine:
            await engine.generate("Once", kvq.SamplingParams(max_tokens=2))

            works = (
                lambda: asyncio.run(engine.generate("Once")),
                lambda: kvq.LLM("tiny", "int4", num_blocks=64),
                lambda: kvq.LLM(engine.core.model, num_blocks=64),
                lambda: kvq.load("tiny", "int4"),
                lambda: in_a_fork(lambda: kvq.load("tiny", "int4")),
            )
            return [await asyncio.to_thread(in_a_fork, work) for work in works]

    used, *made = asyncio.run(main())
    assert used.startswith("EngineError: this engine was made in process")
    for said in made:
        assert "while an engine's thread ran there; no model and no engine can be made here" in said
        assert "start processes by 'spawn' (multiprocessing.get_context)" in said
    assert in_a_fork(lambda: type(kvq.load("tiny", "int4")).__name__) == "Model"  # the thread has ended


def test_an_engine_is_neither_pickled_nor_copied():
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        for one in (llm, llm.core):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(EngineError, match="can't be pickled or copied"):
                    copied(one)
        spawned = multiprocessing.get_context("spawn").Process(target=print, args=(llm,))
        with pytest.raises(EngineError, match="can't be pickled"):
            spawned.start()


_CHILDREN = """
import os, sys
import torch
import kvq
from multiprocessing import get_context
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(2)
GREEDY = kvq.SamplingParams(max_tokens=4, temperature=0)
other = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2, num_key_value_heads=2)).eval()

def large():
    return torch.randn(1500, 1500, generator=torch.Generator().manual_seed(0)).relu().sum().item()

def engine(model="tiny"):
    return kvq.LLM(model, "int4", num_blocks=64).generate("Once", GREEDY)[0].outputs[0].token_ids

def cache():
    from kvq.cache.transformers.cache import KvqCache
    made = KvqCache(other.config, kv="int8")
    return other(torch.arange(40)[None], past_key_values=made).logits.sum().item()

def in_a_child(work):
    child = os.fork()
    if not child:
        os._exit(0 if work() == expected[work] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, work

large()  # torch's threads, before any of kvq's code is there
assert "kvq.kernels.other_threads" not in sys.modules
expected = {large: large()}
in_a_child(large)
model = kvq.load("tiny", "int4")
works = [lambda: engine(model), lambda: model.logits([5, 6, 7]).sum().item(), cache, engine, large]
expected = {work: work() for work in works}
for work in works:
    assert large() == expected[large]  # by a new team, which the fork ends
    in_a_child(work)
with get_context("fork").Pool(2) as pool:
    assert pool.map(engine, ["tiny"]) == [expected[engine]]
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""), reason="it takes no new threads after such forks"
)
def test_a_child_of_a_process_whose_threads_ran_makes_engines_of_its_own():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", _CHILDREN],
        capture_output=True, text=True, timeout=HANG_S, check=False, env=environment,
    )  # fmt: skip
    assert ran.stdout == "done\n", ran.stderr


_OPEN = """
import asyncio, gc, sys, threading
import kvq

LONG = kvq.SamplingParams(max_tokens=1000, ignore_eos=True)
model = kvq.load("tiny", "int4")

def begun(stream):
    next(stream)
    return stream

def produced():
    with kvq.LLM(model, num_blocks=64) as llm:
        yield from llm.stream("Once", LONG)

class Holder: pass

llm = kvq.LLM(model, num_blocks=64)
streams = [begun(llm.stream("Once upon a time", LONG)) for _ in range(2)]
unbegun = llm.stream("Once", LONG)
bound = begun(kvq.LLM(model, num_blocks=64).stream("a", kvq.SamplingParams(
    max_tokens=60, structured=kvq.StructuredOutput(regex="[a-z ]{200}"))))
inner = begun(produced())
cycle = Holder()
cycle.own, cycle.stream = cycle, begun(kvq.LLM(model, num_blocks=64).stream("Once", LONG))
gc.disable()
del cycle
session = model.session(max_tokens=64)
session.forward([(session.new_sequence(), [5, 6, 7])])

async def left_open():
    engine = kvq.AsyncLLM(model, num_blocks=64)
    stream = engine.stream("Once", LONG)
    await anext(stream)
    return engine, stream

def forever():
    async def main():
        async for _ in kvq.AsyncLLM(model, num_blocks=64).stream("Once", LONG):
            running.set()
    asyncio.run(main())

running = threading.Event()
threading.Thread(target=forever, daemon=True).start()
running.wait()
loop = asyncio.new_event_loop()
kept = loop.run_until_complete(left_open())
if len(sys.argv) > 2:
    loop.close()
print("done", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("status", "more"), [(0, []), (3, ["closed"])])
def test_what_is_left_open_at_the_end_of_a_program_says_nothing(status, more):
    ran = subprocess.run(
        [sys.executable, "-c", _OPEN, str(status), *more],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "done\n", "")
