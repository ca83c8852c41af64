"""The engine process's own part, without the process."""

import socket
from time import perf_counter

import pytest

from kvq.engine import SamplingParams
from kvq.engine.build import build
from kvq.engine.requests.request_options import RequestOptions
from kvq.engine.sampling.logprobs import TokenLogprobs
from kvq.engine.steps.core import EngineCore
from kvq.server.engine import frames
from kvq.server.engine.frames import from_engine, read
from kvq.server.engine.memory import Memory
from kvq.server.engine.messages import Ended, Submit, pack
from kvq.server.engine.worker import _Worker


@pytest.fixture(scope="module")
def core():
    model, config = build("tiny", "int4", {"num_blocks": 16})
    core = EngineCore(model, config)
    yield core
    core.close()


def test_log_probabilities_beyond_a_frame_fail_their_own_request(core, monkeypatch):
    scored = [TokenLogprobs(token=5, logprob=-1.0, rank=1, top=((5, -1.0), (6, -2.0)))] * 100
    monkeypatch.setattr(frames, "MAX_FRAME", 1000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = _Worker(theirs)
        worker._ended = [Ended(number=1, prompt_logprobs=scored), Ended(number=2)]
        worker._tell(core, Memory(core.model.weights.device))
        stepped = read(ours, from_engine)
    large, other = stepped.ended
    assert (large.number, large.kind, large.prompt_logprobs) == (1, "request", None)
    assert "can't be sent: a message of" in large.error
    assert (other.number, other.error) == (2, None)


def test_a_request_that_came_while_a_step_ran_has_waited_since_then(core):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = _Worker(theirs)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        submit = Submit(number=1, prompt=pack([5, 6]), options=RequestOptions(params=params))
        worker._do(core, submit, perf_counter() - 3600.0)
        while core.has_work:
            core.step()
    [ended] = worker._ended
    assert 3600.0 < ended.timing.ttft_s < ended.timing.e2e_s
