"""A program's own quantizers are formats like others, and what they give back is looked at."""

import math

import numpy as np
import pytest
import torch

import kvq
from kvq.cache import KVCache, KvqCache
from kvq.cli import main
from kvq.evals import default_text
from kvq.formats.spec import Own
from kvq.integrations.lmcache.chunk import ChunkCodec
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.codec import encode, encode_block
from kvq.models.check.load_check import _key

TEXT = default_text().text


@pytest.fixture(autouse=True)
def unregistered(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(Own, "registered", {})


def rounded(x, dim=-1):
    scale = (x.abs().amax(dim, keepdim=True) / 7).clamp(min=1e-6)
    return (x / scale).round() * scale


def quantize(x):
    scale = (x.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-6)
    return (x / scale).round().to(torch.int8), scale


def dequantize(codes, scale):
    return codes * scale


def test_rows_are_held_as_they_are_read_back_and_said_to_take_what_was_said(tiny):
    kvq.register_format("mine", rounded, bits=4.25)
    model = tiny.with_kv("mine")

    x = torch.randn(3, 2, 64)
    codes, scales = encode(x, model.recipe.layers[0].k)

    assert scales is None
    assert torch.equal(codes, rounded(x))
    assert model.bits_per_element == 4.25
    assert model.kv_bytes_per_token == 4.25 * tiny.geometry.elements_per_token / 8
    assert model.bits_held(1024) == 4.25
    assert (model.recipe.name, model.recipe.is_quantized, model.recipe.is_staged) == ("mine", True, False)


def test_a_pair_takes_the_bits_of_what_lies_between(tiny):
    kvq.register_format("mine", quantize, dequantize)
    kvq.register_format("one-tensor", lambda x: x.half(), lambda x: x.float())
    codebook = torch.linspace(-1, 1, 16)
    kvq.register_format(
        "shared", lambda x: ((x / 9).half(), codebook), lambda codes, book: codes.float() * 9 * book[-1]
    )
    assert tiny.with_kv("shared").bits_per_element == 16  # a codebook is no row's
    assert tiny.with_kv("mine").bits_per_element == 8 + 32 / 64
    assert tiny.with_kv("one-tensor/mine").bits_per_element == (16 + 8.5) / 2


def test_blocks_are_quantized_whole_and_their_size_is_the_formats(tiny):
    kvq.register_format("mine", lambda x: rounded(x, -2), bits=4.5, block=48)
    model = tiny.with_kv("int8/mine")
    fmt = model.recipe.layers[0].v
    x = torch.randn(3, 2, 48, 64)
    assert torch.equal(encode_block(x, fmt)[0], rounded(x, -2))
    assert (model.layout.block_size, model.recipe.is_staged) == (48, True)
    kvq.register_format("other", lambda x: rounded(x, -2), bits=4.5, block=32)
    with pytest.raises(kvq.ConfigError, match="one size"):
        _ = tiny.with_kv("other/mine").layout


def test_it_stands_in_the_same_table_as_others_and_means_the_same_on_every_way_in(tiny):
    """In pairs, with exact tokens, by rows and by blocks: what kvq's own codes make of it is the measure."""
    kvq.register_format("mine", rounded, bits=4.25)
    kvq.register_format("exact", lambda x: x, bits=32)
    kvq.register_format("blocks", lambda x: rounded(x, -2), bits=4.5, block=32)
    names = ["fp32", "mine", "exact", "blocks/mine", "blocks/int4+sinks=4+recent=32"]
    base, mine, exact, blocks, recent = kvq.perplexity(tiny, names, TEXT, context=160, max_windows=1)
    parts = kvq.perplexity(tiny, ["fp32", "mine"], TEXT, context=160, max_windows=1, chunk=7)[1]
    assert [base["kl_mean"], exact["kl_mean"]] == pytest.approx([0, 0], abs=1e-6)
    assert 0.001 < mine["kl_mean"] < 0.3
    assert parts["kl_mean"] == pytest.approx(mine["kl_mean"], rel=0.1)
    assert 0 < recent["kl_mean"] < blocks["kl_mean"]
    assert (mine["kv"], mine["bits_per_element"]) == ("mine", 4.25)


@pytest.mark.parametrize("kv", ["mine", "mine+recent=16", "blocks/int8", "int8/mine"])
def test_an_engine_generates_in_it_with_prefixes_and_swapping(tiny, kv):
    kvq.register_format("mine", lambda x: x, bits=32)
    kvq.register_format("blocks", lambda x: x, bits=32, block=32)
    plain = {"blocks/int8": "fp32/int8", "int8/mine": "int8/fp32"}.get(kv, "fp32")
    options = kvq.SamplingParams(max_tokens=8, temperature=0)
    prompts = [list(range(9, 79)), list(range(9, 75))]
    texts = []
    for name in (kv, plain):
        with kvq.LLM(tiny, name, max_num_seqs=1) as llm:
            outs = llm.generate(prompts, options)
            assert outs[1].receipt.cached_tokens >= 32
            texts.append([out.outputs[0].token_ids for out in outs])
    if "int8" not in kv:  # whose staging differs between the two
        assert texts[0] == texts[1]


@pytest.mark.parametrize("attention", ["sdpa", "kvq"])
def test_transformers_generate_takes_it(tiny, attention):
    from transformers import AutoModelForCausalLM

    kvq.register_format("mine", lambda x: torch.zeros_like(x), bits=1)
    model = AutoModelForCausalLM.from_pretrained(tiny.prepared.folder, dtype=torch.float32)
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        model.set_attn_implementation(attention)
        cache = KvqCache(model.config, kv="mine")
        found = model(ids, past_key_values=cache).logits
        assert not torch.allclose(found, plain, atol=1e-3)
    k, v = cache.rows.blocks.gather(0, cache.rows.batches[0].tables, 0, 40, unrotate=True)
    assert not k.any()
    assert not v.any()


def test_names_of_other_cases_and_pairs_mean_it(tiny):
    kvq.register_format("mine.v2-b", rounded, bits=4.25)
    assert tiny.with_kv(" MINE.v2-B/int8 ").recipe.layers[0].k.name == "mine.v2-b"


@pytest.mark.parametrize(
    "name", ["int4", "int4_g8", "int4_mean_rot", "auto", "k8v4", "q8_0", "bfloat16", "fp32", "kvq_mine"]
)
def test_names_that_mean_something_are_refused(name):
    with pytest.raises(kvq.ConfigError, match="means something to kvq already"):
        kvq.register_format(name, rounded, bits=4)


@pytest.mark.parametrize(
    "name", ["", "a", "Mine", "a/b", "a+b", "a,b", "a b", "m.json", "4bits", "-mine", "mine-", "x" * 65, 3]
)
def test_names_that_no_option_could_take_are_refused(name):
    with pytest.raises(kvq.ConfigError, match="a format's name is"):
        kvq.register_format(name, rounded, bits=4)


def test_a_name_is_given_once_unless_it_shall_be_replaced(tiny):
    kvq.register_format("mine", rounded, bits=4)
    before = tiny.with_kv("mine")
    with pytest.raises(kvq.ConfigError, match=r"mine is registered already.*replace=True"):
        kvq.register_format("mine", rounded, bits=5)
    kvq.register_format("mine", rounded, bits=5, replace=True)
    assert (before.bits_per_element, tiny.with_kv("mine").bits_per_element) == (4, 5)
    assert before.recipe.digest() != tiny.with_kv("mine").recipe.digest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give bits="),
        ({"bits": 0}, "bits must be above 0"),
        ({"bits": math.nan}, "bits must be above 0"),
        ({"bits": 65}, "up to 64"),
        ({"bits": True}, "bits must be"),
        ({"bits": 4, "dequantize": 3}, "must be functions"),
        ({"bits": "4"}, "bits must be"),
        ({"bits": 4, "block": 1}, "block must be 2 to"),
        ({"bits": 4, "block": 5000}, "block must be 2 to"),
        ({"bits": 4, "block": 32.0}, "block must be 2 to"),
    ],
)
def test_bits_and_blocks_out_of_range_are_refused(options, message):
    with pytest.raises(kvq.ConfigError, match=message):
        kvq.register_format("mine", rounded, **options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[..., :1], r"give back torch.float32 \[5, 64\].*got torch.float32 \[5, 1\]"),
        (lambda x: x.flatten(), r"got torch.float32 \[320\]"),
        (lambda x: x.half(), "got torch.float16"),
        (lambda x: x.double(), "got torch.float64"),
        (lambda x: (x, x), "got <class 'tuple'>"),
        (lambda x: None, "got <class 'NoneType'>"),
        (lambda x: x.numpy(), "got <class 'numpy.ndarray'>"),
        (lambda x: x / x.abs().amax(-1, keepdim=True), "gave back NaN or infinity"),
        (lambda x: (x * 1e38).clamp(min=-3).abs() * 1e3, "gave back NaN or infinity"),
        (lambda x: x.view(-1, 128), "can't take rows of 64 elements: RuntimeError: shape"),
        (lambda x: 1 / 0, "can't take rows of 64 elements: ZeroDivisionError"),
        (lambda x: x.clamp(max=x.mean() + 1), "of a row changes with the rows beside it.*give block="),
    ],
)
def test_what_is_no_row_given_back_is_refused_when_the_name_is_used(tiny, function, message):
    kvq.register_format("mine", function, bits=4)
    with pytest.raises(kvq.ConfigError, match=message):
        tiny.with_kv("int4/mine")


