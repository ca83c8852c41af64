"""Drafts by layers that checkpoints bring: tokens are those without drafts, drafts those of transformers."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from kvq.engine import SamplingParams
from kvq.engine.speculation import heads
from kvq.errors import ConfigError, ModelError
from kvq.models import load
from tests.engine.kit import (
    BLOCK,
    assert_balanced,
    drive,
    engine,
    mixed_prompts,
    pair,
    submit,
    tokens_of,
)
from tests.engine.speculation.kit import counts
from tests.helpers_models import load_fp32, random_tokens
from tests.helpers_mtp import (
    LAYERS,
    OPTIONS,
    change_config,
    drafts_by_hand,
    folder_with_layer,
    named_by_number,
    taught,
)

HEADS = {"method": "heads", "k": 3, "adapts": False}
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
FAMILIES = sorted(OPTIONS)

pytestmark = pytest.mark.usefixtures("_numbers")


@pytest.fixture(scope="module")
def _numbers():
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES:
            named_by_number(patch, family)
        yield


@pytest.fixture(scope="module")
def model(_numbers):
    return load_fp32(folder_with_layer("mellum", is_taught=True), block_size=BLOCK)


def with_heads(model, **options):
    """An engine that drafts, and its drafter."""
    llm = engine(model, **({"speculation": HEADS} | options))
    return llm, llm.core.speculator.proposer


def told(llm):
    """Drafts, and those of them that were right; nothing failed."""
    assert llm.core.speculator._failures == 0
    return counts(llm)


def assert_nothing_is_kept(drafter):
    assert not drafter._contexts
    assert not drafter._manager.sequences()
    assert [pool.live for pool in drafter._manager.usage()] == [0]
    drafter._manager.check_integrity()


def recorded(drafter):
    """What is drafted from now on: (tokens of the branch, drafts)."""
    found, propose = [], drafter.propose

    def proposing(plan):
        drafts = propose(plan)
        for i, own in drafts.items():
            found.append((plan.branches[i].tokens.tolist(), [one.token for one in own]))
        return drafts

    drafter.propose = proposing
    return found


def assert_as_transformers_drafts(folder, drafts, *, least):
    """So many drafts or more, each what transformers' own layer makes of the same text, read in one go."""
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    mtp = MtpModel.from_pretrained(main.eval(), device_map={"": "cpu"}).eval()
    assert len(drafts) >= least
    for ids, own in drafts:
        assert own == drafts_by_hand(main, mtp, ids, len(own))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_drafts_and_drafts_those_of_transformers(family):
    """Right and wrong ones, beside prompts of several lengths; with latents, windows and experts."""
    folder = folder_with_layer(family, is_taught=True)
    served = load_fp32(folder, block_size=BLOCK)
    prompts = [*taught(), *(random_tokens(length, seed=length) for length in (1, 2, 15, 16, 17, 63))]
    expected = tokens_of(engine(served, prefix_caching=False).generate(prompts, PARAMS))
    llm, drafter = with_heads(served, prefix_caching=False)
    drafts = recorded(drafter)
    assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    assert_as_transformers_drafts(folder, drafts, least=100)
    drafted, accepted = told(llm)
    assert drafted == sum(len(own) for _, own in drafts)
    assert 20 < accepted < drafted - 20
    assert_balanced(llm)
    assert_nothing_is_kept(drafter)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", {"dtype": "bf16"}),
        ("mellum", {"dtype": "bf16"}),
        ("mellum", {"weights": "int8"}),  # the layer's own stay as they are
        ("glm4_moe", {"backend": "reference"}),
    ],
)
def test_other_types_weights_and_kernels_change_no_token(family, options):
    served = load(
        folder_with_layer(family, is_taught=True), "auto", device="cpu", block_size=BLOCK, **options
    )
    expected = tokens_of(engine(served).generate(taught(), PARAMS))
    llm, drafter = with_heads(served)
    assert tokens_of(llm.generate(taught(), PARAMS)) == expected
    drafted, accepted = told(llm)
    assert accepted >= 0.2 * drafted
    assert_nothing_is_kept(drafter)


