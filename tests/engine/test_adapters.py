"""LoRA adapters per request: answers of the merged model, prefixes that never cross, room in memory."""

import random
import shutil
from dataclasses import replace

import pytest
import torch

from kvq.engine import LLM, SamplingParams
from kvq.errors import ConfigError, ModelError, RequestError
from kvq.models import load
from kvq.models.adapters.place import adaptable
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.fused_layers import is_fused, unfuse_layers
from tests.engine.kit import engine, pair
from tests.helpers_adapters import CONFIG, WEIGHTS, ending, linears, merge, save_adapter
from tests.helpers_models import eager_greedy, load_eager, random_tokens
from tests.models.gguf.kit import convert

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "query_key_value", "dense")
NEW = 6
GREEDY = SamplingParams(max_tokens=NEW, logprobs=4, ignore_eos=True)


def folder_of(model):
    return model.prepared.folder


def saved(tmp_path, model, names=("a", "b"), **config):
    """Adapters of all layers of a model, in folders."""
    shapes = adaptable(model.weights.model)
    return {name: save_adapter(tmp_path / name, shapes, seed=i, **config) for i, name in enumerate(names)}


def assert_answers_of(reference, output, prompt):
    """Fail unless an output has the tokens and log-probabilities of transformers' model."""
    logits, tokens = eager_greedy(reference, prompt, NEW - 1)
    assert output.error is None
    assert output.outputs[0].token_ids == tokens
    wanted = logits[len(prompt) - 1 :].log_softmax(-1)
    for row, entry in zip(wanted, output.outputs[0].logprobs, strict=True):
        for token, logprob in ((entry.token, entry.logprob), *entry.top):
            assert logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "is_compiled"),
    [
        ("llama", True),
        ("qwen3", True),
        ("gemma2", False),
        ("phi3", True),
        ("gpt_neox", False),
        ("mixtral", False),
    ],
)
def test_a_mixed_batch_gets_the_answers_of_the_merged_models(family, is_compiled, tmp_path):
    model, base = pair(family)
    assert model.weights.fused_pass is not None or not is_compiled
    shapes = linears(base)
    some = ending(shapes, ATTENTION) or shapes
    adapters = {
        "a": save_adapter(tmp_path / "a", shapes if family != "mixtral" else some, seed=1),
        "b": save_adapter(tmp_path / "b", some, seed=2, rank=7, use_rslora=True),
    }
    merged = {None: base} | {
        name: merge(load_eager(folder_of(model)), folder) for name, folder in adapters.items()
    }
    llm = engine(model, adapters=adapters)
    names = ["a", None, "b", "a", "b"]
    prompts = [random_tokens(length, seed=length) for length in (33, 17, 21, 1, 40)]
    outputs = llm.generate(prompts, GREEDY, adapter=names)
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert_answers_of(merged[name], output, prompt)


def test_a_gguf_file_takes_adapters_by_the_names_of_its_layers(tmp_path):
    folder = EMBEDDED["tiny"]
    path = convert(folder, tmp_path / "model.gguf", has_tokenizer=True)
    model = load(path, kv="fp32", device="cpu", block_size=16)
    adapters, prompt = saved(tmp_path, model), random_tokens(33, seed=1)
    output = engine(model, adapters=adapters).generate(prompt, GREEDY, adapter="b")[0]
    assert_answers_of(merge(load_eager(folder), adapters["b"]), output, prompt)


@pytest.mark.parametrize("weights", ["int8", "int4_g32"])
def test_compiled_layers_over_quantized_weights_agree_with_the_models_own_code(weights, tmp_path):
    folder = folder_of(pair("llama")[0])
    outputs = []
    for compiled in (True, False):
        model = load(folder, kv="fp32", device="cpu", weights=weights, block_size=16)
        assert is_fused(model.weights.model)
        adapters = saved(tmp_path, model)
        if not compiled:
            unfuse_layers(model.weights.model)
            model.weights.forget_rows()
        llm = engine(model, adapters=adapters)
        prompts = [random_tokens(length, seed=length) for length in (33, 17)]
        outputs.append(llm.generate(prompts, GREEDY, adapter=["a", "b"]))
    for one, other in zip(*outputs, strict=True):
        a, b = one.outputs[0], other.outputs[0]
        assert a.token_ids == b.token_ids
        assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-3)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4"])
