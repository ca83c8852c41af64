"""Figures that people know, from the engine's own layout."""

import json

import pytest

import kvq
from kvq.capacity.lengths import Demand, Length, fixed, lognormal, read_trace
from kvq.capacity.plan.memory import count_users
from kvq.capacity.plan.target import find_model
from kvq.errors import ConfigError
from kvq.geometry import parse_geometry
from kvq.sizing.held import held_as
from kvq.sizing.memory import Split, kv_layout, split_geometry, weight_terms
from kvq.sizing.needs import bytes_of, sequence_blocks, wanted_blocks
from kvq.sizing.parameters import count_parameters
from kvq.sizing.pools import share_blocks

GB, GIB = 1e9, 2**30


def geometry(name, **changes):
    return parse_geometry({**find_model(name).config, **changes})


def kv(name, tokens, fmt="fp16", **changes):
    """Bytes of one sequence."""
    layout = kv_layout(geometry(name, **changes), fmt, block_size=16)
    return bytes_of(layout, sequence_blocks(layout, tokens, 1, step_tokens=2048))


def test_llama_2_70b():
    assert kv("llama-2-70b", 4096) / GB == pytest.approx(1.342, abs=5e-4)
    assert 32 * kv("llama-2-70b", 4096) / GB == pytest.approx(42.9, abs=0.05)
    assert kv("llama-2-70b", 32768) / GB == pytest.approx(10.7, abs=0.05)
    assert kv("llama-2-70b", 4096, num_key_value_heads=64) / GB == pytest.approx(10.74, abs=5e-3)


def test_llama_3_70b():
    assert kv("llama-3-70b", 16) == 16 * 320 * 1024
    assert kv("llama-3-70b", 131072) == 40 * GIB
    codes = kv_layout(geometry("llama-3-70b"), "fp8_per_head", block_size=16).kv_bytes_per_token
    assert codes == 160 * 1024  # the codes alone; a scale a row takes 1.6% more
    assert 50 * kv("llama-3-70b", 2048) == 31.25 * GIB


@pytest.mark.parametrize(("tokens", "gb"), [(512, 0.268), (2048, 1.07), (4096, 2.15), (8192, 4.29)])
def test_llama_2_7b(tokens, gb):
    assert kv("llama-2-7b", tokens) / GB == pytest.approx(gb, abs=5e-3)


def test_llama_2_13b():
    assert 64 * kv("llama-2-13b", 2048) / GB == pytest.approx(107.4, abs=0.05)


def users(name, free_gb, context, slot=None, kv="fp16"):
    layout = kv_layout(geometry(name), kv, block_size=16)
    blocks = share_blocks(layout, [10**9], round(free_gb * GB))
    demand = Demand(lengths=fixed(context), slot_tokens=slot or context)
    return count_users(layout, blocks, demand, step_tokens=2048)


def test_how_many_requests_fit():
    assert users("llama-2-7b", 80 - 3.5 - 3, 4096).paged == 34  # INT4 weights, 3 GB for all else
    assert users("llama-2-7b", 66, 1024, 4096).contiguous == 30
    assert users("llama-2-7b", 66, 1024, 4096).paged == 122
    for weights_gb, wanted in ((26, (15, 7, 3)), (6.5, (21, 10, 5))):
        found = tuple(users("llama-2-13b", 80 - weights_gb - 3, n).paged for n in (4096, 8192, 16384))
        assert found == wanted