def test_blocks_that_depend_on_each_other_and_pairs_of_no_tensors_are_refused(tiny):
    kvq.register_format("mine", lambda x: x.clamp(max=x.mean() + 1), bits=4, block=32)
    with pytest.raises(kvq.ConfigError, match="of a block changes with the blocks beside it"):
        tiny.with_kv("mine")
    kvq.register_format("pair", lambda x: (x, "scale"), lambda x, scale: x)
    with pytest.raises(kvq.ConfigError, match="AttributeError"):
        tiny.with_kv("pair")


def test_what_shows_only_in_the_model_is_refused_there(tiny):
    """And rounding by chance is not taken for rows that depend on each other."""
    kvq.register_format("mine", lambda x: x / (x.abs() < 4) if len(x) > 5 else x + torch.rand_like(x), bits=4)
    with pytest.raises(kvq.ConfigError, match="gave back NaN or infinity"):
        tiny.with_kv("mine").logits(list(range(9, 99)))


def test_errors_behind_the_trial_name_the_format(tiny):
    kvq.register_format("mine", lambda x: x if len(x) <= 5 else 1 / 0, bits=4)
    with pytest.raises(kvq.ConfigError, match="mine can't take rows of 64 elements: ZeroDivisionError"):
        tiny.with_kv("mine").logits(list(range(9, 99)))


