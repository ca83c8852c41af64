"""SIGTERM ends every command as Ctrl-C does, from its first moments on."""

import asyncio
import os
import signal

import pytest

from kvq.bench.serve_process import ServerProcess
from kvq.models import resolve
from tests.waiting import HANG_S

MODEL = ("--model", "tiny")
COMMANDS = [
    ("perplexity", *MODEL),
    ("eval", *MODEL),
    ("generate", *MODEL, "A cat"),
    ("chat", *MODEL),
    ("inspect", *MODEL),
    ("tune", "tiny", "--out", "new.json"),
    ("calibrate", "tiny", "--out", "new.json"),
    ("quantize", "tiny", "--out", "new"),
    ("serve", *MODEL, "--port", "0"),
    ("bench", "engine", *MODEL),
]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[0])
def test_sigterm_while_a_model_is_looked_for(kvq, tmp_path, monkeypatch, line):
    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("goes on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_embedded", killed)
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = kvq(*line)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "kvq: interrupted"
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []


def test_a_server_does_not_outlive_an_interrupted_start():
    async def interrupt():
        server = ServerProcess([*MODEL, "--num-blocks", "8"])
        entering = asyncio.create_task(server.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(entering, HANG_S)
        return server.process.poll()

    assert asyncio.run(interrupt()) is not None
