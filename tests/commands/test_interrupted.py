"""SIGTERM ends every command as Ctrl-C does, from its first moments on."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvq.bench.serve.process import ServerProcess
from kvq.commands.shared import interrupts
from kvq.models.describe import resolve
from kvq.server import run
from kvq.server.admission.config import ServerConfig
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


class Looked(dict):
    """Embedded models, of which a name is looked for."""

    def __init__(self, look):
        super().__init__()
        self._look = look

    def __contains__(self, name):
        return bool(self._look(name))


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[0])
def test_sigterm_while_a_model_is_looked_for(kvq, tmp_path, monkeypatch, line):
    def killed(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("goes on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "EMBEDDED", Looked(killed))
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = kvq(*line)
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "kvq: interrupted"
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_is_not_cut_in_two(kvq, tmp_path, monkeypatch, number):
    """numpy can't be imported twice, and packages that catch everything go on as if nothing had been."""
    (tmp_path / "catches_all.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {number:d})\n"
        "try:\n    time.sleep(0.2)\n    whole = True\nexcept BaseException:\n    whole = False\n"
    )

    def look(_):
        import catches_all

        assert catches_all.whole
        time.sleep(HANG_S)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "catches_all", raising=False)
    monkeypatch.setattr(resolve, "EMBEDDED", Looked(look))
    assert kvq("inspect", *MODEL)[0] == 130


def test_a_signal_that_is_ignored_stays_so(kvq, monkeypatch):
    """As in a job that a script sent to the background."""
    monkeypatch.setattr(resolve, "EMBEDDED", Looked(lambda name: os.kill(os.getpid(), signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status, _, err = kvq("inspect", *MODEL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status != 130, err


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


INTERRUPTED_IMPORT = """
import os, signal, sys

_, _, module, number = sys.argv

class Finder:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), int(number))
        if name == "kvq.server.run":
            print("it goes on")

sys.meta_path.insert(0, Finder)
from kvq.__main__ import main
sys.argv = ["kvq", "serve", "--model", "tiny", "--port", "0"]
main()
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("kvq.cli", signal.SIGINT),
        ("kvq.cli", signal.SIGTERM),
        ("kvq.commands.use.serve", signal.SIGTERM),
        ("pydantic", signal.SIGINT),
    ],
)
def test_an_interrupt_while_the_command_is_loaded(module, number):
    """A server ends at once: it has begun nothing, and imports take seconds."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "-", module, str(int(number))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "kvq: interrupted\n")


def test_an_end_is_told_once(monkeypatch):
    """Also if a signal that was put off comes within it."""
    written = []

    def write(_, line):
        written.append(line)
        os.kill(os.getpid(), signal.SIGALRM)

    monkeypatch.setattr(interrupts.os, "write", write)
    monkeypatch.setattr(interrupts.os, "_exit", lambda status: written.append(status))
    with interrupts.interruptible():
        interrupts._end()
    assert written == [b"kvq: interrupted\n", 130]


def test_a_server_does_not_wait_for_a_tokenizer_that_loads_for_ever(monkeypatch, tmp_path):
    """Nor for its thread, when the process is to end."""
    never = threading.Event()

    def load(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(HANG_S)
        raise AssertionError("it was waited for")

    monkeypatch.setattr(run, "load_without_torch", load)
    with pytest.raises(KeyboardInterrupt):
        run.serve(ServerConfig(model="tiny", port=0))
    never.set()


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("tool calls", signal.SIGINT),
        ("loading weights", signal.SIGTERM),
        pytest.param("tool calls", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("loading weights", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_a_server_that_is_interrupted_before_it_is_ready(number, moment):
    """At a terminal all its processes get the signal: one line is said, by one of them."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvq", "serve", *MODEL, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        said = next(line for line in server.stderr if moment in line)
        os.killpg(server.pid, number)
        said += server.stderr.read()
    assert server.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "kvq: interrupted"