def test_numbers_may_be_of_numpy(tiny):
    kvq.register_format("mine", rounded, bits=np.float32(4.5), block=np.int64(32))
    assert tiny.with_kv("mine").bits_per_element == 4.5


def test_functions_that_write_to_what_they_get_harm_nothing(tiny):
    kvq.register_format("mine", lambda x: x.zero_(), bits=4)
    k = torch.ones(2, 2, 64)
    assert not encode(k, tiny.with_kv("mine").recipe.layers[0].k)[0].any()
    assert k.all()


def test_what_is_given_back_may_lie_in_memory_in_any_order(tiny):
    kvq.register_format("mine", lambda x: x.T.contiguous().T, bits=4)
    x = torch.randn(3, 2, 64)
    assert torch.equal(encode(x, tiny.with_kv("mine").recipe.layers[0].k)[0], x)


def test_where_stored_bytes_are_needed_it_is_refused_by_name(tiny, tmp_path):
    kvq.register_format("mine", rounded, bits=4.25)
    model = tiny.with_kv("mine/int4")
    for take in (
        lambda: kvq.plan("llama-3-8b", gpu="h100", kv="int8/mine", context=8192),
        lambda: kvq.load("tiny", kv="mine", cache="dense").logits([1]),
        lambda: ChunkCodec("mine", num_layers=2, channels=128, dtype=torch.bfloat16, head_dim=64),
        lambda: model.recipe.check_unstaged("vLLM's cache"),
    ):
        with pytest.raises(kvq.ConfigError, match=r"mine is a registered format, which .* can't take"):
            take()
    with pytest.raises(
        kvq.UnsupportedKernel, match=r"does not write registered formats.*--backend reference"
    ):
        KVCache(
            model.layout, num_blocks=model.layout.blocks_for(1, 64), device=torch.device("cpu"), backend="cpu"
        )
    with pytest.raises(kvq.ConfigError, match="mine is a registered format, of which `kvq tune` has no"):
        kvq.tune(tiny, "4.5bits", formats="int4,mine")


