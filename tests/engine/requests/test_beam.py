"""Beam search: the tokens of Transformers' own `generate`, and the promises of each step."""

import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvq.engine.params import SamplingParams
from kvq.engine.requests.beam import Beam, BeamSearch

PENALTIES = [0.0, 1.0, 2.0, 0.5, -1.0]


def _new(width: int, num_returned: int, *, max_tokens: int, end_ids, **options) -> BeamSearch:
    params = SamplingParams(beam_width=width, n=num_returned, max_tokens=max_tokens, **options)
    return BeamSearch(params, max_tokens=max_tokens, end_ids=end_ids)


def _model(seed: int, vocab: int) -> LlamaForCausalLM:
    """A small random model whose tokens differ enough in likelihood for beams to end and to cross."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


@torch.inference_mode()
def _search(model: LlamaForCausalLM, prompt: list[int], search: BeamSearch, **options) -> list[Beam]:
    """Run a search, computing each beam in full at every step."""
    beams = [prompt]
    while not search.is_done:
        logits = model(torch.tensor(beams)).logits[:, -1].float()  # [beams, vocab]
        best = logits.log_softmax(-1).topk(min(search.num_candidates, logits.shape[-1]))
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        running = search.step([list(zip(*row, strict=True)) for row in rows], **options)
        beams = [[*beams[parent], token] for parent, token in running]
    return search.results()


@torch.inference_mode()
def _generate(model: LlamaForCausalLM, prompt: list[int], **options) -> tuple[list[list[int]], list[float]]:
    """The generated tokens of `generate` without padding, and the scores, best first."""
    pad = model.config.vocab_size - 1  # never an end token here, and cut off behind one
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        pad_token_id=pad,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    ends, sequences = options["eos_token_id"], []
    for row in out.sequences[:, len(prompt) :].tolist():
        stop = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        sequences.append(row[:stop])
    scores = out.sequences_scores.tolist() if "sequences_scores" in out else []
    return sequences, scores


def _case(seed: int) -> tuple[LlamaForCausalLM, list[int], dict]:
    rng = random.Random(seed)
    vocab = rng.choice([50, 83, 200])
    model, prompt = _model(seed, vocab), [rng.randrange(vocab) for _ in range(rng.choice([1, 3, 9]))]
    width = seed % 5 + 1
    options = {
        "width": width,
        "num_returned": rng.randint(1, width),
        "length_penalty": PENALTIES[seed // 5 % 5],
        "early_stopping": rng.random() < 0.4,
        "max_tokens": rng.choice([1, 2, 7, 7, 19, 19]),
        "min_tokens": rng.choice([0, 0, 0, 1, 3]),
    }
    options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
    endless = _search(model, prompt, _new(**options, end_ids=()))
    likely = {token for hypothesis in endless for token in hypothesis.tokens} - {vocab - 1}
    options["end_ids"] = rng.sample([*likely, *range(vocab - 1)], rng.choice([0, 1, 2, 6]))
    if likely:
        options["end_ids"].append(rng.choice(sorted(likely)))
    options["end_ids"] = sorted(set(options["end_ids"])) or [0]
    return model, prompt, options


def _as_generate(options: dict) -> dict:
    return {
        "num_beams": options["width"],
        "num_return_sequences": options["num_returned"],
        "length_penalty": options["length_penalty"],
        "early_stopping": options["early_stopping"],
        "max_new_tokens": options["max_tokens"],
        "min_new_tokens": options["min_tokens"],
        "eos_token_id": options["end_ids"],
    }


@pytest.mark.parametrize("seeds", [range(at, at + 25) for at in range(0, 100, 25)], ids=str)
def test_tokens_and_scores_are_those_of_generate(seeds):
    num_stopped = num_early = 0
    for seed in seeds:
        model, prompt, options = _case(seed)
        found = _search(model, prompt, _new(**options))
        sequences, scores = _generate(model, prompt, **_as_generate(options))
        assert [list(h.tokens) for h in found] == sequences, (seed, options)
        if scores:
            assert [h.score for h in found] == pytest.approx(scores, rel=1e-5), (seed, options)
        for hypothesis in found:
            is_end = hypothesis.tokens[-1] in options["end_ids"]
            assert hypothesis.finish_reason == ("stop" if is_end else "length")
            num_stopped += is_end
            num_early += len(hypothesis.tokens) < options["max_tokens"]
    assert num_stopped >= 10, "end tokens must occur for this test to mean anything"
    assert num_early >= 10


def _beams(**options) -> BeamSearch:
    plain = {"length_penalty": 1.0, "early_stopping": False, "max_tokens": 9, "end_ids": (0,)}
    return _new(2, 2, **{**plain, **options})


def test_one_beam_seeds_all_and_children_name_their_parent():
    search = _beams()
    assert (search.num_running, search.num_candidates) == (1, 4)
    assert search.step([[(-0.5, 5), (-1.0, 6), (-2.0, 7), (-3.0, 8)]]) == [(0, 5), (0, 6)]
    assert search.num_running == 2
    assert search.step([[(-3.0, 1), (-4.0, 2)], [(-0.1, 3), (-0.2, 4)]]) == [(1, 3), (1, 4)]


def test_an_end_token_counts_only_among_the_first_of_width():
    search = _beams(early_stopping=True)
    assert search.step([[(-0.1, 5), (-0.2, 6), (-0.3, 0), (-0.4, 7)]]) == [(0, 5), (0, 6)]
    assert search.results() == []
    assert search.step([[(-0.1, 0), (-5.0, 5)], [(-0.1, 0), (-5.0, 6)]]) == []
    assert search.is_done
    assert [(h.tokens, h.finish_reason) for h in search.results()] == [((5, 0), "stop"), ((6, 0), "stop")]
    assert search.results()[0].score == pytest.approx(-0.1)


def test_at_max_tokens_running_beams_compete_with_finished_ones():
    search = _beams(max_tokens=2)
    search.step([[(-0.1, 0), (-0.2, 5), (-4.0, 6)]])
    search.step([[(-0.1, 7), (-9.0, 8)], [(-0.1, 7), (-9.0, 8)]])
    assert [(h.tokens, h.finish_reason) for h in search.results()] == [((0,), "stop"), ((5, 7), "length")]
    assert search.is_done


def test_impossible_tokens_are_never_taken():
    search = _beams()
    assert search.step([[(-0.1, 5), (-math.inf, 6)]]) == [(0, 5)]
    assert search.num_running == 1
    assert search.step([[(-math.inf, 6)]]) == []
    assert search.is_done
    assert search.results() == []


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_extreme_length_penalties_keep_scores_finite(length_penalty):
    search = _beams(length_penalty=length_penalty, max_tokens=3000)
    search.step([[(-0.5, 5), (-1.0, 6)]])
    while not search.is_done:
        search.step([[(-0.5, 5), (-1.0, 6)], [(-0.5, 5), (-1.0, 6)]])
    assert all(math.isfinite(h.score) for h in search.results())
    assert [len(h.tokens) for h in search.results()] == [3000, 3000]
