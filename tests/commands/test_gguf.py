"""Commands take a GGUF file as they take a folder: the embedded model as one gives the same results."""

from pathlib import Path

import pytest

from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.prepared import find_scales, prepare
from tests.models.gguf.kit import convert

TEXT = "The cache holds keys and values of every token. " * 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(EMBEDDED["tiny"], tmp_path_factory.mktemp("gguf") / "small.gguf", has_tokenizer=True)


def test_generate(kvq, path):
    line = (
        "The cache",
        "--kv",
        "fp32",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--generation-config",
        "none",
    )
    status, found, err = kvq("generate", path, *line)
    assert status == 0
    assert f"kvq: model {path.resolve()}" in err
    assert found == kvq("generate", "tiny", *line)[1] != ""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_perplexity(kvq, path, text):
    line = ("--kv", "bf16,int8", "--text", text, "--context", "256")
    answers = [kvq("perplexity", model, *line) for model in (path, "tiny")]
    assert [status for status, *_ in answers] == [0, 0], answers
    found = [
        [row.split() for row in out.splitlines() if row.startswith(("bf16", "int8"))] for _, out, _ in answers
    ]
    figures = [[row[:-1] for row in rows] for rows in found]  # without seconds
    assert figures[0] == figures[1] != []


def test_scales_beside_a_file_are_its_own(kvq, path, text):
    few = ("--text", text, "--context", "64", "--max-windows", "2")
    status, _, err = kvq("calibrate", path, "--out", path.with_name("small.kvq.json"), *few)
    assert status == 0, err
    model = prepare(path)
    scales = find_scales(model, None)
    assert scales is not None
    assert scales.model_digest == model.digest


def test_a_prompt_that_is_a_file(kvq, path):
    status, _, err = kvq("generate", path)
    assert (status, "is a model's file and no prompt" in err) == (2, True)


def test_a_name_need_not_end_in_gguf(kvq, path, monkeypatch):
    """As those in Ollama's folder of blobs."""
    seen = []
    monkeypatch.setattr("kvq.server.run.serve", seen.append)
    blob = path.with_name("sha256-" + "0123abcd" * 8)
    blob.hardlink_to(path)
    status, _, err = kvq("serve", blob, "--alias", "small")
    assert (status, seen[0].model, seen[0].served_model_name) == (0, str(blob), ("small",)), err
    status, _, err = kvq("generate", blob)
    assert (status, "is a model's file and no prompt" in err) == (2, True)
    assert prepare(blob).digest == prepare(path).digest
