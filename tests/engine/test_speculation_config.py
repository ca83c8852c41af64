"""How drafting is asked for, and what is refused before weights load."""

import json

import pytest
from transformers import AutoTokenizer

from kvq.engine import LLM, SamplingParams
from kvq.engine.speculation_config import Speculation, parse_speculation
from kvq.errors import ConfigError, ModelError
from tests.engine.kit import pair
from tests.engine.speculation.kit import counts, speculating
from tests.helpers_hybrids import hybrid, hybrid_folder
from tests.helpers_models import save_model


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None), ("", None), ("off", None), ("none", None), ({}, None),
        ("ngram", {"method": "ngram"}),
        ({"method": "ngram", "k": 4}, {"method": "ngram"}),
        ("self, k=2, weights=int8", {"method": "self", "k": 2, "weights": "int8"}),
        ("ngram,adapts=false", {"method": "ngram", "adapts": False}),
        ('{"method": "draft", "model": "tiny"}', {"method": "draft", "model": "tiny"}),
        ("draft,model=tiny,kv=int8", {"method": "draft", "model": "tiny", "kv": "int8"}),
    ],
)  # fmt: skip
def test_spellings(given, wanted):
    assert parse_speculation(given) == (None if wanted is None else Speculation(**wanted))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ngrams", "did you mean 'ngram'"), ("ngram,k=0", "whole number of 1 to 16"),
        ("ngram,k=x", "whole number"),
        ("ngram,k", "no name=value"), ("ngram,k=1,k=2", "twice"),
        ("draft", "needs one"),
        ("ngram,model=tiny", "leave it out"), ("ngram,weights=int4", "leave it out"),
        ("self,kv=int4", "leave it out"),
        ({"k": 4}, "needs a method"), ({"method": "ngram", "depth": 4}, "known:"),
        ("{", "no JSON"), (7, "a mapping"),
        ({"method": "ngram", "k": True}, "whole number"), ("ngram,adapts=maybe", "True or False"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(given, words):
    with pytest.raises(ConfigError, match=words):
        parse_speculation(given)


def test_models_that_cannot_draft_are_refused(tiny, tmp_path):
    small = save_model(tmp_path / "other", "llama")
    AutoTokenizer.from_pretrained(tiny.prepared.folder).save_pretrained(small)
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[500:502]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (small / "tokenizer.json").write_text(json.dumps(tokenizer))
    for given, error, words in (
        (f"draft,model={small}", (ConfigError, ModelError), "vocabulary|tokenizer"),
        (f"draft,model={tmp_path / 'none'}", ModelError, "no folder"),
        (f"draft,model={hybrid_folder('lfm2')}", ConfigError, "recurrent states"),
        ("draft,model=tiny,kv=int4_mean", ConfigError, "draft model"),
        ("self,weights=int99", ConfigError, "int99"),
    ):
        with pytest.raises(error, match=words):
            LLM("tiny", speculation=given, num_blocks=8, max_num_seqs=1)


def test_a_model_with_recurrent_states_is_not_its_own_draft():
    with pytest.raises(ConfigError, match="recurrent states"):
        LLM(hybrid("lfm2")[0], speculation="self", num_blocks=8, max_num_seqs=1)


def test_a_model_of_narrow_layers_drafts_in_the_groups_that_fit():
    model = pair("llama")[0]
    assert model.geometry.hidden_size % 128, "it is to be narrow"
    llm = speculating(model, method="self")
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert counts(llm)[0] > 0