def test_a_layer_that_knows_what_follows_is_believed(model):
    prompts = taught()
    expected = tokens_of(engine(model).generate(prompts, PARAMS))
    llm, _ = with_heads(model)
    found = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    assert tokens_of(found) == expected
    drafted, accepted = told(llm)
    assert accepted >= 0.6 * drafted
    assert sum(one.receipt.accepted_tokens for one in found) == accepted
    assert llm.core.runner.keeps_hidden  # and drafts come of nothing else
    assert not engine(model).core.runner.keeps_hidden


@pytest.mark.daily(3)
@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 24}])
@pytest.mark.parametrize("waiting", [4, heads._WAITING])
def test_prompts_in_chunks_and_steps_ahead_change_no_token(model, monkeypatch, options, waiting):
    """Where few states may wait they are read beside prompts and decodes."""
    monkeypatch.setattr(heads, "_WAITING", waiting)
    prompts = [*taught(), *mixed_prompts(9, seed=5, longest=120)]
    expected = tokens_of(engine(model).generate(prompts, PARAMS))
    llm, drafter = with_heads(model, **options)
    assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    assert told(llm)[1] > 0
    assert_nothing_is_kept(drafter)


def test_steps_without_drafts_are_followed_too(model):
    """Those that are launched before the one before them is settled bring states, too."""
    llm, drafter = with_heads(model, async_scheduling=True, prefix_caching=False)
    most, drafts = drafter.most, recorded(drafter)
    drafter.most = lambda branch, job, limit: most(branch, job, limit) if len(branch.tokens) > 30 else 0
    first = submit(llm, taught()[0], SamplingParams(max_tokens=60, ignore_eos=True))
    ahead = 0
    for _ in range(20):
        llm.step()
        ahead += llm.core._flight is not None
    assert ahead >= 15
    drive(llm, [first, submit(llm, random_tokens(9, seed=12), PARAMS)])
    assert len({len(ids) for ids, _ in drafts}) > 5
    assert_as_transformers_drafts(model.prepared.folder, drafts, least=10)
    assert told(llm)[0] == sum(len(own) for _, own in drafts)


def test_drafts_do_not_depend_on_how_a_prompt_was_cut(model, monkeypatch):
    monkeypatch.setattr(heads, "_WAITING", 7)
    prompt, found = random_tokens(63, seed=8), []
    for tokens in (2048, 24):
        llm, drafter = with_heads(model, max_num_batched_tokens=tokens, prefix_caching=False)
        found.append(recorded(drafter))
        llm.generate([prompt], PARAMS)
    assert found[0] == found[1]


def test_after_a_prefix_from_the_cache_drafts_come_of_what_is_left(model):
    """Nobody knows what the model made of the cached tokens; what it says stays the same."""
    prompt = random_tokens(63, seed=9)
    expected = tokens_of(engine(model).generate([prompt, prompt], PARAMS))
    llm, drafter = with_heads(model)
    starts = []
    begin = drafter._begin
    drafter._begin = lambda start: (starts.append(start), begin(start))[1]
    found = llm.generate([prompt], PARAMS) + llm.generate([prompt], PARAMS)
    assert tokens_of(found) == expected
    assert found[1].receipt.cached_tokens == 62
    assert starts == [0, 62]
    assert found[1].receipt.drafted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_several_results_share_what_was_read_of_the_prompt(model, temperature):
    params = SamplingParams(max_tokens=16, n=3, seed=4, temperature=temperature, ignore_eos=True)
    prompts = [taught()[0], random_tokens(40, seed=10)]

    def results(llm):
        return [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]

    expected = results(engine(model))
    llm, drafter = with_heads(model)
    drafts = recorded(drafter)
    forks, fork = [], drafter._fork
    drafter._fork = lambda context: (forks.append(context.read), fork(context))[1]
    assert results(llm) == expected
    assert forks == [11, 11, 39, 39]  # of all but the last token of each prompt, whose next one nobody knew
    assert told(llm)[1] > 0
    if not temperature:
        assert_as_transformers_drafts(model.prepared.folder, drafts, least=30)
    assert_nothing_is_kept(drafter)


