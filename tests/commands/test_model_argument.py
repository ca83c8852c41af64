"""MODEL is a command's first argument, or --model; what can't be one is said before torch is imported."""

import io
import json
import subprocess
import sys

import pytest

from kvq.commands.shared.param_types import Several, TokenCount
from kvq.commands.use.demo import MARK, mark_difference
from kvq.commands.use.generate import command as generate
from kvq.errors import ConfigError
from kvq.sizes import parse_tokens
from tests.waiting import HANG_S

# Runs lines in one process: the status of each, what it says, and large modules that came with it.
RUN = """
import contextlib, io, json, sys
from kvq import cli

found = []
for line in json.loads(sys.argv[1]):
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            cli.main(line)
        except SystemExit as end:
            status = end.code
    found.append([status, said.getvalue(), sorted({"torch", "transformers", "numpy"} & set(sys.modules))])
print(json.dumps(found))
"""


def run_all(lines, folder):
    """(status, what was said, large modules imported) of each line."""
    command = [sys.executable, "-c", RUN, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S, cwd=folder)
    return json.loads(done.stdout)


MODELS = [
    *(f"{name} M" for name in ("serve", "perplexity", "eval", "tune", "inspect", "calibrate", "chat")),
    *(
        "manifest M",
        "generate M x",
        "run-batch M in.jsonl out.jsonl",
        "quantize M --out new",
        "serve --check M",
    ),
    *(
        "bench engine M",
        "bench speculation M",
        "plan M --gpu h100 --context 8k",
        "simulate M --gpu h100 --rate 1",
    ),
]
WRONG = {
    "./nosuch": "there is no folder ./nosuch",
    "no/such/folder": "there is no folder no/such/folder",
    "text.txt": "text.txt is a file and no GGUF; name a GGUF file, or the folder",
    "./empty": "has no config.json; is it a Hugging Face model folder?",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "in.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_path_that_holds_no_model_is_said_without_torch(folder):
    lines = [[wrong if word == "M" else word for word in line.split()] for line in MODELS for wrong in WRONG]
    lines += [[line.split()[0], "--model", "./nosuch"] for line in MODELS[:5]]
    wanted = [*(says for _ in MODELS for says in WRONG.values()), *[WRONG["./nosuch"]] * 5]
    for line, says, (status, said, large) in zip(lines, wanted, run_all(lines, folder), strict=True):
        assert (status, large) == (2, []), line
        says_so = line[0] in ("plan", "simulate", "manifest") and "config.json" in said
        assert says in said or says_so, line


def test_other_paths_that_lead_nowhere_are_said_without_torch(folder):
    ways = {
        "can't read none": ["perplexity --text none", "eval --text none", "tune tiny --held-out none",
                            "perplexity --scales none", "serve --scales none", "compare none none",
                            "calibrate tiny --check none", "plan tiny --gpu h100 --trace none",
                            "simulate tiny --gpu h100 --trace none",
                            "run-batch none out.jsonl",
                            "serve --api-key-file none", "bench speculation --text none"],
        "can't read none.json": ["generate --kv none.json x", "serve --kv none.json",
                                 "tune tiny --costs none.json"],
        "there is no folder none": [f"{line} none/out.json" for line in (
            "perplexity --json", "eval --html", "tune tiny --out", "calibrate tiny --out", "inspect --json",
            "plan tiny --gpu h100 --context 8 --json", "bench engine --json", "bench attention --plot")],
    }  # fmt: skip
    lines = [(line.split(), says) for says, found in ways.items() for line in found]
    for (line, says), (status, said, large) in zip(
        lines, run_all([line for line, _ in lines], folder), strict=True
    ):
        assert (status, large) == (2, []), line
        assert says in said, line


def parsed(command, *words):
    """The model and PROMPT that a command takes words for."""
    context = command.make_context(command.name, list(words))
    return context.params["words"], context.params["model"], context.params["prompt"]


def test_one_word_alone_is_the_prompt():
    assert parsed(generate, "a prompt") == ((), "tiny", "a prompt")
    assert parsed(generate, "./m", "a prompt") == (("./m",), "tiny", "a prompt")
    assert parsed(generate, "--model", "m", "a prompt") == ((), "m", "a prompt")
    assert parsed(generate, "./m", "--kv", "int4", "--", "-x") == (("./m",), "tiny", "-x")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            ["inspect", "tiny", "--model", "tiny-draft"],
            "two models were named, 'tiny' and --model 'tiny-draft'",
        ),
        (["serve", "tiny", "-m", "org/other"], "two models were named"),
        (["serve", "tiny", "tiny-draft"], "one MODEL is taken, got tiny, tiny-draft"),
        (["generate", "once", "upon", "a"], "one MODEL is taken, got once, upon; quotes keep a text"),
        (["quantize", "--out", "new"], "a MODEL is needed"),
        (["calibrate"], "a MODEL is needed"),
        (["plan", "--gpu", "h100", "--context", "8k"], "give MODEL and --gpu"),
        (["generate", "EMPTY"], "is a model's folder and no prompt"),
    ],
)
def test_what_names_no_model_or_two_is_refused(kvq, folder, line, says):
    (folder / "empty" / "config.json").write_text("{}")
    status, out, err = kvq(*(folder / "empty" if word == "EMPTY" else word for word in line))
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    "line", [["tiny-draft"], ["--model", "tiny-draft"], ["tiny-draft", "-m", "tiny-draft"]]
)
def test_both_ways_name_the_same(kvq, line, tmp_path):
    status, out, err = kvq("inspect", *line)
    assert status == 0, err
    assert out.startswith("tiny-draft, the embedded draft model")


