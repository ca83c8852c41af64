"""Which texts an engine marks is its operator's to say; marked texts are found, others are as without."""

import pytest

from kvq.engine import LLM, RequestOutput, SamplingParams
from kvq.engine.config import EngineConfig
from kvq.errors import ConfigError, KVQError, RequestError
from kvq.watermark import detect, parse_scheme, read_key
from tests.engine.kit import engine, pair
from tests.helpers_models import random_tokens

PROMPT = random_tokens(23, seed=5)
SCHEMES = ["green", "tournament"]
_NOTHING = {"max_tokens": 96, "ignore_eos": True}


@pytest.fixture(scope="module")
def model():
    return pair("llama")[0]


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("the secret of these tests")
    path.chmod(0o600)
    return path


def drawn(llm: LLM, count: int = 4, **options) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs(llm, count, **options)]


def outputs(llm: LLM, count: int, **options) -> list[RequestOutput]:
    params = [
        SamplingParams(**({"temperature": 1.0} | _NOTHING | options), seed=seed) for seed in range(count)
    ]
    return llm.generate([PROMPT] * count, params)


def marked_share(texts, scheme: str, key_file) -> float:
    key = read_key(key_file)
    return sum(detect([*PROMPT, *text], parse_scheme(scheme), key).p < 1e-4 for text in texts) / len(texts)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("mode", "asks", "is_marked"),
    [
        ("asked", None, False),
        ("asked", False, False),
        ("asked", True, True),
        ("unless-declined", None, True),
        ("unless-declined", False, False),
        ("unless-declined", True, True),
        ("always", None, True),
        ("always", True, True),
    ],
)
def test_a_text_is_marked_as_operator_and_request_say(model, key_file, mode, asks, is_marked, scheme):
    llm = engine(model, watermark=mode, watermark_key_file=key_file, watermark_scheme=scheme)
    texts = drawn(llm, watermark=asks)
    assert marked_share(texts, scheme, key_file) == float(is_marked)
    if not is_marked:
        assert texts == drawn(engine(model))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_an_engine_can_not_do_is_refused(model, key_file, scheme):
    def refusal(llm, **options):
        with pytest.raises(RequestError) as error:
            llm.generate([PROMPT], SamplingParams(**_NOTHING, **options))
        return str(error.value)

    always = engine(model, watermark="always", watermark_key_file=key_file, watermark_scheme=scheme)
    asked = engine(model, watermark="asked", watermark_key_file=key_file, watermark_scheme=scheme)
    assert "this engine has no key" in refusal(engine(model), watermark=True)
    assert "marks every text" in refusal(always, watermark=False, temperature=1.0)
    assert "beam search can't be watermarked" in refusal(always, beam_width=2)
    assert "beam search can't be watermarked" in refusal(asked, beam_width=2, watermark=True)
    with pytest.raises(RequestError, match="watermark must be True or False, got 1"):
        SamplingParams(watermark=1)
    if scheme == "tournament":
        assert "temperature above 0" in refusal(always)
        assert "temperature above 0" in refusal(asked, watermark=True)
    assert asked.generate([PROMPT], SamplingParams(**_NOTHING))[0].error is None


def test_greedy_texts_are_marked_by_green_lists(model, key_file):
    llm = engine(model, watermark="always", watermark_key_file=key_file, watermark_scheme="green,context=1")
    assert (
        marked_share(drawn(llm, 1, temperature=0.0, repetition_penalty=1.5), "green,context=1", key_file) == 1
    )


def test_where_marks_are_usual_texts_that_can_have_none_are_served(model, key_file):
    llm = engine(
        model, watermark="unless-declined", watermark_key_file=key_file, watermark_scheme="tournament"
    )
    assert drawn(llm, 1, temperature=0.0) == drawn(engine(model), 1, temperature=0.0)


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_marked_texts_are_the_same_in_any_batch_and_after_preemption(model, key_file, scheme):
    options = {"watermark": "always", "watermark_key_file": key_file, "watermark_scheme": scheme}
    roomy = engine(model, **options, max_num_seqs=1)
    tight = engine(model, **options, num_blocks=24)
    crowded = outputs(tight, 7)
    assert sum(output.receipt.preemptions for output in crowded) > 0
    assert [output.outputs[0].token_ids for output in crowded] == drawn(roomy, 7)
    several = tight.generate([PROMPT], SamplingParams(n=3, temperature=1.0, seed=5, **_NOTHING))[0]
    assert marked_share([one.token_ids for one in several.outputs], scheme, key_file) == 1
    assert len({tuple(one.token_ids) for one in several.outputs}) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"watermark": "on"}, "one of off, asked, unless-declined, always, got 'on'"),
        ({"watermark": "always"}, "needs watermark_key_file"),
        ({"watermark_key_file": "key"}, "got off; give one of these, or no key"),
        ({"watermark_scheme": "grean"}, "did you mean 'green'"),
    ],
)
def test_a_configuration_that_says_nothing_clear_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


def test_a_bad_key_is_found_before_weights_load(key_file, monkeypatch):
    key_file.chmod(0o644)
    monkeypatch.setattr("kvq.engine.build.prepare", None)
    with pytest.raises(KVQError, match="chmod 600"):
        LLM("tiny", watermark="always", watermark_key_file=key_file)
