"""The search: better than every uniform format at the same bytes, on text it did not see, and served."""

import json
import shutil
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvq
from kvq.calib import budget, observe, search, sensitivity
from kvq.calib.budget import TunePlan, bytes_of_bits, default_codes, parse_budget, recipe_bytes
from kvq.calib.candidates import ALL_CODES, Half, candidates, codes_of, formats_of, recipe_of
from kvq.calib.tune_report import verdict
from kvq.errors import ConfigError, UnfitFormat
from kvq.evals import calibration_text, default_text, side_by_side
from kvq.evals.side_by_side import Marked, mean_divergences
from kvq.formats import Code, ExactTokens, KVRecipe, parse_format
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.parts import linear
from tests.helpers_models import save_first_layers, save_model

FAST = (Code.INT8, Code.INT4)


def tune(model, text, held_out, **plan):
    """`kvq.calib.search.tune` with the fields of its plan by name."""
    return search.tune(model, text, held_out, TunePlan(**plan))


@pytest.fixture(scope="module")
def tuned(tiny):
    """The embedded model at fewer bytes than int4's, searched and measured on little text."""
    return tune(
        tiny,
        calibration_text(),
        default_text(),
        budget_bytes=bytes_of_bits(tiny.geometry, 3.9),
        context=192,
        max_windows=1,
        verify_windows=8,
    )


def test_the_recipe_has_less_divergence_than_every_uniform_format_of_its_bytes(tuned):
    assert 3.85 < tuned.chosen.bits_per_element <= 3.9
    assert tuned.recipe.is_staged
    rivals = [p for p in tuned.points[1:] if p.kind == "uniform" and p.row.bits_per_element <= 3.9]
    assert {"int3", "int2"} < {p.row.kv for p in rivals}
    assert len(rivals) > 2  # and pairs that are expected to be best
    assert tuned.rival in rivals
    low, high = tuned.points[-1].ratio(tuned.rival)
    assert 0 < low < tuned.chosen.kl_mean / tuned.rival.row.kl_mean < high < 0.95


def test_no_uniform_format_lies_below_the_front(tuned):
    """At the bytes of every uniform format some point of the front is at least as good."""
    front = tuned.front()
    assert [p.row.kv_bytes_per_token for p in front] == sorted({p.row.kv_bytes_per_token for p in front})
    for point in tuned.points:
        best = min(p.row.kl_mean for p in front if p.row.kv_bytes_per_token <= point.row.kv_bytes_per_token)
        assert best <= point.row.kl_mean
    at = [p for p in tuned.points if p.row.kv_bytes_per_token == parse_budget_of(tuned, "int3")]
    assert [p.kind for p in sorted(at, key=lambda p: p.row.kl_mean)] == ["tuned", "uniform"]


def test_short_names_are_measured_up_to_the_next_beyond_the_budget(tuned):
    """Each takes as long as the recipe itself."""
    names = {p.row.kv for p in tuned.points} & {f"int{bits}" for bits in (2, 3, 4, 5, 6, 8)}
    assert names == {"int2", "int3", "int4"}
    assert {p.row.kv for p in tuned.points if p.kind == "tuned"} == {f"tuned, as {name}" for name in names}


def parse_budget_of(tuned, name):
    return next(p.row.kv_bytes_per_token for p in tuned.points if p.row.kv == name)


def test_costs_of_halves_add_up_to_that_of_the_whole(tuned):
    """What the search relies on, and that most of them are estimated; on the text of the search."""
    assert tuned.search_kl == pytest.approx(tuned.expected_kl, rel=0.5)
    trials = tuned.sensitivities.trials
    measured = [trial for trial in trials if not trial.is_estimated]
    assert len(measured) == 6 * 3 < len(trials) / 4  # of each layer K in 2 and 3 bits, V in 2


