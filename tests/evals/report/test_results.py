"""The JSON envelope: complete, and without secrets."""

import json

import torch

from kvq.evals.report.results import envelope, write_json


def test_the_envelope_says_what_ran_where_and_on_which_versions():
    result = envelope(["kvq", "perplexity"], torch.device("cpu"), [{"kv": "int4"}], {"model": "m"})
    assert {"kvq_version", "commit", "date", "device", "versions", "command", "rows"} <= set(result)
    assert result["versions"]["torch"] == torch.__version__
    assert result["rows"] == [{"kv": "int4"}]
    assert result["model"] == "m"


def test_a_token_on_the_command_line_is_not_written_down(tmp_path):
    for words in (["--token", "hf_secret"], ["--token=hf_secret"]):
        result = envelope(["kvq", "perplexity", *words, "--kv", "a b"], torch.device("cpu"), [])
        write_json(tmp_path / "r.json", result)
        text = (tmp_path / "r.json").read_text()
        assert "hf_secret" not in text
        assert "***" in json.loads(text)["command"]
        assert json.loads(text)["command"].endswith("--kv 'a b'")
