"""`kvq chat` with templates that fail or never end: aside, so that a conversation outlives them."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvq
from kvq.commands.chat import engine
from kvq.commands.chat.chat import command
from kvq.commands.chat.engine import EnginePartner
from kvq.commands.chat.partner import ChatSampling
from kvq.commands.shared.options import ModelOptions
from kvq.models.describe.resolve import EMBEDDED
from tests.server.templates import LOOP
from tests.waiting import HANG_S, wait_for

LOOPS_LATER = (
    "{% if 'loop' in messages[-1].content %}" + LOOP + "{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
TURN = {"role": "user", "content": "Tell me of the sea."}


@pytest.fixture
def folder_of(tmp_path):
    def folder_of(template):
        folder = tmp_path / "model"
        shutil.copytree(EMBEDDED["tiny"], folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return folder

    return folder_of


def processes_of(session):
    """Those that live in a session, by their ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = path.read_text().partition(" ")
        except OSError:  # it has just ended
            continue
        state, *others = rest.rpartition(")")[2].split()
        if int(others[2]) == session and state != "Z":
            found.append(int(pid))
    return found


def partner_of(model):
    options = ModelOptions(model=str(model), device="cpu")
    sampling = ChatSampling(temperature=0.0, top_p=1.0, max_tokens=None, seed=None)
    return EnginePartner(options, "int4", sampling)


@pytest.fixture
def partner():
    with contextlib.closing(partner_of("tiny")) as made:
        yield made


@contextlib.contextmanager
def alarms_interrupt():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOP, "more than 1.0 s of processor time"),
        pytest.param("{% if %}", "TemplateSyntaxError", marks=pytest.mark.long),
        pytest.param("{{ 1 + none }}", "Type", marks=pytest.mark.long),
    ],
)
def test_a_broken_template_is_refused_before_the_weights_are_read(folder_of, template, says):
    folder = folder_of(template)
    for weights in folder.glob("*.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-4096:] = b"\xff" * 4096  # NaN
        weights.write_bytes(content)
    done = CliRunner().invoke(command, ["--kv", "int4", "--model", str(folder)], input="hi\n")
    assert isinstance(done.exception, kvq.ConfigError)
    assert "chat template is broken" in str(done.exception)
    assert says in str(done.exception)


def test_a_message_for_which_a_template_never_ends_fails_alone(folder_of):
    options = ["--kv", "int4", "-n", "4", "--model", str(folder_of(LOOPS_LATER))]
    done = CliRunner().invoke(command, options, input="one\nloop\ntwo\n")
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("kvq: the")]
    assert len(told) == 1
    assert "chat template takes more than 1.0 s of processor time" in told[0]


def test_what_is_no_unicode_is_refused_in_words(partner):
    with pytest.raises(kvq.RequestError, match="not valid Unicode"):
        partner.answer([{"role": "user", "content": "a\udc80"}], print)


@pytest.mark.long
def test_ctrl_c_within_a_template_ends_all(folder_of):
    """Also where a signal finds the command waiting for a reader."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq", "chat", "--kv", "int4", "-n", "2", "--model", folder_of(LOOPS_LATER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it may be ignored around tests
    )
    try:
        process.stdin.write(b"loop\n" * 60)  # a second each
        process.stdin.flush()
        for line in process.stderr:
            if b"processor time" in line:
                break
        assert len(processes_of(process.pid)) > 1
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
        assert process.returncode == 130
        assert said == b"kvq: interrupted\n"
        wait_for(lambda: not processes_of(process.pid), "all processes' end")
    finally:
        process.kill()
        process.wait()


def test_an_interrupted_answer_does_not_go_on_beside_the_next_one(partner):
    def answer_for_a_while(shown):
        def show(text):
            shown.append(text)
            if len(shown) == 3:  # while the next one is computed
                signal.setitimer(signal.ITIMER_REAL, 0.001)

        with pytest.raises(KeyboardInterrupt):
            partner.answer([TURN], show)

    first, second = [], []
    with alarms_interrupt():
        answer_for_a_while(first)
        num_shown = len(first)
        answer_for_a_while(second)
    assert len(first) == num_shown


def test_without_the_servers_packages_templates_are_read_here(monkeypatch):
    monkeypatch.setattr(engine, "is_installed", lambda module: False)
    done = CliRunner().invoke(command, ["--kv", "int4", "-n", "4"], input="hi\n")
    assert done.exit_code == 0, done.output
    assert done.stdout


def test_ctrl_c_ends_a_template_without_the_servers_packages_too(folder_of, monkeypatch):
    monkeypatch.setattr(engine, "is_installed", lambda module: False)
    with contextlib.closing(partner_of(folder_of(LOOPS_LATER))) as partner, alarms_interrupt():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            partner.answer([{"role": "user", "content": "loop"}], print)