def test_a_request_is_answered_alike_alone_and_among_others(kv, tmp_path):
    model, _ = pair("llama")
    llm = engine(model, kv, adapters=saved(tmp_path, model), prefix_caching=False)
    prompts = [random_tokens(length, seed=length) for length in (50, 9, 33, 70)]
    names = ["a", "b", None, "a"]
    together = llm.generate(prompts, GREEDY, adapter=names)
    for prompt, name, output in zip(prompts, names, together, strict=True):
        alone = llm.generate(prompt, GREEDY, adapter=name)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_prefixes_never_cross_adapters(tmp_path):
    model, _ = pair("llama")
    llm = engine(model, adapters=saved(tmp_path, model), num_blocks=999)
    source, params, known = random.Random(0), SamplingParams(max_tokens=1, ignore_eos=True), {}
    manager = llm.core.scheduler.manager
    texts = [random_tokens(length, seed=length) for length in (40, 57, 64, 90)]
    for _ in range(250):
        name, tokens = source.choice(["a", "b", None]), list(source.choice(texts))
        tokens = tokens[: source.randint(1, len(tokens))]
        seen = known.setdefault(name, [])
        longest = max((common(tokens, other) for other in seen), default=0)
        output = llm.generate(tokens, params, adapter=name)[0]
        assert output.receipt.cached_tokens <= longest
        assert output.receipt.cached_tokens >= min(longest, len(tokens) - 1) // 16 * 16
        seen.append(tokens)
    manager.check_integrity()


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


INVOCATION = [5, 9, 5]


def activated(tmp_path, model, name="act"):
    shapes = adaptable(model.weights.model)
    return save_adapter(tmp_path / name, shapes, seed=7, alora_invocation_tokens=INVOCATION)


