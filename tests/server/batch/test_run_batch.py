"""`kvq run-batch` as people run it: ended in the middle several times, run again, and complete."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvq
from kvq.commands.use.run_batch import _print, command
from kvq.server.batch.run import Summary
from kvq.server.engine.remote import Remote
from tests.waiting import HANG_S

NUM_LINES, TOKENS = 24, 8
OPTIONS = ("--kv", "int4", "--num-blocks", "128", "--max-num-seqs", "4")


def prompt_of(i):
    return f"The history of city number {i}"


def request(i):
    if i % 2:
        messages = [{"role": "user", "content": prompt_of(i)}]
        url, body = "/v1/chat/completions", {"messages": messages}
    else:
        url, body = "/v1/completions", {"prompt": prompt_of(i)}
    body |= {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    if i == NUM_LINES - 2:
        body |= {"max_token": 1, "user": "me"}
    return {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": body}


# Kills its engine after 5 results, and itself after 15.
KILLED = """
import os, signal, sys
from kvq import cli
from kvq.server.batch.result_file import ResultFile

write, written = ResultFile.write, []

def engine():
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        pids = file.read().split()
    [pid] = [pid for pid in pids if "worker" in open(f"/proc/{pid}/cmdline").read()]
    return int(pid)

def write_and_kill(journal, line):
    write(journal, line)
    written.append(line)
    if len(written) in (5, 15):
        os.kill(engine() if len(written) == 5 else os.getpid(), signal.SIGKILL)

ResultFile.write = write_and_kill
cli.main(sys.argv[1:])
"""


def expected():
    chat = "<|user|>\n{}\n<|assistant|>\n"
    prompts = [chat.format(prompt_of(i)) if i % 2 else prompt_of(i) for i in range(NUM_LINES)]
    with kvq.LLM("tiny", "int4", num_blocks=128) as llm:
        outputs = llm.generate(prompts, kvq.SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    return {f"id-{i}": output.outputs[0].text for i, output in enumerate(outputs)}


def text_of(body):
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A batch whose engine was killed, that was killed itself, and run to its end."""
    folder = tmp_path_factory.mktemp("batch")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    lines = [json.dumps(request(i)) for i in range(NUM_LINES)]
    lines[3:3] = ["no request", json.dumps(request(0)), json.dumps(request(90) | {"url": "/v1/nothing"})]
    source.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-c", KILLED, "run-batch", *OPTIONS, str(source), str(target)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert target.read_bytes().count(b"\n") == 15
    (folder / "summary").write_text(run(source, target).output, encoding="utf-8")
    return folder


def run(*paths):
    return CliRunner().invoke(command, [*OPTIONS, *map(str, paths)])


def results(folder):
    return [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_batch_that_was_ended_twice_has_every_answer_once_and_they_are_the_engines(folder):
    found = [result for result in results(folder) if result["response"] is not None]
    answers = {r["custom_id"]: r["response"]["body"] for r in found if r["response"]["status_code"] == 200}
    assert len(found) == len(answers) + 1 == NUM_LINES + 1
    assert {name: text_of(body) for name, body in answers.items()} == expected()
    assert len({result["id"] for result in results(folder)}) == NUM_LINES + 3


def test_lines_that_are_no_requests_have_an_error_each(folder):
    errors = {r["error"]["line"]: (r["custom_id"], r["error"]["code"]) for r in results(folder) if r["error"]}
    assert errors == {4: (None, "invalid_line"), 5: (None, "duplicate_custom_id")}
    [refused] = [r for r in results(folder) if r["custom_id"] == "id-90"]
    assert refused["response"]["status_code"] == 404
    assert "/v1/chat/completions" in refused["response"]["body"]["error"]["message"]
    summary = (folder / "summary").read_text(encoding="utf-8")
    assert "failed    3 of all" in summary
    assert "ignored   fields in 1 of these: max_token, user; --strict-requests refuses unkn" in summary


def test_the_commonest_reasons_of_failures_are_said(capsys):
    summary = Summary(num_new=14)
    for number in range(12):
        summary.fail(f"400 reason {number}")  # after some kinds no more are kept
    summary.fail("400 reason 1")
    _print(summary, Path("out.jsonl"), is_strict=False)
    said = capsys.readouterr().out
    assert "failed    13 of all in out.jsonl\n          2 x 400 reason 1\n          1 x 400 reason " in said
    assert said.count(" x 400 ") == 3
    _print(Summary(num_skipped=5, num_failed=5), Path("out.jsonl"), is_strict=False)
    assert "name another file than out.jsonl to try them again" in capsys.readouterr().out


def test_a_batch_that_is_complete_starts_no_engine(folder, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    before = (folder / "out.jsonl").read_bytes()
    done = run(folder / "in.jsonl", folder / "out.jsonl")
    assert done.exit_code == 1, done.output
    assert f"0 answered now, {NUM_LINES + 3} before" in done.output
    assert (folder / "out.jsonl").read_bytes() == before


def test_ctrl_c_ends_it_with_a_hint(tmp_path, monkeypatch):
    async def start(_):
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr(Remote, "start", start)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(request(1)), encoding="utf-8")
    done = run(source, target)
    assert done.exit_code != 0
    assert "run the same command again to continue" in done.stderr
    assert target.read_bytes() == b""


@pytest.mark.parametrize("source", ["missing.jsonl", "out.jsonl", "."])
def test_files_that_cannot_be_used_are_refused(tmp_path, source):
    (tmp_path / "out.jsonl").touch()
    done = run(tmp_path / source, tmp_path / "out.jsonl")
    assert isinstance(done.exception, kvq.ConfigError)