@pytest.mark.parametrize(
    ("kv", "bits", "gpus"), [("fp16", 16, 143), ("int8_per_token_head", 8.125, 74), ("int4_g32_s8", 4.5, 41)]
)
def test_gpus_for_ten_thousand_users(kv, bits, gpus):
    """30% of them active, 13B with INT4 weights, 4K of context, A100-80 with 3 GB for all else."""
    free = 80 - 6.5 - 3
    held = users("llama-2-13b", free, 4096, kv=kv).paged
    assert held == free * GB // (4096 * 2 * 40 * 40 * 128 * bits / 8)
    assert -(-3000 // held) == gpus


@pytest.mark.parametrize(
    ("name", "weights_gb", "tokens"),
    [("llama-2-7b", 3.5, 6676), ("llama-2-13b", 26, 31738), ("llama-2-13b", 6.5, 7934)],
)
def test_where_kv_passes_the_weights(name, weights_gb, tokens):
    each = kv_layout(geometry(name), "fp16").kv_bytes_per_token
    assert weights_gb * GB / each == pytest.approx(tokens, abs=1)


def test_heads_that_do_not_go_around_are_held_by_several_gpus():
    whole = geometry("llama-3-8b")
    for tensor, heads in ((1, 8), (2, 4), (8, 1), (16, 1), (32, 1)):
        own = split_geometry(whole, Split(tensor=tensor))
        assert {layer.kv_heads for layer in own.layers} == {heads}
    assert len(split_geometry(whole, Split(pipeline=3)).layers) == 11
    with pytest.raises(ConfigError, match="can't be shared by 3"):
        split_geometry(whole, Split(tensor=3))
    with pytest.raises(ConfigError, match="33 pipeline stages for 32 layers"):
        split_geometry(whole, Split(pipeline=33))
    with pytest.raises(ConfigError, match="tensor parallel ranks"):
        Split(tensor=0)


def test_weights_by_format():
    model = find_model("llama-3-8b")
    parameters = count_parameters(model.config, parse_geometry(model.config))
    assert sum(t.nbytes for t in weight_terms(parameters, held_as(model.config))) == 2 * model.published
    narrow = {term.name: term.nbytes for term in weight_terms(parameters, held_as(model.config, "int4"))}
    assert narrow["linear weights"] == parameters.linear // 2
    assert narrow["weight scales"] == 2 * parameters.linear / 128
    assert sum(narrow.values()) < 0.36 * 2 * model.published  # the embeddings stay


def test_experts_are_held_as_they_are_stored():
    model = find_model("mixtral-8x7b")
    parameters = count_parameters(model.config, parse_geometry(model.config))
    terms = {term.name: term.nbytes for term in weight_terms(parameters, held_as(model.config, "int4"))}
    assert terms["expert weights"] == 2 * 32 * 8 * 3 * 4096 * 14336
    assert terms["expert weights"] > 0.9 * sum(terms.values())


def test_windows_bound_what_a_sequence_holds():
    layout = kv_layout(geometry("gemma-3-12b"), "fp16", block_size=32)
    short = sequence_blocks(layout, 100, 10, step_tokens=2048)
    long = sequence_blocks(layout, 100_000, 10, step_tokens=2048)
    assert short == [4, 4]
    assert long[0] == 3126
    assert long[1] == (1024 + 2048) // 32 + 1
    wanted = wanted_blocks(layout, sequences=2, max_context=100_000, step_tokens=2048)
    shared = share_blocks(layout, wanted, 10**10)
    assert 0.99e10 < bytes_of(layout, shared) <= 10**10
    assert shared[0] / wanted[0] == pytest.approx(shared[1] / wanted[1], rel=0.01)


def test_a_common_prefix_is_held_once():
    layout = kv_layout(geometry("llama-2-7b"), "fp16", block_size=16)
    counted = [
        count_users(
            layout, [1000], Demand(lengths=[Length(96, 32)], prefix_share=share), step_tokens=512
        ).paged
        for share in (0.0, 0.5)
    ]
    assert counted == [125, 199]  # 8 blocks each; 3 in common and 5 each
    with pytest.raises(ConfigError, match="prefix share"):
        Demand(lengths=[Length(1, 1)], slot_tokens=9, prefix_share=1)
    with pytest.raises(ConfigError, match="a slot of 9 tokens does not hold a request of 10"):
        Demand(lengths=[Length(5, 5)], slot_tokens=9)


def test_lengths(tmp_path):
    drawn = lognormal(1000, 0.8, most=4096)
    totals = sorted(length.total for length in drawn)
    assert totals[len(totals) // 2] == pytest.approx(1000, rel=0.01)
    assert totals[-1] == 4096
    assert all(length.prompt >= 1 and length.output >= 1 for length in drawn)
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 9, "output_tokens": 3, "other": 1}\n\n{"prompt_tokens": 1, "output_tokens": 0}\n'
    )
    assert read_trace(path) == [Length(9, 3), Length(1, 0)]
    for wrong in (
        "",
        "x",
        "[]",
        '{"prompt_tokens": 0, "output_tokens": 1}',
        '{"prompt_tokens": true, "output_tokens": 1}',
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"trace\.jsonl"):
            read_trace(path)
    for median, sigma in ((0, 1), (10, 0), (10, 9)):
        with pytest.raises(ConfigError, match="log-normal"):
            lognormal(median, sigma, most=100)


