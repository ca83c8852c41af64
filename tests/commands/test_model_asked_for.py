"""Every command runs the model that was asked for: a path is a path, a name is a name; which one is said."""

import io
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import openai
import pytest

import kvq as library
from kvq.capacity.plan.catalogue import known_models
from kvq.errors import ConfigError, ModelError
from kvq.models.describe.resolve import EMBEDDED, resolve_model
from tests.helpers_models import save_model
from tests.server.kit import Server
from tests.waiting import wait_for

LAYERS = 3  # of the other model; the embedded one has 6
_SIZE = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 80, "max_position_embeddings": 512}
FEW = ("--context", 80, "--max-windows", 1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder called like the embedded model, with another one in it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, "llama", **_SIZE, num_hidden_layers=LAYERS, eos_token_id=None, bos_token_id=None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED["tiny"] / name, folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of all tests: ./tiny is the other model, and files are written beside it."""
    (tmp_path / "tiny").symlink_to(other)
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 200)
    (tmp_path / "requests.jsonl").write_text(
        json.dumps(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "tiny", "prompt": "A cat", "max_tokens": 2},
            }
        )
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "perplexity": ("--model", "M", "--kv", "bf16", "--text", "text.txt", *FEW),
    "eval": ("--model", "M", "--kv", "bf16", "--tasks", "perplexity", "--text", "text.txt", *FEW),
    "generate": ("--model", "M", "--max-tokens", 2, "A cat"),
    "chat": ("--model", "M", "--max-tokens", 2),
    "calibrate": ("M", "--text", "text.txt", "--out", "kvq.json", *FEW),
    "tune": ("M", "--text", "text.txt", "--formats", "int4", "--verify-windows", 1, "--out", "k.json", *FEW),
    "quantize": ("M", "--method", "rtn", "--group-size", -1, "--out", "quantized"),
    "inspect": ("--model", "M", "--kv", "bf16"),
    "serve": ("--check", "--model", "M", "--port", 0),
    "run-batch": ("--model", "M", "--kv-memory", "8MiB", "requests.jsonl", "answers.jsonl"),
    "bench engine": ("--model", "M", "--requests", 1, "--input-len", 8, "--output-len", 2, "--repeats", 1),
    "plan": ("--model", "M", "--kv", "bf16", "--verify", "--kv-memory", "8MiB"),
}


@pytest.mark.daily(9)
@pytest.mark.parametrize(
    ("model", "command"),
    [("./tiny", command) for command in COMMANDS]
    + [("tiny", command) for command in ("perplexity", "generate", "inspect", "serve", "plan")],
)
def test_every_command_runs_the_model_that_was_asked_for(kvq, other, monkeypatch, command, model):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    status, out, err = kvq(*command.split(), *(model if word == "M" else word for word in COMMANDS[command]))
    assert status == 0, err
    said = " ".join((out + err).split())
    if model == "tiny":
        assert "the embedded model" in said
    else:
        assert "the embedded model" not in said
        assert str(other) in said or f"{LAYERS} layers" in said


@pytest.mark.long
def test_a_server_runs_the_folder_and_says_which(other):
    with Server(model="./tiny") as server:
        [line] = wait_for(lambda: re.findall(r"level=info event=model .*", server.log), "the model's line")
        assert f"source={other}" in line.replace('"', "")
        assert re.search(r"digest=[0-9a-f]{32}\b", line)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.completions.create(model="tiny", prompt="A cat", max_tokens=8, temperature=0)
    with library.LLM(other) as llm:
        wanted = llm.generate("A cat", library.SamplingParams(max_tokens=8))[0].outputs[0].text
    assert answer.choices[0].text == wanted


def test_plans_count_the_folder_and_not_the_name(kvq, other, tmp_path):
    known = next(name for name in known_models() if name.startswith("llama"))
    (tmp_path / known).symlink_to(other)
    options = ("--gpu", "l4", "--context", 64, "--kv", "bf16", "--json", "p.json")

    def weights(model):
        status, _, err = kvq("plan", "--model", model, *options)
        assert status == 0, err
        return json.loads(Path("p.json").read_text())["rows"][0]["weights_bytes"]

    bench = library.plan(other, gpu="l4", kv="bf16", context=64).weights_bytes
    assert weights(f"./{known}") == weights(f"{known}/") == weights("./tiny") == bench
    assert library.plan(Path(known), gpu="l4", kv="bf16", context=64).weights_bytes == bench
    assert weights("tiny") > bench
    status, out, _ = kvq("simulate", "--model", "./tiny", "--gpu", "l4", "--kv", "bf16", "--rate", 1,
                         "--requests", 2, "--input-len", 16, "--output-len", 4)  # fmt: skip
    assert status == 0, out


SPELLINGS = [
    "./tiny",
    "tiny/",
    ".//tiny",
    "absolute",
    "../here/tiny",
    "link",
    "my model",
    "ünïcode 模型",
    "~",
]


@pytest.mark.daily(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_of_a_folder_find_it(kvq, other, tmp_path, monkeypatch, spelling):
    if spelling == "absolute":
        spelling = str(tmp_path / "tiny")
    elif spelling.startswith("../here"):
        spelling = f"../{tmp_path.name}/tiny"
    elif spelling == "~":
        monkeypatch.setenv("HOME", str(tmp_path))
        spelling = "~/tiny"
    elif not Path(spelling).exists():
        (tmp_path / spelling).symlink_to(other)
    for model in (spelling, Path(spelling), os.path.join(spelling, "")):
        assert resolve_model(model).folder == other
    assert len(library.load(spelling, kv="bf16").geometry.layers) == LAYERS
    assert len(library.load(Path(spelling), kv="bf16").geometry.layers) == LAYERS
    status, _, err = kvq("generate", "--model", spelling, "--max-tokens", 1, "A cat")
    assert status == 0
    assert f"kvq: model {other}, digest " in err


def test_a_path_is_never_a_name(other, tmp_path, monkeypatch):
    with library.LLM(Path("tiny"), "bf16", num_blocks=16) as llm:
        assert len(llm.model.geometry.layers) == LAYERS
    source = resolve_model("./tiny")
    monkeypatch.chdir(tmp_path.parent)  # as the server's processes may be anywhere
    assert resolve_model(source).folder == other
    assert resolve_model("tiny").is_embedded
    for missing in (Path("tiny"), "./tiny", "tiny/"):
        with pytest.raises(ModelError, match="there is no folder"):
            resolve_model(missing)
    with pytest.raises(ConfigError, match="is here; drop it"):
        resolve_model("tiny", revision="main")


@pytest.mark.parametrize("model", [5, None, ["tiny"], {"a": 1}, b"tiny"])
def test_what_names_no_model_is_refused_in_words(model):
    with pytest.raises(ModelError, match="a model is named by a text or a Path, got"):
        resolve_model(model)


def test_a_name_that_is_a_folder_too_is_said(kvq, caplog):
    with caplog.at_level(logging.WARNING, logger="kvq"):
        resolve_model("tiny")
    assert "for the folder of that name write ./tiny" in caplog.text
    known = next(name for name in known_models() if name.startswith("llama"))
    Path(known).symlink_to("tiny")
    status, _, err = kvq("plan", "--model", known, "--gpu", "h100", "--context", 64)
    assert status == 0
    assert f"./{known}" in err


def test_a_recipe_says_which_model_it_was_tuned_on(kvq, other):
    assert kvq("calibrate", "./tiny", "--text", "text.txt", "--out", "own.json", *FEW)[0] == 0
    assert kvq("generate", "--model", "./tiny", "--kv", "own.json", "--max-tokens", 1, "A")[0] == 0
    status, _, err = kvq("generate", "--model", "tiny", "--kv", "own.json", "--max-tokens", 1, "A")
    assert status != 0
    assert f"the recipe is for {LAYERS} layers" in err
