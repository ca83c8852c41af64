"""Embeddings and scores are those of transformers, in any batch, chunks and after preemptions."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import kvq
from kvq.engine import RequestOutput
from kvq.engine.requests.request_options import RequestOptions
from kvq.errors import ConfigError, ModelError, RequestError
from tests.engine.kit import one_character_tokenizer, text_of
from tests.helpers_models import build_model, load_eager, random_tokens, small_config

_OPTIONS = {"num_blocks": 128, "block_size": 16, "max_num_seqs": 8, "kv": "fp32"}
_LENGTHS = (1, 5, 63, 16, 100, 17)


def save(folder: Path, family: str, kind: str, *modules: dict, **changes) -> Path:
    """Save a tiny random model with the files of sentence-transformers for these modules.

    `kind`: "causal", "bare" (without a head) or "classifier".
    """
    config = small_config(family, **changes)
    model = build_model(config)
    if kind == "bare":
        model = model.base_model
    elif kind == "classifier":
        body, config.num_labels = model.base_model, changes.get("num_labels", 1)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
        model.base_model.load_state_dict(body.state_dict())
    model.save_pretrained(folder)
    one_character_tokenizer().save_pretrained(folder)
    if modules:
        listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        for i, (module, own) in enumerate([(m["type"], m.get("config", {})) for m in modules], 1):
            path = f"{i}_{module}"
            kind = f"sentence_transformers.models.{module}"
            listed.append({"idx": i, "name": str(i), "path": path, "type": kind})
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(own))
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def pooling(mode: str, **more) -> dict:
    modes = {
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": False,
    }
    return {
        "type": "Pooling",
        "config": {"word_embedding_dimension": 64, **modes, **more, f"pooling_mode_{mode}": True},
    }


NORMALIZE = {"type": "Normalize"}


@torch.no_grad()
def hidden_states(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.daily(8)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("kind", ["causal", "bare"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_embeddings_are_transformers(tmp_path, family, kind, mode):
    folder = save(tmp_path, family, kind, pooling(mode), NORMALIZE)
    prompts = [random_tokens(length, seed=i) for i, length in enumerate(_LENGTHS)]
    with kvq.LLM(folder, max_num_batched_tokens=24, **_OPTIONS) as llm:
        vectors = llm.embed(prompts)
        again = llm.embed(prompts)
        texts = llm.embed([text_of(prompts[2])])
    for tokens, vector, other in zip(prompts, vectors, again, strict=True):
        states = hidden_states(folder, tokens)
        wanted = {"lasttoken": states[-1], "mean_tokens": states.mean(0), "cls_token": states[0]}[mode]
        wanted = torch.nn.functional.normalize(wanted, dim=0)
        assert torch.allclose(torch.tensor(vector), wanted, atol=1e-4)
        assert torch.allclose(torch.tensor(other), wanted, atol=1e-4)
    assert torch.allclose(torch.tensor(texts[0]), torch.tensor(vectors[2]), atol=1e-4)


def outputs_of(llm: kvq.LLM, prompts: list[list[int]], **options) -> list[RequestOutput]:
    """What the engine returns for requests of embeddings, with receipts."""
    events: list = []
    given = RequestOptions(pools=True, **options)
    llm._run([llm.core.intake.new_job(prompt, given, listener=events.append) for prompt in prompts])
    return [event for event in events if isinstance(event, RequestOutput)]


@pytest.mark.parametrize(("mode", "cached"), [("lasttoken", 48), ("mean_tokens", 0), ("cls_token", 0)])
def test_only_last_tokens_are_pooled_over_cached_prefixes(tmp_path, mode, cached):
    folder, prompt = save(tmp_path, "llama", "causal", pooling(mode)), random_tokens(63, seed=0)
    with kvq.LLM(folder, **_OPTIONS) as llm:
        [first], [again] = (outputs_of(llm, [prompt]) for _ in range(2))
    assert (first.receipt.cached_tokens, again.receipt.cached_tokens) == (0, cached)
    assert list(again.vector) == pytest.approx(list(first.vector), abs=1e-5)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_embeddings_survive_preemptions(tmp_path, mode, drops):
    """In the middle of their prompts, whether or not their blocks are still there afterwards."""
    folder = save(tmp_path, "llama", "causal", pooling(mode))
    prompts = [random_tokens(90, seed=i) for i in range(3)]
    with kvq.LLM(folder, max_num_batched_tokens=24, async_scheduling=False, **_OPTIONS) as llm:
        wanted = llm.embed(prompts)
        llm.core.scheduler.manager.drop_cached()
        events: list = []
        given = RequestOptions(pools=True)
        jobs = [llm.core.intake.new_job(prompt, given, listener=events.append) for prompt in prompts]
        for job in jobs:
            llm.core.submit(job)
        for step in range(200):
            if not llm.core.has_work:
                break
            llm.step()
            running = [*llm.core.scheduler.running.requests]
            if running and step in (1, 2, 4, 7):
                llm.core.scheduler.preempt(running[0], 0.0)
                if drops:
                    llm.core.scheduler.manager.drop_cached()
    outputs = {tuple(event.prompt_token_ids): event for event in events if isinstance(event, RequestOutput)}
    assert sum(output.receipt.preemptions for output in outputs.values()) == 4
    for prompt, vector in zip(prompts, wanted, strict=True):
        assert outputs[tuple(prompt)].vector == pytest.approx(vector, abs=1e-4)


def test_scores_are_the_classifiers(tmp_path):
    folder = save(tmp_path, "qwen3", "classifier", pad_token_id=0)
    own = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = [token or 1 for token in random_tokens(40, seed=1)]
    with kvq.LLM(folder, **_OPTIONS) as llm:
        [[score]] = llm.embed([prompt])
        with pytest.raises(RequestError, match="generates no text"):
            llm.generate([prompt])
    with torch.no_grad():
        assert score == pytest.approx(
            float(torch.sigmoid(own(torch.tensor([prompt])).logits[0, 0])), abs=1e-4
        )


@pytest.mark.parametrize("no", [7, None])
def test_scores_are_those_of_two_tokens(tmp_path, no):
    folder = save(
        tmp_path,
        "qwen3",
        "causal",
        {"type": "LogitScore", "config": {"true_token_id": 9, "false_token_id": no}},
    )
    prompt = random_tokens(33, seed=2)
    with torch.no_grad():
        logits = load_eager(folder)(torch.tensor([prompt])).logits[0, -1]
    wanted = torch.sigmoid(logits[9] - (0 if no is None else logits[no]))
    with kvq.LLM(folder, **_OPTIONS) as llm:
        assert llm.embed([prompt])[0] == [pytest.approx(float(wanted), abs=1e-4)]
    own = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    with kvq.LLM(folder, **_OPTIONS) as llm:
        assert llm.embed([prompt])[0] == [pytest.approx(float(torch.logit(wanted)), abs=1e-3)]


def test_a_model_for_text_embeds_only_if_its_operator_says_so(tmp_path):
    folder = save(tmp_path, "llama", "causal")
    prompts = [random_tokens(length, seed=i) for i, length in enumerate(_LENGTHS)]
    with kvq.LLM(folder, **_OPTIONS) as llm:
        with pytest.raises(RequestError, match=r"makes no embeddings.*modules\.json.*--pooling"):
            llm.embed(prompts)
        texts = [
            output.outputs[0].token_ids
            for output in llm.generate(prompts, {"max_tokens": 9, "temperature": 0})
        ]
    with kvq.LLM(
        folder, pooling="mean", max_num_batched_tokens=20, **_OPTIONS
    ) as llm:  # both, in the same steps
        events: list = []
        options = [
            RequestOptions(params=kvq.SamplingParams(max_tokens=9, temperature=0)),
            RequestOptions(pools=True),
        ]
        pairs = [(prompt, one) for prompt in prompts for one in options]
        llm._run([llm.core.intake.new_job(prompt, one, listener=events.append) for prompt, one in pairs])
    outputs = [event for event in events if isinstance(event, RequestOutput)]
    found = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in outputs if one.vector is None}
    assert found == {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
    for output in outputs:
        if output.vector is not None:
            wanted = torch.nn.functional.normalize(
                hidden_states(folder, output.prompt_token_ids).mean(0), dim=0
            )
            assert torch.allclose(torch.tensor(output.vector), wanted, atol=1e-4)


def test_a_step_that_fails_once_pools_its_requests_apart(tmp_path):
    folder = save(tmp_path, "llama", "causal", pooling("mean_tokens"))
    prompts = [random_tokens(20, seed=i) for i in range(4)]
    with kvq.LLM(folder, **_OPTIONS) as llm:
        wanted = llm.embed(prompts)
        llm.core.scheduler.manager.drop_cached()
        forward, left = llm.core.runner.forward, [True]

        def fail_once(*args, **given):
            if left:
                left.pop()
                raise RuntimeError("once")
            return forward(*args, **given)

        llm.core.runner.forward = fail_once
        for vector, other in zip(llm.embed(prompts), wanted, strict=True):
            assert vector == pytest.approx(other, abs=1e-5)


def test_embeddings_are_cut_where_the_model_allows_it(tmp_path):
    folder, prompt = (
        save(tmp_path, "llama", "causal", pooling("lasttoken"), NORMALIZE),
        random_tokens(9, seed=0),
    )
    config = json.loads((folder / "config.json").read_text())
    for more, allowed, refused in (
        ({}, [64], [1, 63, 65]),
        ({"matryoshka_dimensions": [8, 32]}, [8, 32, 64], [1, 16, 65]),
        ({"is_matryoshka": True}, [1, 33, 64], [0, 65]),
    ):
        (folder / "config.json").write_text(json.dumps(config | more))
        with kvq.LLM(folder, **_OPTIONS) as llm:
            [whole] = llm.embed([prompt])
            for size in allowed:
                wanted = torch.nn.functional.normalize(torch.tensor(whole[:size]), dim=0)
                assert llm.embed([prompt], dimensions=size)[0] == pytest.approx(wanted.tolist(), abs=1e-5)
            for size in refused:
                with pytest.raises(RequestError, match="dimensions may be"):
                    llm.embed([prompt], dimensions=size)


def test_what_kvq_does_not_compute_is_refused_in_words(tmp_path):
    dense = save(tmp_path / "dense", "llama", "causal", pooling("lasttoken"), {"type": "Dense"})
    both = save(tmp_path / "both", "llama", "causal", pooling("lasttoken", pooling_mode_mean_tokens=True))
    three = save(tmp_path / "three", "llama", "classifier", num_labels=3, pad_token_id=0)
    for folder, words in (
        (dense, "Dense, which kvq does not compute"),
        (both, "one of"),
        (three, "scores need one"),
    ):
        with pytest.raises(ModelError, match=words):
            kvq.LLM(folder, **_OPTIONS)
    bare = save(tmp_path / "bare", "llama", "bare")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):  # nothing says that it needs none
        kvq.LLM(bare, **_OPTIONS)
    (bare / "modules.json").write_text('[{"path": "", "type": "a.Transformer"}]')
    with pytest.raises(ModelError, match="names no Pooling"):
        kvq.LLM(bare, **_OPTIONS)
    with (
        kvq.LLM(bare, pooling="last", **_OPTIONS) as llm,
        pytest.raises(RequestError, match="generates no text"),
    ):
        llm.generate([[5]])
    plain = save(tmp_path / "plain", "llama", "causal")
    with pytest.raises(ConfigError, match="no token 'yes'"):
        kvq.LLM(plain, pooling="yes-no", **_OPTIONS)
    with pytest.raises(ConfigError, match=r"one of auto, last"):
        kvq.LLM(plain, pooling="max", **_OPTIONS)
    for modules in ("{}", "[1]", "nothing", '[{"type": "a.Pooling", "path": "../up"}]'):
        (plain / "modules.json").write_text(modules)
        with pytest.raises(ModelError, match=r"modules\.json"):
            kvq.LLM(plain, **_OPTIONS)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
def test_encoders_are_refused_as_such(tmp_path, family):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder"):
        kvq.LLM(tmp_path)
