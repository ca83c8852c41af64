"""The engine in a process of its own: the same tokens, and an answer for everybody when it ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from time import monotonic

import pytest

import kvq
from kvq.engine import SamplingParams
from kvq.errors import ConfigError, EngineError
from kvq.server.frames import MAX_FRAME, encode, from_engine, to_engine
from kvq.server.messages import Cancel, Delta, Ended, Ping, Start, Submit
from kvq.server.remote import Remote, State, Watch
from kvq.server.worker import STUCK

OPTIONS = {"num_blocks": 64, "max_num_seqs": 8}
START = Start(model="tiny", kv="int4", options=OPTIONS)
QUICK = Watch(ping_s=0.2, stall_s=4.0, max_restarts=4)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def collect(remote, prompt, params, **options):
    """Tokens of the first result, and how the request ended."""
    tokens, ended = [], None
    async for message in remote.stream(prompt, params, **options):
        if isinstance(message, Delta):
            tokens += message.token_ids if message.index == 0 else []
        else:
            ended = message
    return tokens, ended


async def until(condition, seconds=60.0):
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline, "it took too long"
        await asyncio.sleep(0.01)


def test_requests_get_what_an_engine_in_this_process_gives(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('code of the working directory ran')")
    monkeypatch.chdir(tmp_path)  # where `kvq serve --model .` is typed
    prompts = [[5 + i, 6, 7 + i] for i in range(12)]
    params = [SamplingParams(max_tokens=6 + i, temperature=i % 2, seed=i, logprobs=1) for i in range(12)]
    with kvq.LLM("tiny", "int4", **OPTIONS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    async def run():
        seen = []
        remote = Remote(START, on_gauges=seen.append)
        ready = await remote.start()
        assert ready.shape.num_blocks == [64]
        found = await asyncio.gather(*(collect(remote, p, q) for p, q in zip(prompts, params, strict=True)))
        assert [tokens for tokens, _ in found] == wanted
        for tokens, ended in found:
            assert ended.error is None
            assert ended.receipt.generated_tokens == len(tokens)
            assert 0 < ended.ttft_s <= ended.e2e_s
        _, refused = await collect(remote, [5] * 64 * 32 + [6], SamplingParams(max_tokens=5))
        assert refused.kind == "request"
        assert "can never fit" in refused.error
        _, unknown = await collect(remote, [10**6], SamplingParams(max_tokens=5))
        assert "outside the vocabulary" in unknown.error

        stream = remote.stream([1, 2, 3], LONG)  # a client that leaves
        await anext(stream)
        await stream.aclose()
        await until(lambda: seen[-1].running == 0)
        assert seen[-1].generated_tokens < sum(map(len, wanted)) + 50

        heard = []
        stream = remote.stream([1, 2, 3], params[0], on_message=heard.append)
        await anext(stream)  # and reads no further
        await until(lambda: isinstance(heard[-1], Ended))
        await stream.aclose()

        pid = remote.pid
        await remote.close()
        assert remote.state is State.CLOSED
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineError, match="no engine is ready, it is closed"):
            await collect(remote, [1], LONG)

    asyncio.run(run())


def test_an_engine_that_is_killed_or_stopped_answers_everybody_and_comes_back():
    async def run():
        remote = Remote(START, watch=QUICK)
        await remote.start()
        for kind, within in ((signal.SIGKILL, 5.0), (signal.SIGSTOP, 5.0 + QUICK.stall_s)):
            heard = []
            told = partial(collect, remote, on_message=heard.append)
            waiting = [asyncio.create_task(told([5, 6, 7 + i], LONG)) for i in range(12)]
            await until(lambda: remote.gauges is not None and remote.gauges.running > 4)
            killed, pid = monotonic(), remote.pid
            os.kill(pid, kind)
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert monotonic() - killed < within
            assert all("send the request again" in str(error) for error in found)
            assert heard[-12:] == found
            assert remote.state is State.RESTARTING
            with pytest.raises(EngineError, match="no engine is ready, it is restarting"):
                await collect(remote, [1], LONG)
            await until(lambda: remote.state is State.READY)
            assert remote.pid != pid
            tokens, ended = await collect(remote, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(tokens) == 4
            assert ended.error is None
        assert remote.num_restarts == 2
        await remote.close()

    asyncio.run(run())


def test_a_step_beyond_its_deadline_ends_the_engine():
    async def run():
        start = Start(model="tiny", kv="int4", options={**OPTIONS, "step_deadline_s": 0.05})
        remote = Remote(start, watch=Watch(max_restarts=0))
        await remote.start()
        process = remote._process.popen
        with pytest.raises(EngineError, match="send the request again"):
            await collect(remote, list(range(1, 1900)), SamplingParams(max_tokens=10))
        await until(lambda: remote.state is State.FAILED)
        assert process.wait(10) == STUCK
        await remote.close()

    asyncio.run(run())


def test_an_engine_that_keeps_ending_is_given_up(caplog):
    async def run():
        reasons = []
        remote = Remote(START, watch=Watch(max_restarts=0), on_failed=reasons.append)
        await remote.start()
        os.kill(remote.pid, signal.SIGKILL)
        await until(lambda: remote.state is State.FAILED)
        assert reasons == ["the engine ended 1 times within ten minutes"]
        await remote.close()

    asyncio.run(run())
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kvq"]
    assert told == [("ERROR", "the engine process ended with status -9")]


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (Start(model="tiny", kv="int5", options={}), "int5"),
        (Start(model="/nowhere", kv="int4", options={}), "nowhere"),
        (Start(model="tiny", kv="int4", options={"num_block": 3}), "did you mean 'num_blocks'"),
    ],
)
def test_an_engine_that_cannot_be_built_says_why_once_and_is_not_tried_again(start, reason, caplog):
    async def run():
        reasons = []
        remote = Remote(start, on_failed=reasons.append)
        with pytest.raises(ConfigError, match=reason):
            await remote.start()
        assert remote.state is State.FAILED
        assert len(reasons) == 1
        await remote.close()

    asyncio.run(run())
    assert [record for record in caplog.records if record.name == "kvq"] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff\xff\xff\xff",
        encode(Ping(number=1)),
        encode(START)[:-1],
    ],
)
def test_the_engine_process_ends_when_nobody_says_what_to_build(sent):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "kvq.server.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        worker.wait(30)


def roundtrip(decoder, data: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        return decoder.read(theirs)


def test_messages_come_out_as_they_went_in():
    params = SamplingParams(
        max_tokens=None,
        temperature=0.5,
        logit_bias={3: -1.5},
        stop=["a", "b"],
        stop_token_ids=[4],
        kept_special_ids=[5],
    )
    submit = Submit(number=7, prompt=[1, 2], params=params, tenant="x")
    assert roundtrip(to_engine(), encode(submit)) == submit
    assert roundtrip(to_engine(), b"") is None


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4, "little") + b"x",
        b"\x04\x00\x00\x00ab",
        b"\x01\x00\x00\x00\xc1",
        encode(Cancel(number="1")),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(EngineError):
        roundtrip(to_engine(), data)


def test_messages_of_the_other_side_are_refused():
    with pytest.raises(EngineError, match="not a message of the other process"):
        roundtrip(from_engine(), encode(Cancel(number=1)))
    assert Ended(number=1).error is None