def test_calibration_refuses_it_before_it_observes_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kvq.register_format("mine", rounded, bits=4.25)
    with pytest.raises(SystemExit):
        main(["calibrate", "tiny", "--kv", "mine"])
    assert "mine is a registered format, which calibrate can't take" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("serve", "--check"), ("run-batch", "in.jsonl", "out.jsonl")])
def test_commands_whose_engine_is_another_process_say_so(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("")
    kvq.register_format("mine", rounded, bits=4.25)
    with pytest.raises(SystemExit) as end:
        main([*command, "--kv", "int4/Mine+recent=4"])
    assert end.value.code == 2
    assert "mine is registered in this process, and the engine of this command" in capsys.readouterr().err


def test_a_recipes_file_names_it_and_needs_it(tiny, tmp_path, monkeypatch):
    kvq.register_format("mine", rounded, bits=4.25)
    tiny.with_kv("mine/int8").recipe.save(tmp_path / "kvq.json")
    assert tiny.with_kv(tmp_path / "kvq.json").recipe.layers[0].k.own is Own.registered["mine"]
    monkeypatch.setattr(Own, "registered", {})
    with pytest.raises(kvq.ConfigError, match="unknown KV format 'mine'"):
        tiny.with_kv(tmp_path / "kvq.json")


def test_what_was_found_of_it_before_is_not_taken_for_what_it_does_now(tiny):
    """In load checks' memory and in files of prefixes: a name of another process may mean something else."""
    keys = set()
    for _ in range(2):
        kvq.register_format("mine", rounded, bits=4.25, replace=True)
        keys.add(_key(tiny.prepared, tiny.with_kv("mine").recipe))
    assert len(keys) == 2


def test_kernels_read_what_it_left_as_the_reference_does(tiny):
    """Rows go in by torch and are attended to by whatever reads fp32."""
    kvq.register_format("mine", rounded, bits=4.25)
    layout, outs = tiny.with_kv("mine").layout, []
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(40, heads, 64, generator=generator) for heads in (4, 2, 2))
    heads = layout.geometry.kv_heads[0]
    k, v = k[:, :heads], v[:, :heads]
    for backend in ("auto", "reference"):
        cache = KVCache(layout, num_blocks=[2], device=torch.device("cpu"), backend=backend)
        batch = SequenceBatch.of([[1, 0]], [*range(32, 64), *range(8)], [40], [40], torch.device("cpu"))
        assert cache.backend_of("write_kv", 0) == "reference"
        assert not cache.write(0, k, v, batch.slots).any()
        outs.append(cache.attend(0, q[:, : 2 * heads], batch, AttentionOptions(scale=0.125))[0])
    assert torch.allclose(*outs, atol=1e-4)