def test_a_file_of_options_gives_way_to_the_argument(kvq, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("kvq.server.run.serve", seen.append)
    (tmp_path / "a.yaml").write_text("model: org/name\nmax-model-len: 8k\nmax-queued-tokens: 32")
    assert kvq("serve", "--config", tmp_path / "a.yaml", "tiny-draft")[0] == 0
    assert kvq("serve", "--config", tmp_path / "a.yaml")[0] == 0
    assert [one.model for one in seen] == ["tiny-draft", "org/name"]
    assert {one.engine["max_context"] for one in seen} == {8192}
    (tmp_path / "a.yaml").write_text("max-model-len: 010")
    status, _, err = kvq("serve", "--config", tmp_path / "a.yaml")
    assert (status, "'010' is no number of tokens; write it as 8192, 8k" in err) == (2, True)


def test_a_name_for_a_running_server_is_no_path(kvq, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    _, _, err = kvq("chat", "--url", "http://127.0.0.1:9", "--model", "./nosuch")
    assert "there is no folder" not in err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("8k", 8192),
        ("8K", 8192),
        ("32k", 32768),
        ("1M", 1 << 20),
        ("1m", 1 << 20),
        ("1.5k", 1536),
        ("8192", 8192),
        ("0", 0),
    ],
)
def test_tokens_are_counted_in_powers_of_1024(text, tokens):
    assert parse_tokens(text) == tokens
    assert Several(TokenCount()).convert(f"{text},4k", None, None) == (tokens, 4096)


@pytest.mark.parametrize(
    "text",
    ["", "k", "8kk", "8 k", "8kb", "1e3", "0x8", "8_192", "08", "0.3k", "1.5", "\u0661k", "1\u0661"],
)
def test_other_forms_are_refused_with_the_one_to_write(text):
    with pytest.raises(ConfigError, match="no number of tokens; write it as 8192, 8k"):
        parse_tokens(text)


@pytest.mark.parametrize(
    "line",
    [
        "plan llama-3-8b --gpu h100 --context 8q", "plan llama-3-8b --gpu h100 --lognormal 8q,1",
        "perplexity --context 8q", "generate -n 8q x", "serve --max-model-len 8q", "chat -n 8q",
        "serve --max-num-batched-tokens 8q", "tune tiny --context 8q", "eval --needle-lengths 8q",
        "bench attention --context 8q", "bench speculation --input-len 8q", "cost --prompt 8q",
        "simulate llama-3-8b --gpu h100 --max-num-batched-tokens 8q", "calibrate tiny --context 8q",
    ],
)  # fmt: skip
def test_commands_name_the_form(kvq, line):
    status, _, err = kvq(*line.split())
    assert status == 2
    assert "8k" in " ".join(err.split())


def test_a_plan_takes_short_and_long_alike(kvq, tmp_path):
    found = []
    for number in ("8k", "8192"):
        path = tmp_path / f"{number}.json"
        status, _, err = kvq(
            "plan", "llama-3-8b", "--gpu", "h100", "--kv", "int4", "--context", number, "--json", path
        )
        assert status == 0, err
        found.append(json.loads(path.read_text())["rows"])
    assert found[0] == found[1]
    assert found[0][0]["context"] == 8192


def test_texts_are_marked_where_their_words_part():
    assert mark_difference("a b c", "a b c") == ("a b c", "a b c")
    assert mark_difference("a bee c", "a bear d") == (f"a {MARK} bee c", f"a {MARK} bear d")
    assert mark_difference("a b", "a b c") == (f"a b {MARK}", f"a b {MARK} c")
    assert mark_difference("x", "y") == (f"{MARK} x", f"{MARK} y")
