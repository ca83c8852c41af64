"""The engine in a process of its own: the same tokens, and an answer for everybody when it ends."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

import kvq
from kvq.engine import PrefixPin, SamplingParams
from kvq.engine.requests.outputs import Piece
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, EngineError, OutOfMemory
from kvq.models.describe.checkpoint import content_digest
from kvq.models.describe.resolve import EMBEDDED
from kvq.server.admission.metrics import Metrics
from kvq.server.engine import process as engine_process
from kvq.server.engine import worker
from kvq.server.engine.frames import MAX_FRAME, encode, from_engine, read, to_engine
from kvq.server.engine.messages import Ended, Refused, Start, Submit, pack
from kvq.server.engine.remote import Remote, State
from kvq.server.engine.worker import STUCK, _Worker
from tests.waiting import HANG_S, wait_for_async

OPTIONS = {"num_blocks": 64, "max_num_seqs": 8}
TINY = str(EMBEDDED["tiny"])
START = Start(folder=TINY, kv="int4", options=OPTIONS)
# An engine that is only slow is not given up.
PATIENT = {"ping_s": 0.1, "stall_s": HANG_S, "max_restarts": 1}
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def collect(remote, prompt, params, **options):
    """Tokens of the first result, and how the request ended."""
    tokens, ended = [], None
    async for message in remote.stream(prompt, RequestOptions(params=params), **options):
        if isinstance(message, Piece):
            tokens += message.token_ids if message.index == 0 else []
        else:
            ended = message
    return tokens, ended


def test_an_engine_that_loads_is_ended_at_once(monkeypatch):
    """It looks at its socket when it has loaded, which may take minutes."""
    lives = []
    popen = subprocess.Popen

    def note(*args, **options):
        lives.append(popen(*args, **options))
        return lives[-1]

    async def run():
        monkeypatch.setattr(engine_process.subprocess, "Popen", note)
        monkeypatch.setattr(engine_process, "_END_S", HANG_S)  # nobody waits for it to end by itself
        remote = Remote(START)
        starting = asyncio.create_task(remote.start())
        await wait_for_async(lambda: lives, "the engine process")
        starting.cancel()
        await remote.close()

    asyncio.run(run())
    assert [life.returncode for life in lives] == [-signal.SIGKILL]


def test_requests_get_what_an_engine_in_this_process_gives(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('code of the working directory ran')")
    monkeypatch.chdir(tmp_path)  # where `kvq serve --model .` is typed
    prompts = [[5 + i, 6, 7 + i] for i in range(12)]
    params = [SamplingParams(max_tokens=6 + i, temperature=i % 2, seed=i, logprobs=1) for i in range(12)]
    with kvq.LLM("tiny", "int4", **OPTIONS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    async def run():
        seen = []
        remote = Remote(START)
        remote.on_stepped = lambda stepped: seen.append(stepped.gauges)
        ready = await remote.start()
        assert ready.shape.num_blocks == [64, 64]
        found = await asyncio.gather(*(collect(remote, p, q) for p, q in zip(prompts, params, strict=True)))
        assert [tokens for tokens, _ in found] == wanted
        for tokens, ended in found:
            assert ended.error is None
            assert ended.receipt.generated_tokens == len(tokens)
            assert 0 < ended.timing.ttft_s <= ended.timing.e2e_s
        _, refused = await collect(remote, [5] * 64 * 32 + [6], SamplingParams(max_tokens=5))
        assert refused.kind == "request"
        assert "can never fit" in refused.error
        _, unknown = await collect(remote, [10**6], SamplingParams(max_tokens=5))
        assert "outside the vocabulary" in unknown.error

        stream = remote.stream(
            [1, 2, 3], RequestOptions(params=SamplingParams(max_tokens=1900, ignore_eos=True))
        )
        await anext(stream)
        await stream.aclose()  # a client that leaves
        await wait_for_async(lambda: seen[-1].running == 0, "the request to be cancelled")
        assert seen[-1].generated_tokens < sum(map(len, wanted)) + 1900

        heard = []
        stream = remote.stream([1, 2, 3], RequestOptions(params=params[0]), on_message=heard.append)
        await anext(stream)  # and reads no further
        await wait_for_async(lambda: isinstance(heard[-1], Ended), "the request to end")
        await stream.aclose()

        pid = remote.pid
        await remote.close()
        assert remote.state is State.CLOSED
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineError, match="no engine is ready, it is closed"):
            await collect(remote, [1], LONG)

    asyncio.run(run())


def test_an_engine_that_stops_or_is_killed_answers_everybody_and_is_started_so_often(caplog):
    async def lose(remote, kind, stall_s):
        heard = []
        told = partial(collect, remote, on_message=heard.append)
        waiting = [asyncio.create_task(told([5, 6, 7 + i], LONG)) for i in range(12)]
        await wait_for_async(lambda: remote.gauges and remote.gauges.running > 4, "requests that run")
        os.kill(remote.pid, kind)
        remote._stall_s = stall_s
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("send the request again" in str(error) for error in found)
        assert heard[-12:] == found

    async def run():
        reasons = []
        remote = Remote(START, **PATIENT, on_failed=reasons.append)
        await remote.start()
        pid = remote.pid
        await lose(remote, signal.SIGSTOP, 0.5)  # it will never answer
        remote._stall_s = HANG_S  # of the next life
        assert remote.state is State.RESTARTING
        with pytest.raises(EngineError, match="no engine is ready, it is restarting"):
            await collect(remote, [1], LONG)
        await wait_for_async(lambda: remote.state is State.READY, "the next engine")
        assert (remote.num_restarts, remote.pid != pid) == (1, True)
        tokens, ended = await collect(remote, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
        assert (len(tokens), ended.error) == (4, None)

        await lose(remote, signal.SIGKILL, HANG_S)  # noticed without asking
        await wait_for_async(lambda: remote.state is State.FAILED, "the engine to be given up")
        assert list(map(str, reasons)) == ["the engine ended 2 times within ten minutes"]
        await remote.close()

    asyncio.run(run())
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kvq"]
    assert ("ERROR", "the engine process ended with status -9") in told


def test_a_stopped_engine_is_gone_and_starts_again_with_its_metrics_kept():
    async def run():
        remote = Remote(START, **PATIENT)
        metrics = Metrics(remote, "tiny", ("kvq",))
        await remote.start()
        pid, params = remote.pid, SamplingParams(max_tokens=4, ignore_eos=True)
        first = await collect(remote, [5, 6, 7], params)
        waiting = asyncio.create_task(collect(remote, [5, 6, 7], LONG))
        await wait_for_async(lambda: remote.gauges.running, "the request to run")

        await remote.stop()

        with pytest.raises(EngineError):
            await waiting
        assert (remote.state, remote.pid, remote.gauges) == (State.STOPPED, None, None)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        before = metrics.total("generated_tokens")
        await remote.start()
        assert await collect(remote, [5, 6, 7], params) == (first[0], ANY)
        assert (remote.num_starts, remote.num_restarts) == (2, 0)
        await wait_for_async(lambda: metrics.total("generated_tokens") >= before + 4, "both are counted")
        await remote.close()
        assert remote.state is State.CLOSED

    asyncio.run(run())


def test_an_engine_that_was_given_up_can_be_started_again():
    async def run():
        remote = Remote(START, **PATIENT | {"max_restarts": 0})
        await remote.start()
        os.kill(remote.pid, signal.SIGKILL)
        await wait_for_async(lambda: remote.state is State.FAILED, "the engine to be given up")
        await remote.start()
        assert remote.state is State.READY
        await remote.close()

    asyncio.run(run())


def test_a_step_beyond_its_deadline_ends_the_engine():
    async def run():
        start = Start(folder=TINY, kv="int4", options={**OPTIONS, "step_deadline_s": 0.001})
        remote = Remote(start, max_restarts=0)
        await remote.start()
        process = remote._process.popen

        async def work():
            while True:  # until the watchdog got a core during a step
                await collect(remote, list(range(1, 1900)), SamplingParams(max_tokens=10))

        with pytest.raises(EngineError, match="send the request again"):
            await asyncio.wait_for(work(), HANG_S)
        await wait_for_async(lambda: remote.state is State.FAILED, "the engine to be given up")
        assert process.wait(HANG_S) == STUCK
        await remote.close()

    asyncio.run(run())


def test_an_engine_that_cannot_be_built_says_why_once_and_is_not_tried_again(caplog):
    async def run():
        reasons = []
        remote = Remote(Start(folder="/nowhere", kv="int4", options={}), on_failed=reasons.append)
        with pytest.raises(ConfigError, match="nowhere"):
            await remote.start()
        assert remote.state is State.FAILED
        assert len(reasons) == 1
        await remote.close()

    asyncio.run(run())
    assert [record for record in caplog.records if record.name == "kvq"] == []
    assert [record for record in caplog.records if record.name == "kvq"] == []


@pytest.mark.long
def test_an_engine_is_not_started_again_on_files_that_changed(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("kvq.json"))

    async def run():
        reasons = []
        start = Start(folder=str(folder), kv="int4", options=OPTIONS)
        remote = Remote(start, **PATIENT, on_failed=reasons.append)
        before = (await remote.start()).model_digest
        weights = folder / "model.safetensors"
        stored = bytearray(weights.read_bytes())
        stored[-1] ^= 0x80  # the sign of a weight
        weights.write_bytes(stored)
        os.kill(remote.pid, signal.SIGKILL)
        await wait_for_async(lambda: remote.state is State.FAILED, "the engine to be given up")
        await remote.close()
        now = content_digest([weights])
        assert before != now
        assert list(map(str, reasons)) == [
            f"the model's files changed while they were served, from digest {before} to {now}; "
            f"start the server again"
        ]

    asyncio.run(run())


@pytest.fixture
def unlogged(monkeypatch):
    """A worker in this process must leave its logging alone."""
    monkeypatch.setattr(worker, "configure", lambda _: SimpleNamespace(stop=lambda: None))


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (Start(folder=TINY, kv="int7", options={}), "int7"),
        (Start(folder=TINY, kv="int4", options={"num_block": 3}), "did you mean 'num_blocks'"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_reason(unlogged, start, reason):
    said = answer_of_a_worker(encode(start))
    refused = roundtrip(from_engine, said)
    assert isinstance(refused, Refused)
    assert reason in refused.reason


@pytest.mark.parametrize(
    ("error", "reason", "may_pass"),
    [
        (RuntimeError("no\nand more"), "the engine can't be built: RuntimeError: no", False),
        (OverflowError("x"), "the engine can't be built: OverflowError: x", False),
        (OutOfMemory("the KV pool has no room"), "the KV pool has no room", True),
        (MemoryError("x"), "the engine can't be built: MemoryError: x", True),
    ],
)
def test_whatever_fails_while_an_engine_is_built_is_told(unlogged, monkeypatch, error, reason, may_pass):
    def build(*_):
        raise error

    monkeypatch.setattr(worker, "build", build)
    refused = roundtrip(from_engine, answer_of_a_worker(encode(START)))
    assert (refused.reason.splitlines()[0].startswith(reason), refused.may_pass) == (True, may_pass)


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", encode("ping"), encode(START)[:-1]])
def test_the_engine_builds_nothing_that_was_not_said(unlogged, sent):
    assert answer_of_a_worker(sent) == b""


def answer_of_a_worker(sent):
    """What the engine process' own part answers, in this process, before the connection ends."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, contextlib.suppress(EngineError):
            ours.sendall(sent)
            ours.shutdown(socket.SHUT_WR)
            _Worker(theirs).run()
        return b"".join(iter(lambda: ours.recv(1 << 16), b""))


def test_the_engine_process_ends_when_nobody_says_what_to_build():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvq.server.engine.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(HANG_S) == 0


def roundtrip(decoder, data: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.close()
        return read(theirs, decoder)


def test_messages_come_out_as_they_went_in():
    params = SamplingParams(
        max_tokens=None,
        temperature=0.5,
        logit_bias={3: -1.5},
        stop=["a", "b"],
        stop_token_ids=[4],
        kept_special_ids=[5],
    )
    pins = [PrefixPin(length=2, seconds=1.0)]
    options = RequestOptions(params=params, pins=pins, priority="batch", tenant="x", cache_salt="y")
    submit = Submit(number=7, prompt=pack([1, 2]), options=options)
    assert roundtrip(to_engine, encode(submit)) == submit
    assert roundtrip(to_engine, b"") is None


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4, "little") + b"x",
        b"\x04\x00\x00\x00ab",
        b"\x01\x00\x00\x00\xc1",
        encode("1"),
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(EngineError):
        roundtrip(to_engine, data)


def test_messages_of_the_other_side_are_refused():
    with pytest.raises(EngineError, match="not a message of the other process"):
        roundtrip(from_engine, encode(1))
    assert Ended(number=1).error is None
