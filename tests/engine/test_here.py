"""An engine stays in the process that made it."""

import asyncio
import copy
import multiprocessing
import os
import pickle

import pytest

import kvq
from kvq.errors import EngineError


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
            assert "start processes by 'spawn'" in said
        assert in_a_fork(llm.close) == "None"
        assert llm.generate("Once", structured)[0].outputs[0].text == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_of_a_stepping_engine_is_told_so():
    async def main():
        async with kvq.AsyncLLM("tiny", "int4", num_blocks=64) as engine:
            await engine.generate("Once", kvq.SamplingParams(max_tokens=2))

            def work():
                return asyncio.run(engine.generate("Once"))

            return await asyncio.to_thread(in_a_fork, work)

    assert "EngineError: this engine was made in process" in asyncio.run(main())


def test_an_engine_is_neither_pickled_nor_copied():
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        for one in (llm, llm.core):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(EngineError, match="can't be pickled or copied"):
                    copied(one)
        spawned = multiprocessing.get_context("spawn").Process(target=print, args=(llm,))
        with pytest.raises(EngineError, match="can't be pickled"):
            spawned.start()