@pytest.mark.parametrize("kv_host", [0, "4MiB"])
def test_who_comes_back_after_a_preemption_says_the_same(model, kv_host):
    prompts = [random_tokens(30 + i, seed=20 + i) for i in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = tokens_of(engine(model).generate(prompts, params))
    llm, drafter = with_heads(model, num_blocks=14, kv_host=kv_host)
    drafts = recorded(drafter)
    found = llm.generate(prompts, params)
    assert tokens_of(found) == expected
    assert sum(output.receipt.preemptions for output in found) > 0
    assert told(llm)[0] > 0
    assert_as_transformers_drafts(model.prepared.folder, drafts, least=100)
    assert_balanced(llm)
    assert_nothing_is_kept(drafter)


@pytest.mark.parametrize("blocks", [1, 3, 6])
def test_without_room_for_all_contexts_some_begin_anew(model, monkeypatch, blocks):
    init = heads.Heads.__init__
    monkeypatch.setattr(heads, "_WAITING", 9)
    monkeypatch.setattr(
        heads.Heads,
        "__init__",
        lambda self, chooser, head, tokens: init(self, chooser, head, tokens=blocks * BLOCK),
    )
    prompts = mixed_prompts(8, seed=6, longest=60)
    expected = tokens_of(engine(model).generate(prompts, PARAMS))
    llm, drafter = with_heads(model)
    most = []
    observe = drafter.observe

    def observing(*given):
        observe(*given)
        most.append(max((context.end - context.read for context in drafter._contexts.values()), default=0))

    drafter.observe = observing
    assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    assert told(llm)[0] > 0
    assert max(most) <= 9
    assert_nothing_is_kept(drafter)


def test_requests_end_in_every_way_and_leave_nothing(model):
    llm, drafter = with_heads(model)
    gone, _ = submit(llm, random_tokens(20, seed=30), SamplingParams(max_tokens=50, ignore_eos=True))
    beams = SamplingParams(max_tokens=6, n=2, beam_width=3)
    others = [submit(llm, random_tokens(20, seed=31 + i), p) for i, p in enumerate([PARAMS, beams])]
    for _ in range(4):
        llm.step()
    assert drafter._contexts
    llm.core.cancel(gone)
    drive(llm, others)
    assert_balanced(llm)
    assert_nothing_is_kept(drafter)


@pytest.mark.parametrize("what", ["infinite", "raises"])
def test_a_head_that_breaks_spoils_no_token(model, what):
    prompts = taught()
    expected = tokens_of(engine(model).generate(prompts, PARAMS))
    llm, drafter = with_heads(model)
    head = drafter._head
    hidden, count = head.hidden, [0]

    def breaking(tokens, positions, states, step):
        count[0] += 1
        if count[0] % 3:
            return hidden(tokens, positions, states, step)
        if what == "raises":
            raise RuntimeError("broken")
        return hidden(tokens, positions, states * torch.inf, step)

    head.hidden = breaking
    assert tokens_of(llm.generate(prompts, PARAMS)) == expected
    assert count[0] > 3
    assert (llm.core.speculator._failures > 0) == (what == "raises")
    assert_nothing_is_kept(drafter)


# Refusals


def refused(folder, **options):
    with pytest.raises((ConfigError, ModelError)) as caught:
        engine(load_fp32(folder, block_size=BLOCK, **options), speculation="heads")
    return caught


def copied(folder, tmp_path, change=lambda tensors: None, **config):
    """A folder with some tensors or values changed."""
    there = tmp_path / "changed"
    shutil.copytree(folder, there)
    tensors = load_file(there / "model.safetensors")
    change(tensors)
    save_file(tensors, there / "model.safetensors", {"format": "pt"})
    change_config(there, **config)
    return there


def without_layer(tensors):
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_a_model_without_such_layers_is_refused_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"holds no tensors of such layers, .* says nothing of any; take the "
    ):
        engine(pair("llama")[0], speculation="heads")