@pytest.mark.parametrize("before", [0, 1, 37, 64])
def test_an_activated_adapter_acts_from_its_last_invocation_on(before, tmp_path):
    model, base = pair("llama")
    llm = engine(model, adapters={"act": activated(tmp_path, model)}, prefix_caching=False)
    head = random_tokens(before, seed=1)
    prompt = [*INVOCATION, *head, *INVOCATION, 11, 12]
    output = llm.generate(prompt, GREEDY, adapter="act")[0]
    merged = merge(load_eager(folder_of(model)), tmp_path / "act")
    # Keys and values before the invocation are the base model's: computed once, then continued by the other.
    start = 3 + before
    tokens: list[int] = []
    with torch.inference_mode():
        past = base(input_ids=torch.tensor([prompt[:start]]), use_cache=True).past_key_values
        given = prompt[start:]
        for entry in output.outputs[0].logprobs:
            found = merged(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            past, row = found.past_key_values, found.logits[0, -1].log_softmax(-1)
            tokens.append(int(row.argmax()))
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            given = tokens[-1:]
    assert output.outputs[0].token_ids == tokens


def test_an_activated_adapter_shares_what_is_before_it_and_nothing_after(tmp_path):
    model, _ = pair("llama")
    adapters = saved(tmp_path, model) | {"act": activated(tmp_path, model)}
    llm = engine(model, adapters=adapters, num_blocks=999)
    head = random_tokens(150, seed=3)
    prompt = [*head, *INVOCATION, *random_tokens(30, seed=4)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def cached(name, tokens=prompt):
        return llm.generate(tokens, params, adapter=name)[0].receipt.cached_tokens

    assert cached(None) == 0
    assert cached("act") == 150  # to the token, by a copy of the block in which the adapter begins
    assert cached("act") == cached(None) == 176  # whole blocks
    assert cached("a") == 0
    other = [*head, *INVOCATION, *random_tokens(30, seed=5)]
    assert cached("act", other) == 153  # its own invocation tokens, too
    assert cached(None, [*head, *random_tokens(20, seed=8)]) == 150
    llm.core.scheduler.manager.check_integrity()


def test_an_activated_adapter_needs_its_invocation(tmp_path):
    model, _ = pair("llama")
    llm = engine(model, adapters={"act": activated(tmp_path, model)})
    with pytest.raises(RequestError, match=r"'act'.*\[5, 9, 5\]"):
        llm.generate([[5, 9, 6, 5, 9]], adapter="act")


def bytes_of(adapters):
    return sum(adapter.nbytes for adapter in adapters.held.values())


def test_adapters_come_and_go_through_little_room(tmp_path):
    model, _ = pair("llama")
    shapes = ending(adaptable(model.weights.model), ("q_proj", "down_proj"))
    folders = {f"x{i}": save_adapter(tmp_path / f"x{i}", shapes, seed=i) for i in range(30)}
    llm, held = engine(model, adapters=folders, max_adapters=4, max_num_seqs=9), []
    adapters, manager = llm.core.adapters, llm.core.scheduler.manager
    assert len(adapters.held) == 4
    size = bytes_of(adapters)
    prompts = [random_tokens(20, seed=1)] * 9
    source, first = random.Random(1), {}
    for _ in range(12):
        names = source.sample(list(folders), 9)
        llm.on_step(lambda stats: held.append(len(adapters.held)))
        for name, output in zip(names, llm.generate(prompts, GREEDY, adapter=names), strict=True):
            tokens = output.outputs[0].token_ids
            assert first.setdefault(name, tokens) == tokens
    assert max(held) == 4
    assert bytes_of(adapters) == size
    assert len({tuple(tokens) for tokens in first.values()}) > 10
    for name in folders:
        llm.unload_adapter(name)
    assert (len(adapters.held), len(adapters.named)) == (0, 0)
    assert all(pool.live == 0 for pool in manager.usage())
    manager.check_integrity()


def test_unloaded_adapters_free_their_memory_and_running_requests_keep_theirs(tmp_path):
    model, _ = pair("llama")
    llm = engine(model, adapters=saved(tmp_path, model))
    prompt = random_tokens(20, seed=1)
    wanted = llm.generate(prompt, GREEDY, adapter="a")[0].outputs[0].token_ids
    found: list[int] = []
    for piece in llm.stream(prompt, GREEDY, adapter="a"):
        found += piece.token_ids
        if len(found) == 2 and (tmp_path / "a").exists():
            llm.unload_adapter("a")
            shutil.rmtree(tmp_path / "a")
            assert len(llm.core.adapters.held) == 2
    assert found == wanted
    assert list(llm.core.adapters.named) == ["b"]
    assert len(llm.core.adapters.held) == 1
    with pytest.raises(RequestError, match="'a'"):
        llm.generate(prompt, adapter="a")


def test_a_name_is_used_once_and_may_be_used_again(tmp_path):
    model, _ = pair("llama")
    folders = saved(tmp_path, model)
    llm = engine(model, adapters={"a": folders["a"]})
    prompt = random_tokens(40, seed=1)
    first = llm.generate(prompt, GREEDY, adapter="a")[0]
    with pytest.raises(ConfigError, match="'a'"):
        llm.load_adapter("a", folders["b"])
    llm.unload_adapter("a")
    llm.load_adapter("a", folders["b"])
    second = llm.generate(prompt, GREEDY, adapter="a")[0]
    assert second.receipt.cached_tokens == 0
    assert second.outputs[0].token_ids != first.outputs[0].token_ids


def test_an_evicted_adapter_whose_files_changed_fails_its_requests_alone(tmp_path):
    model, _ = pair("llama")
    folders = saved(tmp_path, model, ("a", "b", "c"))
    llm = engine(model, adapters=folders, max_adapters=1)
    shutil.copy(folders["b"] / WEIGHTS, folders["a"] / WEIGHTS)
    shutil.rmtree(folders["b"])
    outputs = llm.generate([random_tokens(9, seed=1)] * 4, GREEDY, adapter=["a", "b", "c", None])
    assert "changed" in str(outputs[0].error)
    assert CONFIG in str(outputs[1].error)
    assert outputs[2].error is outputs[3].error is None


def test_a_model_of_another_size_is_refused_when_the_engine_is_made(tmp_path):
    model, _ = pair("llama")
    shapes = {
        name: (inputs + 8, outputs) for name, (inputs, outputs) in adaptable(model.weights.model).items()
    }
    with pytest.raises(ModelError, match=r"adapter 'sql'.*adapter_model.safetensors.*lora_A"):
        LLM(model, num_blocks=8, adapters={"sql": save_adapter(tmp_path, shapes)})


def test_drafts_change_no_token(tmp_path):
    model, _ = pair("llama")
    adapters = saved(tmp_path, model)
    prompts = [random_tokens(12, seed=i) * 4 for i in range(4)]
    params, names = replace(GREEDY, max_tokens=24, logprobs=None), ["a", "b", None, "a"]
    plain = engine(model, adapters=adapters).generate(prompts, params, adapter=names)
    for method in ({"method": "ngram", "k": 4}, {"method": "self", "k": 3, "weights": "int8"}):
        llm = engine(model, adapters=adapters, speculation=method)
        drafted = llm.generate(prompts, params, adapter=names)
        assert sum(output.receipt.drafted_tokens for output in drafted) > 0
        for one, other in zip(plain, drafted, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_a_receipt_names_the_adapter_by_its_contents(tmp_path):
    model = load("tiny", "int4", block_size=16, exact=True)
    shapes = ending(adaptable(model.weights.model), ("q_proj",))
    folders = {name: save_adapter(tmp_path / name, shapes, seed=int(name == "c")) for name in ("a", "b", "c")}
    llm = engine(model, adapters=folders)
    prompt = random_tokens(30, seed=1)
    exact = [llm.generate(prompt, GREEDY, adapter=name)[0].receipt.exact for name in (None, "a", "b", "c")]
    assert exact[1] == exact[2]  # the same files under two names
    assert len({one.model for one in exact}) == len({one.digest for one in exact}) == 3
    assert len({one.recipe for one in exact}) == 1
    many = llm.generate(
        [prompt, *[random_tokens(n, seed=n) for n in (3, 50)]], GREEDY, adapter=["a", "c", None]
    )
    assert many[0].receipt.exact == exact[1]


def test_steps_that_run_ahead_have_their_adapters(tmp_path):
    model, _ = pair("llama")
    prompts, names = [random_tokens(20, seed=i) for i in range(6)], ["a", "b", None] * 2
    answers = []
    for ahead in (False, True):
        llm = engine(model, adapters=saved(tmp_path, model), async_scheduling=ahead)
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=20), adapter=names)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