def test_what_is_estimated_is_near_what_is_measured(tuned, tiny):
    trials = [t for t in tuned.sensitivities.trials if t.is_estimated and t.fmt.code is Code.INT4]
    recent = ExactTokens(recent=1)
    recipes = [
        recipe_of(tiny.geometry, {(t.half.layer, t.half.part): t.fmt}, parse_format("fp32", 64))
        for t in trials
    ]
    recipes = [recipe if recipe.is_staged else replace(recipe, exact=recent) for recipe in recipes]
    found = mean_divergences(tiny, recipes, tuned.sensitivities.windows)
    ratios = [trial.kl / kl for trial, kl in zip(trials, found, strict=True)]
    assert 0.2 < min(ratios) < max(ratios) < 5
    assert 0.5 < sum(ratios) / len(ratios) < 2


def test_the_recipe_is_served_everywhere_from_its_file(tuned, tiny, tmp_path):
    from kvq.cache import KvqCache

    path = tmp_path / "kvq.json"
    tuned.recipe.save(path)
    model = tiny.with_kv(str(path))
    assert model.kv_bytes_per_token == tuned.chosen.kv_bytes_per_token
    assert recipe_bytes(tiny.geometry, model.recipe) == tuned.budget_bytes
    prompt = tiny.tokenizer("The with statement is used to wrap the execution of a block")["input_ids"]
    wanted = greedy(model, prompt, 12)
    llm = kvq.LLM("tiny", kv=str(path), kv_memory="8MiB")
    (output,) = llm.generate([prompt], kvq.SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.outputs[0].token_ids == wanted
    hf = tiny.weights.model
    hf.set_attn_implementation("kvq")
    try:
        generated = hf.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None,
            past_key_values=KvqCache(hf.config, kv=str(path)),
        )  # fmt: skip
    finally:
        hf.set_attn_implementation("kvq_packed")
    assert generated[0, len(prompt) :].tolist() == wanted


def greedy(model, prompt, count):
    session = model.session(max_tokens=len(prompt) + count)
    sequence = session.new_sequence()
    ids, found = list(prompt), []
    for _ in range(count):
        logits = session.forward([(sequence, ids)])[0].trusted_logits()
        ids = [int(logits[-1].argmax())]
        found += ids
    return found


SLOW, MIDDLE = [29, 30, 31, 61, 62, 63], [12, 13, 14, 44, 45, 46]  # channels, by RoPE's frequencies


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """The embedded model with key biases of 200 in the slowest channels of two layers."""
    return with_key_biases(tmp_path_factory.mktemp("biased") / "model", SLOW)


