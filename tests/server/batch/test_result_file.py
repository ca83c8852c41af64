"""The file of results: whatever a kill leaves of it, the next run goes on from there."""

import json
import os
import subprocess
import sys

import pytest

from kvq.errors import ConfigError
from kvq.server.batch.lines import Line, encode_answer, encode_fault, parse_line, read_lines
from kvq.server.batch.result_file import ResultFile
from kvq.server.http.problems import Problem, unavailable

LINES = [Line(number=i, custom_id=f"id-{i}") for i in range(1, 6)]


def encode_problem(line, problem):
    return encode_answer(line, problem.body(), problem.status)


def names(path):
    return [json.loads(line)["custom_id"] for line in path.read_text(encoding="utf-8").splitlines()]


def unfinished(results, lines=LINES):
    return [line.number for line in lines if results.unfinished(line) is not None]


def test_a_file_cut_anywhere_loses_the_cut_line_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    results = [encode_answer(line, {"text": f"\u00fc {line.number}"}) + b"\n" for line in LINES]
    whole = b"".join(results)
    ends = {i + d for i in range(len(whole)) if whole[i] == 10 for d in (0, 1, 2)}
    for cut in sorted({*range(0, len(whole), 23), *ends}):
        path.write_bytes(whole[:cut])
        num_whole = whole[:cut].count(b"\n")
        with ResultFile(path) as results:
            assert unfinished(results) == [line.number for line in LINES[num_whole:]]
            for line in LINES[num_whole:]:
                results.write(encode_answer(line, {}))
        assert names(path) == [line.custom_id for line in LINES]


def test_every_custom_id_gets_one_result_and_its_copies_an_error_each(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [LINES[0], Line(number=2, custom_id="id-1"), parse_line(3, b"{"), LINES[3]]
    with ResultFile(path) as results:
        taken = [results.unfinished(line) for line in lines]
        assert taken[0] is lines[0]
        assert taken[1].fault_code == "duplicate_custom_id"
        assert taken[1].custom_id is None
        assert "line 2" in taken[1].fault
        for line in taken[1:3]:
            results.write(encode_fault(line))
    with ResultFile(path) as results:
        assert results.num_failed == 2
        assert [results.unfinished(line) for line in lines] == [lines[0], None, None, lines[3]]


def test_only_failures_that_may_pass_are_forgotten_when_asked(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        results.write(encode_answer(LINES[0], {}))
        results.write(encode_problem(LINES[1], unavailable("the engine ended")))
        results.write(encode_problem(LINES[2], Problem(400, "wrong")))
    path.chmod(0o640)
    with ResultFile(path) as results:
        assert results.num_failed == 2
        assert unfinished(results) == [4, 5]
    with ResultFile(path, retry_failed=True) as results:
        assert results.num_failed == 1
        assert unfinished(results) == [2, 4, 5]
        results.write(encode_answer(LINES[1], {}))
        with pytest.raises(ConfigError, match="another kvq run-batch"):
            ResultFile(path)
    assert names(path) == ["id-1", "id-3", "id-2"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize(
    "content",
    [
        b"hello\n",
        b"hello",
        b'{"custom_id": "a", "body": {}}\n',
        b'{"id":"batch_req_1","custom_id":"a"}\n',
        b'{"id":"batch_req_1","custom_id":"a","response":null,"error":null}\n',
        encode_answer(LINES[0], {}) + b"\nsomething else\n",
        b"\x00" * 4096,
    ],
)
def test_files_of_something_else_are_left_as_they_are(tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"line \d of .* is no result of a batch"):
        ResultFile(path)
    assert path.read_bytes() == content


def test_two_runs_never_write_one_file_and_a_killed_one_leaves_it_free(tmp_path):
    path = tmp_path / "out.jsonl"
    hold = (
        "from kvq.server.batch.result_file import *\n"
        f"results = ResultFile(Path({str(path)!r})); print(1, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another kvq run-batch"):
            ResultFile(path)
        other.kill()
    ResultFile(path).close()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"nope", "not JSON"),
        (b"[" * 100_000, "it can't be read: it may be nested"),
        (b'{"custom_id":"a","custom_id":"b"}', "it can't be read: the name custom_id is twice in one object"),
        (
            b'{"custom_id":"b","url":"/v1/completions","body":{"max_tokens":2,"prompt":"x","max_tokens":3}}',
            "it can't be read: the name max_tokens is twice in one object",
        ),
        (b'{"custom_id":"b","body":{"max_tokens":1e400}}', "it can't be read: body.max_tokens is 1e400"),
        (b'{"custom_id": "\xff"}', "not JSON"),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"custom_id": 7}', "custom_id must be"),
        (b'{"custom_id": ""}', "custom_id must be"),
        (b'{"custom_id": "a", "method": "GET"}', "method must be POST"),
        (b'{"custom_id": "a", "url": 3}', "url must be"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "body must be"),
    ],
)
def test_malformed_lines_say_which_they_are_and_why(raw, message):
    line = parse_line(17, raw)
    assert line.fault.startswith(f"line 17: {message}")


def test_lines_beyond_their_limit_are_passed_over_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr("kvq.server.batch.lines.MAX_LINE", 100)
    path = tmp_path / "in.jsonl"
    request = b'{"custom_id": "a", "url": "/v1/completions", "body": {}}'
    path.write_bytes(b"\xef\xbb\xbf" + request + b"\r\n" + b"x" * 1000 + b"\n\n  \n" + request)
    found = [(line.number, line.fault) for line in read_lines(path)]
    assert found == [(1, None), (2, "line 2: a line may have 100 bytes"), (5, None)]
