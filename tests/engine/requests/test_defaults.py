"""Sampling that a model's generation_config.json recommends, and engines over models that name no end."""

import json

import pytest

from kvq import LLM
from kvq.engine.params import SamplingParams, StructuredOutput
from kvq.engine.requests.defaults import SamplingDefaults, read_defaults
from kvq.errors import ConfigError, RequestError
from tests.engine.kit import EOS, one_character_tokenizer
from tests.helpers_models import VOCAB, random_tokens, save_model

EVERY = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.5,
}


def defaults_of(folder, file, asked="auto"):
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    (folder / "generation_config.json").write_text(json.dumps(file))
    return read_defaults(folder, asked)


def test_every_field_is_taken_and_named_in_one_line(tmp_path):
    found = defaults_of(
        tmp_path, {**EVERY, "max_new_tokens": 9, "suppress_tokens": [3, 5], "eos_token_id": 2}
    )
    own = {name: value for name, value in EVERY.items() if name != "do_sample"}
    assert found.fields == {**own, "most_tokens": 9, "logit_bias": {3: -100.0, 5: -100.0}}
    assert found.passed_over == ()
    told = str(found)
    assert "\n" not in told
    assert all(f"{name} {value}" in told for name, value in own.items())
    assert "max_new_tokens 9" in told
    assert "generation_config.json" in told
    assert "--generation-config none" in told


@pytest.mark.parametrize(
    ("file", "fields", "told"),
    [
        ({}, {}, ""),
        ({"eos_token_id": 2, "max_length": 4096, "transformers_version": "5.23.0"}, {}, ""),
        ({"do_sample": False}, {"temperature": 0.0}, ""),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}, ""),
        ({"temperature": 0.6}, {"temperature": 0.6}, ""),  # as vLLM reads it
        ({"top_k": 0, "top_p": 1.0, "temperature": None}, {"top_p": 1.0}, ""),
        ({"top_k": -1}, {}, ""),
        ({"temperature": -1, "top_k": 5}, {"top_k": 5}, "temperature must be a number of 0 to 10, got -1"),
        ({"top_p": 0}, {}, "top_p must be a number above 0"),
        ({"top_p": "0.9"}, {}, "top_p must be a number"),
        ({"top_k": 2.5}, {}, "top_k must be a whole number"),
        ({"repetition_penalty": 0}, {}, "repetition_penalty must be"),
        ({"max_new_tokens": 0}, {}, "max_new_tokens must be"),
        ({"suppress_tokens": [-1, 3, VOCAB, "a"]}, {"logit_bias": {3: -100.0}}, "3 of suppress_tokens"),
        ({"suppress_tokens": list(range(5000))}, None, "of suppress_tokens"),
        ({"typical_p": 0.9, "num_beams": 4, "no_repeat_ngram_size": 0}, {}, "typical_p 0.9, num_beams 4"),
    ],
)
def test_what_can_not_be_used_is_said_and_left_out(file, fields, told, tmp_path):
    found = defaults_of(tmp_path, file)
    assert fields is None or found.fields == fields
    assert told in ", ".join(found.passed_over)
    assert bool(found.passed_over) == bool(told)
    assert SamplingParams(**found.fill({}, ()))


@pytest.mark.parametrize("asked", ["none", "kvq", "vllm"])
def test_they_can_be_declined(asked, tmp_path):
    assert defaults_of(tmp_path, EVERY, asked) == SamplingDefaults()


def test_another_folders_file_is_read_or_named_as_missing(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.3}')
    assert defaults_of(own, EVERY, str(other)).fields == {"temperature": 0.3}
    with pytest.raises(ConfigError, match=r"--generation-config .*own/x: .* give auto .*none"):
        read_defaults(own, str(own / "x"))
    assert read_defaults(tmp_path) == SamplingDefaults()


def test_what_is_named_counts_and_biases_come_together(tmp_path):
    found = defaults_of(tmp_path, {**EVERY, "max_new_tokens": 9, "suppress_tokens": [3, 5]})
    given = {"temperature": 0.0, "logit_bias": {5: 1.0, 6: 2.0}, "max_tokens": 4}
    filled = found.fill(given, given)
    assert (filled["temperature"], filled["top_k"], filled["max_tokens"]) == (0.0, 20, 4)
    assert filled["logit_bias"] == {3: -100.0, 5: 1.0, 6: 2.0}
    assert "most_tokens" not in filled
    assert found.fill({"min_tokens": 12}, ("min_tokens",))["most_tokens"] == 12
    beams = found.fill({"beam_width": 2, "n": 2}, ("beam_width", "n"))
    assert beams == {"beam_width": 2, "n": 2, "max_tokens": None, "most_tokens": 9}
    many = found.fill({"logit_bias": dict.fromkeys(range(1024), 1.0)}, ("logit_bias",))
    assert SamplingParams(**many).logit_bias == dict.fromkeys(range(1024), 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = save_model(tmp_path_factory.mktemp("model"), "llama")
    one_character_tokenizer().save_pretrained(made)
    return made


def rewritten(folder, name, **changes):
    path = folder / name
    was = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**was, **changes}))


def test_an_engine_tells_them_and_takes_none_by_itself(folder):
    rewritten(folder, "generation_config.json", eos_token_id=None, temperature=0.6, max_new_tokens=3)
    with LLM(str(folder), kv="fp32", device="cpu", num_blocks=16, max_num_seqs=2) as llm:
        told = llm.get_default_sampling_params()
        assert (told.temperature, told.max_tokens, told.most_tokens) == (0.6, None, 3)
        prompt = random_tokens(5, seed=1)
        long, short = llm.generate([prompt, prompt], [SamplingParams(ignore_eos=True), told])
        assert len(long.outputs[0].token_ids) == 64
        assert len(short.outputs[0].token_ids) <= 3
        [ended] = llm.generate([prompt], SamplingParams(logit_bias={EOS: 100}))
        assert ended.outputs[0].finish_reason == "stop"  # by config.json's


def test_most_tokens_are_no_more_than_there_is_room_for(folder):
    with LLM(str(folder), kv="fp32", device="cpu", num_blocks=2, block_size=16, max_num_seqs=1) as llm:
        params = SamplingParams(max_tokens=None, most_tokens=1 << 20, ignore_eos=True)
        [output] = llm.generate([random_tokens(5, seed=1)], params)
        assert output.outputs[0].finish_reason == "length"
        assert 20 <= len(output.outputs[0].token_ids) <= 28


def test_a_model_without_an_end_says_so_and_refuses_structured_output(folder, caplog):
    rewritten(folder, "generation_config.json", eos_token_id=None)
    rewritten(folder, "config.json", eos_token_id=None)
    rewritten(folder, "tokenizer_config.json", eos_token=None)
    with LLM(str(folder), kv="fp32", device="cpu", num_blocks=16, max_num_seqs=1) as llm:
        assert llm.model.end_ids == frozenset()
        assert "no token is known to end a text" in caplog.text
        with pytest.raises(
            RequestError, match=r"no token is known .*eos_token_id in generation_config\.json"
        ):
            llm.generate(["a"], SamplingParams(structured=StructuredOutput(regex="a")))