def with_key_biases(folder, channels):
    shutil.copytree(EMBEDDED["tiny"], folder, ignore=shutil.ignore_patterns("kvq.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    weights = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name in "qkvo":
            prefix = f"model.layers.{layer}.self_attn.{name}_proj"
            weights[f"{prefix}.bias"] = torch.zeros(len(weights[f"{prefix}.weight"]), dtype=torch.bfloat16)
    signs = torch.tensor([1, -1, -1, 1, 1, -1])
    for layer in (1, 3):
        bias = weights[f"model.layers.{layer}.self_attn.k_proj.bias"].view(-1, 64)
        for head in range(len(bias)):
            bias[head, channels] = (200 * signs.roll(head + layer)).bfloat16()
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return kvq.load(folder)


@pytest.mark.long
@pytest.mark.parametrize("channels", [SLOW, MIDDLE], ids=["slow", "middle"])
def test_huge_key_biases_cost_formats_by_token_dearly_and_the_recipe_little(channels, tmp_path):
    """Scales per channel take in biases, also those that RoPE turns."""
    model = with_key_biases(tmp_path / "model", channels)
    found = tune(
        model, calibration_text(), default_text(), budget_bytes=bytes_of_bits(model.geometry, 4.5),
        context=128, max_windows=1, verify_windows=8,
    )  # fmt: skip
    by_token = kvq.perplexity(
        model, ["fp32", "int4_g32_s8_rot"], default_text().text, context=128, max_windows=8
    )[1]
    assert by_token["perplexity_change"] > 0.15
    assert found.chosen.bits_per_element <= 4.5
    assert found.chosen.perplexity_change < 0.10


@pytest.mark.parametrize("head_dim", [80, pytest.param(160, marks=pytest.mark.long)])
def test_no_recipe_is_worse_than_the_default_format_of_odd_head_dimensions(head_dim, tmp_path):
    save_model(tmp_path, "llama", head_dim=head_dim, vocab_size=4096, num_hidden_layers=2)
    for path in EMBEDDED["tiny"].glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    model = kvq.load(tmp_path)
    found = tune(
        model, calibration_text(), default_text(), budget_bytes=parse_budget(model.prepared, "int4"),
        context=64, max_windows=2, verify_windows=8,
    )  # fmt: skip
    default = kvq.perplexity(model, ["fp32", "int4"], default_text().text, context=64, max_windows=8)[1]
    assert found.chosen.kv_bytes_per_token <= default["kv_bytes_per_token"]
    assert found.chosen.kl_mean <= 1.02 * default["kl_mean"]


def test_in_16_bit_weights_rounding_is_no_cost_of_a_format(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "_MAX_TIMES", 1)  # of 256 looks at how many rows are summed alike
    folder = tmp_path / "short"
    save_first_layers(folder, 2)
    model = kvq.load(folder, dtype="bf16")
    options = {"codes": FAST, "context": 96, "max_windows": 2, "verify_windows": 1}
    found = tune(
        model, calibration_text(), default_text(), budget_bytes=bytes_of_bits(model.geometry, 5), **options
    )
    assert found.sensitivities.rest.name == "bf16"
    assert found.search_kl == pytest.approx(found.expected_kl, rel=0.5)


def test_calibration_flags_the_huge_biases_and_nothing_like_them_elsewhere(biased):
    from kvq.calib.observe import summarize

    rows = summarize(observe(biased, calibration_text(), context=256, max_windows=2))
    flagged = {(row["layer"], row["part"]): set() for row in rows}
    for row in rows:
        if row["largest_outlier"] > 10:
            flagged[row["layer"], row["part"]] |= set(row["outlier_channels"])
    wanted = set(SLOW)
    assert {half for half, found in flagged.items() if found} == {(1, "k"), (3, "k")}
    assert all(wanted <= found for found in flagged.values() if found)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The embedded model's first two layers, which are searched three times as fast."""
    folder = tmp_path_factory.mktemp("short") / "model"
    save_first_layers(folder, 2)
    return kvq.load(folder)


def test_a_limit_of_divergence_is_met_with_few_bytes(short):
    options = {"codes": FAST, "context": 128, "max_windows": 2, "verify_windows": 2}
    found = tune(short, calibration_text(), default_text(), max_kl=0.0005, **options)
    assert found.search_kl <= 0.0005
    assert 4.25 < found.chosen.bits_per_element < 8
    with pytest.raises(ConfigError, match="no choice of formats is expected to cost 1e-12"):
        tune(short, calibration_text(), default_text(), max_kl=1e-12, **options)


def test_two_bits_go_where_they_hurt_least(short):
    """Into values, of this model."""
    found = tune(
        short, calibration_text(), default_text(), budget_bytes=bytes_of_bits(short.geometry, 3.8),
        codes=(*FAST, Code.INT2), context=128, max_windows=2, verify_windows=4,
    )  # fmt: skip
    assert 3.5 < found.chosen.bits_per_element <= 3.8
    cost = {(t.half.layer, t.half.part): t.kl for t in found.sensitivities.trials if t.fmt.code is Code.INT2}
    few = [half for half in cost if format_of(found.recipe, half).code is Code.INT2]
    assert 0 < len(few) < 4
    assert min(cost, key=cost.get) in few
    int4 = next(p.row for p in found.points if p.row.kv == "int4")
    assert found.chosen.kl_mean <= 10 * int4.kl_mean


def format_of(recipe, half):
    return getattr(recipe.layers[half[0]], half[1])


def test_codes_without_a_fast_kernel_are_searched_only_where_the_budget_needs_them(tiny, monkeypatch):
    def chosen(bits, **more):
        budget_bytes = bits and bytes_of_bits(tiny.geometry, bits)
        plan = TunePlan(budget_bytes=budget_bytes, max_kl=None if bits else 0.1, **more)
        return default_codes(tiny.prepared, plan)

    monkeypatch.setattr(budget, "has_fast_kernel", lambda model, code: code in FAST)
    assert chosen(5) == FAST
    assert chosen(None) == FAST
    assert chosen(4.0) == ALL_CODES[:-1]
    assert chosen(2.7) == ALL_CODES
    monkeypatch.setattr(budget, "has_fast_kernel", lambda model, code: False)
    assert chosen(5) == ALL_CODES[:-1]
    assert ALL_CODES[-1] is Code.INT2


def test_all_codes_have_fast_kernels_on_this_processor(tiny):
    assert budget.slow_codes(tiny.prepared, ALL_CODES) == []


def test_codes_that_a_head_dimension_does_not_fit_are_left_out_unless_named(tmp_path, monkeypatch):
    save_model(tmp_path, "llama", head_dim=36, num_hidden_layers=1)
    known = kvq.load(tmp_path).prepared
    monkeypatch.setattr(budget, "has_fast_kernel", lambda model, code: True)
    plan = TunePlan(max_kl=0.1)
    assert default_codes(known, plan) == (Code.INT8, Code.INT6, Code.INT4, Code.INT2)
    with pytest.raises(UnfitFormat, match="head_dim is a positive multiple of 8, got 36"):
        candidates(known, [Code.INT3])


def test_divergences_are_those_of_kvq_perplexity(tiny):
    """Two instruments, one number: the search's and the report's."""
    from kvq.evals.text import token_windows

    text = default_text().text
    windows = token_windows(tiny.tokenizer, text, context=128, max_windows=3)
    recipes = [tiny.with_kv(kv).recipe for kv in ("int4", "int8", "fp32")]
    found = mean_divergences(tiny, recipes, windows)
    rows = kvq.perplexity(tiny, ["fp32", "int4", "int8"], text, context=128, max_windows=3)
    for kl, row in zip(found[:2], rows[1:], strict=True):
        assert kl == pytest.approx(row["kl_mean"], rel=0.05)  # this one counts a window's last token too
    assert abs(found[2]) < 1e-9


def test_who_compares_many_recipes_hears_how_far_it_is(tiny, monkeypatch):
    monkeypatch.setattr(side_by_side, "_AT_ONCE", 2)
    recipes = [tiny.with_kv(kv).recipe for kv in ("int4", "int8", "int3")]
    heard, kept = [], []
    found = mean_divergences(
        tiny, recipes, [list(range(64))] * 4, progress=heard.append, keep=lambda costs: kept.append([*costs])
    )
    assert heard == sorted(heard)
    assert set(heard) == {0, 1, 2, 3}
    assert kept == [found[:2], found]


def test_a_clipped_recipe_is_read_like_any_other(tiny):
    """Codes and scales only: nothing that reads knows of the clip."""
    recipe = KVRecipe.uniform("int2_g32_rot", tiny.geometry.head_dims)
    clipped = replace(recipe, layers=tuple(replace(x, k_clip=0.75, v_clip=0.75) for x in recipe.layers))
    ids = list(range(5, 69))
    truth = tiny.logits(ids)
    plain, better = ((tiny.with_kv(one).logits(ids) - truth).square().mean() for one in (recipe, clipped))
    assert better < plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.5bits", 864),
        ("4.5", 864),
        ("5 bits", 960),
        ("900B", 900),
        ("0.9 KB", 900),
        ("900 bytes", 900),
        ("1KiB", 1024),
        ("int4", 888),
        ("k8v4", 1248),
        ("2.5bits", 480),
        ("6.5bits", 1248),
        ("int3", 696),
        ("int3_mean", 698),  # 24 means of 34 bytes a block of 32 tokens: 25.5
    ],
)
def test_a_budget_is_bits_bytes_or_a_format(tiny, text, expected):
    assert parse_budget(tiny.prepared, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "0bits",
        "99",
        "-3bits",
        "nan",
        "9" * 400 + "B",
        "4.5 bit/s",
        "fp8_per_tensor",
        "int4+recent=64",
    ],
)
def test_what_is_no_budget_is_refused(tiny, text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(tiny.prepared, text)


def test_a_budget_below_the_smallest_formats_is_refused_before_any_work(tiny):
    with pytest.raises(ConfigError, match=r"budget is 100 bytes per token; the smallest formats .* 480"):
        tune(tiny, "unread", "unread", budget_bytes=100)
    with pytest.raises(ConfigError, match="two ends of one trade; give one"):
        tune(tiny, "unread", "unread")


def test_unknown_codes_name_the_nearest():
    assert codes_of(["int4", "int8", "int4", "int3"]) == (Code.INT4, Code.INT8, Code.INT3)
    with pytest.raises(ConfigError, match=r"'int7'.*did you mean"):
        codes_of(["int7"])


def test_layers_that_nothing_was_chosen_for_keep_the_weights_type(tiny):
    recipe = recipe_of(tiny.geometry, {(2, "v"): parse_format("int4", 64)}, parse_format("fp32", 64))
    assert [(layer.k.name, layer.v.name) for layer in recipe.layers[1:3]] == [
        ("fp32", "fp32"),
        ("fp32", "int4_g32_s8_rot"),
    ]


def names_of(part, dim, code, **options):
    half = Half(layer=0, part=part, kv_heads=1, head_dim=dim)
    return [fmt.name for fmt in formats_of(half, code, **options)]


def test_v_is_searched_in_groups_of_the_bare_name_and_larger_up_to_64():
    for dim, sizes in ((64, [64, 32]), (128, [64, 32]), (80, [40, 20]), (96, [48, 24]), (24, [24])):
        assert names_of("v", dim, Code.INT3) == [f"int3_g{size}_s8_rot" for size in sizes]
    assert names_of("v", 128, Code.INT6) == ["int6_g64_s8_rot", "int6_g32_s8_rot"]
    assert names_of("v", 64, Code.INT8) == ["int8_per_token_head"]


def test_k_is_searched_per_channel_where_blocks_are_whole_and_its_rows_fit():
    assert names_of("k", 64, Code.INT3) == ["int3_per_channel"]
    assert names_of("k", 64, Code.INT8) == ["int8_per_channel"]
    assert names_of("k", 64, Code.INT3, whole_blocks=False) == names_of("v", 64, Code.INT3)


def test_a_recipe_with_exact_tokens_is_served_as_it_was_measured(short, tmp_path):
    found = kvq.tune(short, "3.5bits", recent=16, sinks=4, context=192, max_windows=1, verify_windows=1)
    uniform = {p.row.kv for p in found.points if p.kind == "uniform"}
    assert "int3+sinks=4+recent=16" in uniform
    assert all(name.endswith("+sinks=4+recent=16") for name in uniform - {"fp32"})
    assert found.recipe.exact == ExactTokens(sinks=4, recent=16)
    assert recipe_bytes(short.geometry, found.recipe) <= parse_budget(short.prepared, "3.5bits")
    assert "youngest 48 tokens and its first 32, which wait in bf16 (" in verdict(found)
    assert found.chosen.bits_held > found.chosen.bits_per_element
    assert f"({found.chosen.bits_held:.3f}".rstrip("0") in verdict(found)
    path = tmp_path / "kvq.json"
    found.recipe.save(path)
    served = short.with_kv(str(path))
    assert served.recipe.exact == found.recipe.exact
    (again,) = mean_divergences(short, [served.recipe], [list(range(5, 197))])
    assert again == mean_divergences(short, [found.recipe], [list(range(5, 197))])[0]


def test_trials_of_a_search_differ_in_their_half_only(short):
    """What all of them lose, young tokens in bf16, is no cost of a format; layers before it run once."""
    for recent in (0, 40):
        plan = TunePlan(max_kl=1.0, codes=(Code.INT4,), recent=recent, context=64, max_windows=1)
        found = search.measure_sensitivities(
            short, calibration_text(), plan, lambda what, done, total: None, lambda make: None
        )
        assert [trial.half.part for trial in found.trials] == ["k", "v", "v"] * 2  # V in groups of 64 and 32
        lossless, exact = {(0, "k"): parse_format("int8_per_channel", 64)}, ExactTokens(recent=recent)
        chosen = [{(t.half.layer, t.half.part): t.fmt} for t in found.trials if not t.is_estimated]
        recipes = [recipe_of(short.geometry, lossless | one, found.rest) for one in ({}, *chosen)]
        none, *costs = mean_divergences(
            short, [replace(recipe, exact=exact) for recipe in recipes], found.windows
        )
        measured = [trial.kl for trial in found.trials if not trial.is_estimated]
        assert measured == pytest.approx([max(kl - none, 1e-9) for kl in costs], rel=1e-6, abs=1e-9)


def test_what_was_measured_before_is_not_measured_again(short, monkeypatch):
    """Another budget takes a search's costs; one that was interrupted goes on; other codes are measured."""
    ran = []

    def counted(model, recipes, *rest, **named):
        ran.append(len(recipes) - 1)  # beside what all trials share
        return mean_divergences(model, recipes, *rest, **named)

    def measured(codes, known=()):
        plan = TunePlan(max_kl=1.0, codes=codes, context=64, max_windows=1, known=known)
        silent = (lambda what, done, total: None, lambda make: None)
        return search.measure_sensitivities(short, calibration_text(), plan, *silent).trials

    monkeypatch.setattr(sensitivity, "mean_divergences", counted)
    narrow = (Code.INT4, Code.INT3, Code.INT2)
    whole = measured(narrow)
    assert measured(narrow, whole) == whole
    some = [trial for trial in whole if not trial.is_estimated][:2]
    assert measured(narrow, some) == whole
    wide = measured((Code.INT4, Code.INT3), whole)  # the same costs, of fewer formats
    assert wide == tuple(trial for trial in whole if trial.fmt.code is not Code.INT2)
    again = measured(narrow, measured((Code.INT4, Code.INT3)))
    assert [x for x in again if x.fmt.code is Code.INT2] == [x for x in whole if x.fmt.code is Code.INT2]
    assert ran == [6, 0, 4, 0, 6, 4]  # of two layers K in two codes, V in one; last K and V in 2 bits


def test_bytes_of_scales_per_channel_count(short):
    named = KVRecipe.uniform("int4", short.geometry.head_dims, whole_blocks=True)
    plain = KVRecipe.uniform("int4_g32_s8_rot", short.geometry.head_dims)
    for size in (16, 32):
        more = recipe_bytes(short.geometry, named, size) - recipe_bytes(short.geometry, plain, size)
        assert more == 2 * 2 * (Fraction(3 * 64, size) - 4)  # layers, heads; V's and else K's two groups
    small = kvq.load(short.prepared.folder, kv="int4", block_size=16)
    assert small.bits_per_element == (4 + 1.5 + 4.5) / 2


def test_more_unquantized_tokens_than_there_can_be_are_refused():
    with pytest.raises(ConfigError, match="recent must be 0 to 65536"):
        TunePlan(max_kl=1.0, recent=-1)
    with pytest.raises(ConfigError, match="sinks must be 0 to 65536"):
        TunePlan(max_kl=1.0, sinks=1 << 20)


def test_marked_windows_count_where_their_tokens_are_predicted(tiny):
    """Weights of 1 are the plain mean without each window's last token; 0 leaves a token out."""
    ids = list(range(7, 103))
    recipes = [tiny.with_kv(kv).recipe for kv in ("int4", "int3")]
    halves = [
        Marked(ids, [float(first <= i < last) for i in range(96)]) for first, last in ((1, 48), (48, 96))
    ]
    every = Marked(ids, [1.0] * 96)

    whole, low, high = (mean_divergences(tiny, recipes, [one]) for one in (every, *halves))

    for kl, a, b in zip(whole, low, high, strict=True):
        assert kl == pytest.approx((47 * a + 48 * b) / 95)
        assert a != pytest.approx(b)
    assert mean_divergences(tiny, recipes, [every, halves[0]])[0] == pytest.approx(
        (95 * whole[0] + 47 * low[0]) / 142
    )


def test_a_search_on_marked_windows_reads_no_text(tiny):
    windows = [Marked(list(range(5 + i, 101 + i)), [float(j > 60) for j in range(96)]) for i in range(4)]
    plan = TunePlan(
        budget_bytes=bytes_of_bits(tiny.geometry, 5), codes=FAST, context=96, max_windows=2, marked=windows
    )
    found = plan.windows(tiny.prepared, "no text that is long enough", 2)
    assert found == [windows[0].ids, windows[2].ids]
    assert plan.weighed([*found, [1, 2]]) == [windows[0], windows[2], [1, 2]]
