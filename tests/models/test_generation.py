"""Streaming: whole characters only, repeatable sampling, an end where the model ends."""

import pytest
import torch

from kvq.errors import RequestError
from kvq.models import SamplingParams
from kvq.models.generation import Detokenizer, sample

TEXTS = [
    "plain words, and  two spaces\n\n\tindented",
    "naïve café — Ωmega 漢字テスト 한국어 🙂🙃👩‍👩‍👧 z̷a̷l̷g̷o̷",
    "🙂" * 40,
    "a" * 200 + " é" * 60,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "Before 漢"])
def test_pieces_are_whole_characters_and_join_to_the_text(tiny, text, prompt):
    tokenizer = tiny.tokenizer
    detokenizer = Detokenizer(tokenizer, tokenizer(prompt)["input_ids"])
    pieces = [detokenizer.push(i) for i in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_that_ends_inside_a_character_shows_what_is_left_at_the_flush(tiny):
    ids = tiny.tokenizer("ok 🙂")["input_ids"]
    detokenizer = Detokenizer(tiny.tokenizer, [])
    shown = "".join(detokenizer.push(i) for i in ids[:-1])
    assert shown.rstrip() == "ok"
    assert detokenizer.flush() == "\ufffd"


def test_temperature_zero_takes_the_likeliest_and_a_tiny_nucleus_does_too():
    logits = torch.tensor([0.1, 2.0, 1.9, -3.0])
    generator = torch.Generator().manual_seed(0)
    assert sample(logits, SamplingParams(), generator) == 1
    narrow = SamplingParams(temperature=1.0, top_p=0.01)
    assert {sample(logits, narrow, generator) for _ in range(50)} == {1}


def test_sampling_follows_the_distribution():
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(1)
    options = SamplingParams(temperature=2.0)
    drawn = torch.tensor([sample(2.0 * weights.log(), options, generator) for _ in range(4000)])
    assert torch.bincount(drawn, minlength=4) / 4000 == pytest.approx(weights.tolist(), abs=0.03)
    nucleus = SamplingParams(temperature=1.0, top_p=0.79)  # 0.5 + 0.3 reach it
    assert {sample(weights.log(), nucleus, generator) for _ in range(300)} == {0, 1}


def test_the_end_token_ends_the_stream_and_is_not_shown(tiny, monkeypatch):
    tokens = iter([10, 11, 0, 12])  # 0 is <|endoftext|>
    monkeypatch.setattr("kvq.models.generation.sample", lambda *_: next(tokens))
    pieces = list(tiny.stream("Hello", SamplingParams(max_tokens=10)))
    assert [p.token_id for p in pieces] == [10, 11]
    tokens = iter([10, 0, 12])
    ignoring = SamplingParams(max_tokens=3, ignore_eos=True)
    assert [p.token_id for p in tiny.stream("Hello", ignoring)] == [10, 0, 12]


def test_greedy_text_is_that_of_logits_computed_at_once(tiny):
    model = tiny.with_kv("fp32")
    prompt = "The war of the"
    got = [p.token_id for p in model.stream(prompt, SamplingParams(max_tokens=12, ignore_eos=True))]
    ids = model.tokenizer(prompt)["input_ids"] + got
    expected = model.logits(ids).argmax(-1).tolist()[len(ids) - len(got) - 1 : -1]
    assert got == expected


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(RequestError):
        SamplingParams(**options)
