"""`kvq chat`, from a pipe and in a terminal."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from time import monotonic

import pytest
from click.testing import CliRunner

import kvq
from kvq.commands.chat.chat import command
from kvq.commands.chat.client import ServerPartner
from kvq.commands.chat.partner import ChatSampling
from kvq.models.describe.resolve import EMBEDDED
from tests.waiting import HANG_S

GREEDY = ["--kv", "int4", "--temperature", "0", "-n", "12"]


def chat(lines, *options):
    done = CliRunner().invoke(command, [*GREEDY, *options], input="\n".join(lines) + "\n")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_piped_messages_are_answered_as_one_conversation(tmp_path):
    saved = tmp_path / "talk.json"
    lines = ["Tell me of the sea.", "", "And of the land?", "/stats", f"/save {saved}", "/exit", "not said"]
    done = chat(lines, "--system", "Be brief.")
    assert done.exit_code == 0, done.output
    turns = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "assistant"]
    with kvq.LLM("tiny", "int4", num_blocks=64) as llm:
        for end in (2, 4):
            prompt = llm.model.tokenizer.apply_chat_template(
                turns[:end], tokenize=False, add_generation_prompt=True
            )
            [output] = llm.generate([prompt], kvq.SamplingParams(max_tokens=12))
            assert turns[end]["content"] == output.outputs[0].text
    assert done.stdout.startswith(turns[2]["content"] + "\n" + turns[4]["content"] + "\n")
    found = re.search(r"(\d+) prompt tokens \((\d+) cached\), 12 generated, ([\d,]+) bytes", done.stdout)
    assert int(found[1]) > int(found[2]) >= 32, "the turns before are reused"


def test_system_reset_and_wrong_commands(tmp_path):
    saved = tmp_path / "talk.json"
    done = chat(["Hello", "/reset", "/system Rhyme.", "/stat", f"/save {saved}", f"/save {saved}", "/save"])
    assert json.loads(saved.read_text(encoding="utf-8"))["messages"] == [
        {"role": "system", "content": "Rhyme."}
    ]
    assert "there is no /stat; did you mean '/stats'?" in done.stderr
    assert "/save needs a file's name" in done.stderr
    assert done.exit_code == 1


def test_other_files_are_not_overwritten(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("mine", encoding="utf-8")
    assert "is there already" in chat([f"/save {other}"]).stderr
    assert other.read_text(encoding="utf-8") == "mine"


def test_a_full_context_is_said_and_trimmed_when_asked():
    words, options = "the sea " * 18, ["--max-model-len", "128"]
    done = chat([words, words, words, "/reset", words], *options)
    assert done.exit_code == 1
    assert "the context is full" in done.stderr
    assert "/reset starts over; --trim drops" in done.stderr
    done = chat([words] * 4, *options, "--trim")
    assert done.exit_code == 0, done.output
    assert "the oldest turn was dropped" in done.stderr
    assert "/reset" in chat(["the sea " * 200], *options, "--trim").stderr


def test_base_models_are_for_generate(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(EMBEDDED["tiny"], folder)
    (folder / "chat_template.jinja").unlink()
    done = CliRunner().invoke(command, ["--model", str(folder)])
    assert isinstance(done.exception, kvq.ConfigError)
    assert "kvq generate" in str(done.exception)


class _Models(BaseHTTPRequestHandler):
    """A server that has one model, and nothing elsewhere."""

    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "found"}]}')

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_address_that_the_server_prints_will_do(path):
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{path}"
        sampling = ChatSampling(temperature=0.0, top_p=1.0, max_tokens=None, seed=None)
        assert ServerPartner(url, None, None, sampling).name == "found"
        server.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "file:///etc/passwd"], "URL must be an address"),
        (["--url", "http://127.0.0.1:9", "--kv", "int4"], "--kv"),
        (["--url", "http://127.0.0.1:9", "--api-key-env", "KVQ_NO_SUCH_KEY"], "KVQ_NO_SUCH_KEY"),
        (["--url", "http://127.0.0.1:9"], "can't be reached"),
        (["--api-key-env", "KEY"], "--api-key-env is for --url"),
    ],
)
def test_wrong_options_are_refused(options, message):
    done = CliRunner().invoke(command, options)
    assert isinstance(done.exception, kvq.KVQError)
    assert message in str(done.exception)


class Terminal:
    """`kvq chat` on a pseudo-terminal."""

    def __init__(self, *options):
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvq", "chat", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored around tests
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text):
        os.write(self._fd, text.encode())

    def until(self, pattern):
        """What is shown up to and with a pattern."""
        deadline = monotonic() + HANG_S
        while not (match := re.search(pattern, self._seen, re.S)):
            assert monotonic() < deadline, self._seen
            if select.select([self._fd], [], [], 0.1)[0]:
                self._seen += os.read(self._fd, 4096).decode(errors="replace")
        shown, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return shown


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends():
    terminal = Terminal("--kv", "int4", "--temperature", "0")
    try:
        terminal.until("> ")
        for message in ("Tell me of the sea.", "And now?"):  # answers that fill the context
            terminal.type(message + "\n")
            terminal.until(re.escape(message) + r"\r\n.{10}")
            terminal.process.send_signal(signal.SIGINT)
            terminal.until(r"\[stopped\]\r\n.*> ")
            terminal.type("/stats\n")
            terminal.until("the last answer was not completed.*> ")
            terminal.type("/reset\n")
            terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(HANG_S) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