def test_latent_vectors_take_what_their_paper_says():
    plans = {
        ranks: kvq.plan("deepseek-v3", gpu="h200", kv="fp16", context=4096, split=Split(tensor=ranks))
        for ranks in (16, 32)
    }
    for plan in plans.values():  # every rank holds the whole vectors
        assert plan.kv_bytes_per_token == 61 * (512 + 64) * 2  # 68.6 KiB
        assert plan.users.paged == pytest.approx(plan.pool_bytes / (4096 * 61 * 576 * 2), rel=0.02)
    assert plans[32].users.paged > plans[16].users.paged, "more room beside the weights"


def test_a_folder_of_latent_attention_is_planned_in_latents(tmp_path):
    config = dict(find_model("deepseek-v3").config) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = kvq.plan(tmp_path, gpu="h200", kv="fp16", context=4096)
    assert plan.kv_bytes_per_token == 4 * 576 * 2


@pytest.mark.parametrize("kv", ["fp16", "int4_g32"])
def test_a_sequences_states_are_one_size_beside_what_grows(kv):
    short, long = (kvq.plan("qwen3-next-80b-a3b", gpu="h200", kv=kv, context=n, weights="int4",
                            split=Split(tensor=2)) for n in (1024, 32768))  # fmt: skip
    whole = find_model("qwen3-next-80b-a3b").geometry.state_bytes(2)
    assert short.state_bytes == long.state_bytes == whole / 2, "each rank has its share of the heads"
    for plan, tokens in ((short, 1024), (long, 32768)):
        assert plan.users.bytes_per_request == tokens * plan.kv_bytes_per_token + plan.state_bytes
        blocks, states = plan.num_blocks
        assert states >= plan.users.paged
        assert blocks >= plan.users.paged * tokens // 32
        assert blocks * 32 * plan.kv_bytes_per_token + states * plan.state_bytes == plan.pool_bytes
    assert short.users.paged > 2 * long.users.paged


def test_a_stage_of_a_hybrid_holds_the_states_and_layers_of_its_numbers():
    whole = find_model("qwen3.5-27b").geometry
    own = split_geometry(whole, Split(tensor=2, pipeline=4))
    assert [layer.number for layer in own.layers] == [3, 7, 11, 15]
    assert [layer.index for layer in own.layers] == [0, 1, 2, 3]
    assert len(own.states) == 12
    assert own.state_bytes(2) == whole.state_bytes(2) / 8
    latent = split_geometry(find_model("deepseek-v2-lite").geometry, Split(tensor=8, pipeline=3))
    assert [(x.kv_heads, x.elements_per_token) for x in latent.layers] == [(1, 576)] * 9
    shared = split_geometry(find_model("gemma-4-e2b").geometry, Split(pipeline=2))
    assert len(shared.layers) == 15, "the stage of the layers that store"