@pytest.mark.parametrize(("count", "says"), [(1, "says 1"), (0, "says 0"), (None, "says nothing of any")])
def test_a_folder_without_the_tensors_is_refused_whatever_its_config_says(tmp_path, count, says):
    lists = {} if count else {"mtp_layer_types": None, "mtp_mlp_layer_types": None}
    folder = copied(
        folder_with_layer("mellum"), tmp_path, without_layer, num_nextn_predict_layers=count, **lists
    )
    caught = refused(folder)
    assert caught.type is ConfigError
    assert says in str(caught.value)
    assert "ngram, self or draft" in str(caught.value)


def test_a_family_whose_layers_transformers_cannot_make_is_refused_by_name(tmp_path):
    folder = copied(
        folder_with_layer("mellum"),
        tmp_path,
        num_nextn_predict_layers=None,
        mtp_layer_types=None,
        mtp_mlp_layer_types=None,
    )
    caught = refused(folder)
    assert caught.type is ConfigError
    assert "makes no multi-token-prediction layers for mellum" in str(caught.value)
    assert "of their tensors, first mtp.fc.weight; take the method ngram, self or draft" in str(caught.value)


def test_every_tensor_of_the_layer_is_accounted_for(tmp_path):
    folder = folder_with_layer("mellum")
    for i, (change, words) in enumerate(
        [
            (lambda x: x.pop("mtp.fc.weight"), r"lacks 1 tensors .* layers\.0\.eh_proj\.weight"),
            (lambda x: x.pop("mtp.layers.0.self_attn.q_proj.weight"), r"lacks 1 tensors .*q_proj"),
            (lambda x: x.update({"mtp.layers.0.extra": torch.ones(3)}), r"have no place for, first .*extra"),
            (
                lambda x: x.update({"mtp.fc.weight": torch.ones(64, 127)}),
                r"shape \[64, 128\], .* \[64, 127\]",
            ),
        ]
    ):
        caught = refused(copied(folder, tmp_path / str(i), change))
        assert caught.type is ModelError
        assert caught.match(words)


def test_of_several_layers_the_first_drafts(tmp_path):
    """As none of the families that are served comes with more than one."""
    family = "glm4_moe"

    def twice(tensors):
        own = f"model.layers.{LAYERS}."
        for name in [name for name in tensors if name.startswith(own)]:
            tensors[name.replace(own, f"model.layers.{LAYERS + 1}.")] = torch.rand_like(tensors[name])

    with pytest.MonkeyPatch.context() as patch:
        classes = AutoModelForCausalLM._model_mapping
        made = next(value for key, value in classes.items() if key.model_type == family)
        patch.setattr(made, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\..*"])
        folder = copied(folder_with_layer(family), tmp_path, twice, num_nextn_predict_layers=2)
        drafts = []
        for one in (folder, folder_with_layer(family)):
            llm, drafter = with_heads(load_fp32(one, block_size=BLOCK))
            drafts.append(recorded(drafter))
            llm.generate([random_tokens(20, seed=40)], PARAMS)
    assert drafts[0] == drafts[1]


def test_codes_are_refused(tmp_path):
    from kvq.models.loading.prepared import prepare

    folder = folder_with_layer("mellum")
    served = load_fp32(folder, block_size=BLOCK)
    config = {**served.prepared.config, "quantization_config": {"quant_method": "gptq"}}
    object.__setattr__(served.prepared, "config", config)
    assert prepare(folder).is_quantized is False
    with pytest.raises(ConfigError, match="holds quantized weights; serve the unquantized model"):
        engine(served, speculation="heads")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 32000},
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        {"model_type": "medusa"},
    ],
)
def test_heads_of_other_models_are_no_draft_models(model, tmp_path, config):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    change_config(folder, **config)
    with pytest.raises(ConfigError, match=r"a head that reads another model's hidden states .* no code for"):
        engine(model, speculation=f"draft,model={folder}")


def test_transformers_has_no_class_for_eagle():
    """If this fails, such heads may be worth serving."""
    from transformers.models.auto import modeling_auto

    names = [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_MAPPING_NAMES]
    assert names
    assert not [name for name in names if "eagle" in name.lower()]
