"""`kvq plan`, `kvq models`, `kvq gpus` as people type them."""

import json
import re

import pytest

import kvq as library
from kvq.capacity.plan.gpus import find_gpu
from tests.helpers_models import save_model


def test_a_plan_as_a_table_and_as_json(kvq, tmp_path):
    path = tmp_path / "plan.json"
    status, out, _ = kvq(
        *(
            "plan",
            "--model",
            "llama-2-13b",
            "--gpu",
            "a100-80",
            "--kv",
            "fp16,int8_per_token_head,int4_g32_s8",
            "--context",
            "4096",
        ),
        *("--weights", "int4", "--users", "3000", "--json", str(path)),
    )
    assert status == 0
    for part in ("linear weights", "KV pool, fp16", "12,687,769,600 x 0.5 B (int4_g128)", "GPUs needed"):
        assert part in out
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv"] for row in rows] == ["fp16", "int8_per_token_head", "int4_g32_s8"]
    needed = [row["gpus_needed"] for row in rows]
    assert needed[0] > needed[1] > needed[2] > 0
    for row in rows:
        assert row["gpus_needed"] == -(-3000 // row["max_users"])
        assert sum(term["bytes"] for term in row["terms"]) == find_gpu("a100-80").memory_bytes, (
            "nothing unsaid"
        )
        assert row["pool_bytes"] == row["num_blocks"][0] * row["block_bytes"]


def test_lengths_may_be_distributions_and_models_folders(kvq, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 900, "output_tokens": 100}\n')
    status, _, _ = kvq("plan", "-m", "tiny", "--gpu", "l4,h100", "--trace", str(trace), "--weights-gb", "0.1")
    assert status == 0
    status, out, _ = kvq("plan", "-m", "gemma-3-4b", "--gpu", "l4", "--lognormal", "1000,0.9", "--kv", "k8v4")
    assert status == 0
    assert "sliding-1024" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "llama-3-70b", "--gpu", "h100", "--context", "8192"), "57.25 GB too much"),
        (("-m", "llama-3-70", "--gpu", "h100", "--context", "8192"), "did you mean 'llama-3-70b'"),
        (("-m", "llama-3-8b", "--gpu", "h10", "--context", "8192"), "did you mean 'h100'"),
        (("-m", "llama-3-8b", "--gpu", "h100"), "give one of --context, --lognormal, --trace"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "9999"), "above the model's context of 8,192"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "0"), "--context"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--lognormal", "9"), "MEDIAN,SIGMA"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--lognormal", "9,1", "--output", "3"), "goes with --context"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--weights-gb", "-1"), "above 0"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--runtime-gb", "-1"), "not in the range"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "--kv", "int7"), "int7"),
        (("-m", "llama-3-8b", "--gpu", "h100", "--context", "64", "-tp", "3"), "can't be shared by 3"),
    ],
)
def test_what_cannot_be_planned_says_why(kvq, arguments, message):
    status, _, err = kvq("plan", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_what_fits_is_shown_beside_what_does_not(kvq):
    status, out, err = kvq(
        "plan", "-m", "llama-2-13b", "--gpu", "l4,a100-80", "--context", "4096", "--kv", "int4"
    )
    assert status == 0
    assert "a100-80" in out
    assert "left out: llama-2-13b does not fit on 1 x l4" in err


def test_lists(kvq, tmp_path):
    status, out, _ = kvq("models", "--json", str(tmp_path / "m.json"))
    assert status == 0
    assert "llama-3.1-405b" in out
    assert len(json.loads((tmp_path / "m.json").read_text())["rows"]) >= 80
    status, out, _ = kvq("gpus", "--json", str(tmp_path / "g.json"))
    assert status == 0
    assert "mi300x" in out
    status, again, _ = kvq("gpus", "--gpus", str(tmp_path / "g.json"))
    assert (status, again) == (0, out)


def test_speed_comes_with_the_plan_where_the_weights_are_known(kvq, tmp_path):
    path = tmp_path / "plan.json"
    kvq("plan", "-m", "mixtral-8x7b", "--gpu", "h200", "--context", "4096", "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["max_users"] / row["itl_ms"])
        assert row["usd_per_million_tokens"] == pytest.approx(15 / 3600 / row["tokens_per_s"] * 1e6)
        assert row["ttft_ms"] > 0
    assert rows[-1]["tokens_per_s"] > rows[0]["tokens_per_s"]  # int4 beside fp16
    kvq(
        "plan",
        "-m",
        "mixtral-8x7b",
        "--gpu",
        "h200",
        "--context",
        "4096",
        "--weights-gb",
        "90",
        "--json",
        str(path),
    )
    assert json.loads(path.read_text())["rows"][0]["tokens_per_s"] is None


def test_costs(kvq, tmp_path):
    path = tmp_path / "cost.json"
    status, out, _ = kvq(
        *("cost", "--usd-per-hour", "8", "--num-gpus", "8", "--tokens-per-s", "3000", "--api-input", "5"),
        *("--api-output", "30", "--requests", "1000000", "--json", str(path)),
    )
    assert status == 0
    [row] = json.loads(path.read_text())["rows"]
    assert row["usd_per_million_tokens"] == pytest.approx(5.93, abs=5e-3)
    assert row["api_usd_per_month"] == pytest.approx(8500)
    assert row["break_even_requests"] == pytest.approx(row["usd_per_month"] / 0.0085)
    assert "the API is cheaper" in out
    status, out, _ = kvq("cost", "--gpu", "l40s", "--tokens-per-s", "500")
    assert status == 0
    assert "$2.00 / (500 tokens/s x 100% x 3,600 s)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --gpu"),
        (("--gpu", "h100"), "--tokens-per-s is needed"),
        (("--gpu", "h10", "--tokens-per-s", "1"), "did you mean 'h100'"),
        (("--api-input", "5"), "two prices"),
        (("--gpu", "h100", "--tokens-per-s", "-1"), "not in the range"),
        (("--gpu", "h100", "--tokens-per-s", "1", "--utilization", "2"), "not in the range"),
    ],
)
def test_costs_that_cannot_be_told_say_why(kvq, arguments, message):
    status, _, err = kvq("cost", *arguments)
    assert status == 2
    assert message in err


def test_engines_are_held_to_their_plan(kvq, tmp_path):
    path = tmp_path / "v.json"
    options = (
        "--model",
        "tiny",
        "--kv",
        "fp32,int4,int3+sinks=4+recent=128",
        "--kv-memory",
        "200MiB",
        "--max-num-seqs",
        "16",
    )
    status, out, _ = kvq("plan", *options, "--verify", "--json", str(path))
    assert status == 0, out
    rows = json.loads(path.read_text())["rows"]
    assert [row["kv"] for row in rows] == ["fp32", "int4", "int3+sinks=4+recent=128"]
    for row in rows:
        terms = {term["name"]: term for term in row["terms"]}
        assert terms["KV pool"]["planned_bytes"] == terms["KV pool"]["found_bytes"] <= 200 << 20
        parts = ("linear weights", "embeddings, head, norms", "KV pool")
        assert terms["in all"]["found_bytes"] > sum(terms[name]["found_bytes"] for name in parts)


_ONE_MB = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 2048}


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_every_term_of_models_with_windows_is_as_planned(kvq, tmp_path, family):
    path = tmp_path / "v.json"
    folder = save_model(tmp_path / family, family, **_ONE_MB)
    options = ("--kv", "int8", "--kv-memory", "256MiB", "--max-model-len", "1024")
    status, out, err = kvq("plan", "--model", folder, "--verify", *options, "--json", path)
    assert status == 0, err
    [row] = json.loads(path.read_text())["rows"]
    assert row["holds"]
    terms = {term["name"]: term for term in row["terms"]}
    assert {"linear weights", "embeddings, head, norms", "KV pool"} <= set(terms), out
    assert ("expert weights" in terms) == (family == "gpt_oss")
    for name, term in terms.items():
        if name != "in all":
            assert term["planned_bytes"] == pytest.approx(term["found_bytes"], rel=0.01), name


@pytest.mark.parametrize(("dtype", "scale_bytes"), [("fp32", 4), ("bf16", 2)])
def test_every_term_of_quantized_weights_is_as_planned(kvq, tmp_path, dtype, scale_bytes):
    path = tmp_path / "v.json"
    library.quantize("tiny", tmp_path / "q", "rtn", bits=4, group_size=64, dtype=dtype)
    pool = ("--kv-memory", "256MiB")
    status, _, err = kvq("plan", "--model", tmp_path / "q", "--verify", "--kv", "int4", *pool, "--json", path)
    assert status == 0, err
    [row] = json.loads(path.read_text())["rows"]
    terms = {term["name"]: term for term in row["terms"][:-1]}
    assert terms["linear weights"]["found_bytes"] == 4_718_592 / 2, "half a byte a weight"
    assert terms["weight scales"]["found_bytes"] == 4_718_592 / 64 * scale_bytes
    for name in ("linear weights", "weight scales", "embeddings, head, norms", "KV pool"):
        assert terms[name]["planned_bytes"] == pytest.approx(terms[name]["found_bytes"], rel=0.01), name


def test_memory_off_the_plan_is_an_exit_code(kvq, monkeypatch):
    from kvq.engine.steps import reconcile

    found = reconcile.found_weights
    more = {reconcile.KEPT_TERM: 100_000}  # under 3% of the whole, and 4.7% of its term
    monkeypatch.setattr(
        reconcile,
        "found_weights",
        lambda model: {name: n + more.get(name, 0) for name, n in found(model).items()},
    )
    status, out, err = kvq("plan", "--model", "tiny", "--kv", "int4", "--kv-memory", "8MiB", "--verify")
    assert status == 1
    assert "embeddings, head, norms" in err
    assert "more than 1%" in err
    assert "2.21 MB" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--verify", "--gpu", "h100"), "leave out --gpu"),
        (("--context", "10"), "give --gpu"),
        (("--gpu", "h100", "--context", "10", "--kv-memory", "1GiB"), "goes with --verify"),
        (("--verify", "--kv-memory", "lots"), "must be a size"),
    ],
)
def test_verify_and_gpus_do_not_mix(kvq, options, said):
    status, _, err = kvq("plan", "--model", "tiny", *options)
    assert status == 2
    assert said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", "8192", "--users", "5", "--active", "nan"), "not a finite number"),
        (("--context", "8192", "--max-model-len", "100"), "below a request"),
        (("--context", "8192", "--gpu", "a10", "--runtime-gb", "7.2"), "not one request of up to 8,192"),
        (("--lognormal", "100,-1"), "sigma"),
    ],
)
def test_plans_that_hold_nobody_say_so(kvq, options, said):
    status, out, err = kvq("plan", "--model", "llama-3-8b", "--gpu", "h100", "--kv", "fp16", *options)
    assert (status, out) == (2, "")
    assert said in err


def test_a_trace_beyond_the_context_is_no_plan(kvq, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 1000000, "output_tokens": 1}')
    status, _, err = kvq("plan", "--model", "llama-3-8b", "--gpu", "h100", "--trace", str(path))
    assert status == 2
    assert "above the model's context of 8,192" in err


def test_gpus_of_ones_own_keep_their_names(kvq, tmp_path):
    path = tmp_path / "g.json"
    gpu = {"memory_gb": 99, "bandwidth_tb_s": 2, "usd_per_hour": 1, "tflops": {"fp16": 50}}
    path.write_text(json.dumps({"format_version": 1, "gpus": {"My GPU": gpu}}))
    for name in ("My GPU", "my gpu"):
        status, out, _ = kvq(
            *("plan", "--model", "llama-3-8b", "--gpu", name, "--gpus", str(path), "--context", "100")
        )
        assert status == 0
        assert "My GPU" in out


def test_costs_count_operations_and_what_gpus_can_serve(kvq, tmp_path):
    path = tmp_path / "c.json"
    options = (
        "--usd-per-hour",
        "10",
        "--tokens-per-s",
        "1000",
        "--operations-usd",
        "7200",
        "--output",
        "200",
    )
    prices = ("--api-input", "5", "--api-output", "30", "--requests", "1e9")
    status, out, _ = kvq("cost", *options, *prices, "--json", str(path))
    assert status == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["usd_per_million_tokens_with_operations"] == pytest.approx(2 * row["usd_per_million_tokens"])
    assert "take 78 times as many" in out


def test_a_rate_tells_how_busy_gpus_are(kvq, tmp_path):
    path = tmp_path / "p.json"
    options = (
        "--model",
        "llama-3-8b",
        "--gpu",
        "h100",
        "--kv",
        "int4",
        "--context",
        "2048",
        "--json",
        str(path),
    )
    for rate, there in ((1.0, True), (1e4, False)):
        status, out, _ = kvq("plan", *options, "--rate", str(rate))
        assert status == 0
        assert ("too many" not in out) == there
        (row,) = json.loads(path.read_text())["rows"]
        assert row["utilization"] == pytest.approx(rate / row["requests_per_s"])
        assert row["rate_gpus"] == -(-rate // row["requests_per_s"])
        assert (row["in_flight"] is not None) == there
    status, _, err = kvq("plan", *options, "--rate", "1", "--weights-gb", "16")
    assert status == 2
    assert "leave --weights-gb out" in err


def test_vllm_is_planned_with_its_own_defaults(kvq, tmp_path):
    path = tmp_path / "plan.json"
    model = ("plan", "--engine", "vllm", "-m", "llama-3-70b", "-tp", "4", "--context", "4096")
    status, out, err = kvq(*model, "--gpu", "h100,l40s", "--kv", "bf16,int4,fp32", "--json", str(path))
    assert status == 0, err
    assert "left out: vLLM keeps its own cache in the model's type" in err
    assert "maximum concurrency" in out
    assert "h100, int4: vllm serve DIR --kv-cache-dtype kvq_int4 --tensor-parallel-size 4\n" in out
    assert "h100, bf16: vllm serve DIR --dtype bfloat16 --tensor-parallel-size 4\n" in out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["gpu"], row["kv"], row["engine"]) for row in rows][:2] == [
        ("h100", "bf16", "vllm"),
        ("h100", "int4", "vllm"),
    ]
    for row in rows:
        assert row["num_blocks"] == [row["num_gpu_blocks"]]
        assert row["pool_bytes"] == row["num_gpu_blocks"] * row["block_bytes"]
        assert row["kv_cache_tokens"] == 16 * row["num_gpu_blocks"]
        assert row["max_concurrency"] == pytest.approx(row["kv_cache_tokens"] / row["max_model_len"])
        assert row["max_model_len"] == 8192
    assert rows[1]["num_gpu_blocks"] > 3.4 * rows[0]["num_gpu_blocks"]


def test_vllm_is_told_what_the_plan_was_given(kvq, tmp_path):
    given = ("--block-size", "32", "--gpu-memory-utilization", "0.9", "--max-num-batched-tokens", "2048")
    more = ("--max-model-len", "4096", "--max-num-seqs", "32", "--kv-memory", "8GiB", "--weights", "int4")
    path = tmp_path / "plan.json"
    model = ("plan", "--engine", "vllm", "-m", "llama-3-8b", "--context", "4096", "--gpu", "h100")
    status, out, err = kvq(*model, "--kv", "int4", *given, *more, "--json", str(path))
    assert status == 0, err
    [row] = json.loads(path.read_text())["rows"]
    assert row["serve"] == (
        "vllm serve DIR --kv-cache-dtype kvq_int4 --block-size 32 --max-model-len 4096 --max-num-seqs 32 "
        "--max-num-batched-tokens 2048 --gpu-memory-utilization 0.9 --kv-cache-memory-bytes 8589934592"
    )
    assert "vLLM rounds no weights to int4: DIR is a checkpoint" in out
    assert row["num_gpu_blocks"] == (8 << 30) // row["block_bytes"]
    assert row["max_users"] == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "vllm", "--verify"), "--verify starts kvq's engine"),
        (("--kv-memory", "1GiB", "--gpu", "h100"), "--kv-memory goes with --verify or --engine vllm"),
        (("--engine", "vlm", "--gpu", "h100"), "vlm"),
        (("--engine", "vllm", "--gpu", "l4", "--kv", "bf16", "--kv-memory", "1GiB"), "one request of 8,192"),
    ],
)
def test_engines_that_cannot_be_planned_so_say_why(kvq, options, message):
    status, _, err = kvq("plan", "-m", "llama-3-8b", "--context", "512", "--weights", "int4", *options)
    assert status == 2
    assert message in err


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 1024,
    "num_hidden_layers": 4, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def plan_of(kvq, tmp_path, config, *options):
    """The first row, and all that is said."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "rows.json"
    status, said, err = kvq(
        *("plan", "-m", str(tmp_path), "--gpu", "h100", "--context", "4096", "--json", str(out), *options)
    )
    assert status == 0, err
    return json.loads(out.read_text())["rows"][0], " ".join((said + err).split())


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        (
            {"quantization_config": {"quant_method": "hqq"}},
            (),
            "are of quant_method 'hqq', which kvq does not load",
        ),
        ({"quantization_config": INT4 | {"bits": 2}}, (), "bits must be 8 or 4 or 3, got 2"),
        ({"quantization_config": INT4}, ("--weights", "int8"), "its weights are quantized already"),
        ({"auto_map": {"AutoModel": "x.Y"}}, (), "it has auto_map"),
        ({"alibi": True}, (), "ALiBi"),
        ({"is_causal": False}, (), "not causal"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, (), "pin them with --max-model-len"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, (), "did you mean 'yarn'"),
    ],
)
def test_what_serve_refuses_a_plan_says(kvq, tmp_path, changes, options, says):
    row, said = plan_of(kvq, tmp_path, LLAMA | changes, *options)
    assert re.search(says, row["refused"])
    assert row["serve"] is None
    assert "kvq does not run" in said


def test_what_serve_takes_has_its_command_line(kvq, tmp_path):
    for config, options in (
        (LLAMA, ()),
        (LLAMA, ("--weights", "int4")),
        (LLAMA | {"quantization_config": INT4}, ()),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("--max-model-len", "8192")),
    ):
        row, _ = plan_of(kvq, tmp_path, config, *options)
        assert row["refused"] is None
        assert row["serve"].startswith("kvq serve ")


@pytest.mark.parametrize("engine", ["kvq", "vllm"])
def test_a_method_that_nobody_knows_is_named_and_counted_in_the_models_type(kvq, tmp_path, engine):
    plain, _ = plan_of(kvq, tmp_path, LLAMA, "--engine", engine)
    own = LLAMA | {"quantization_config": {"quant_method": "exotic", "bits": 4}}
    row, said = plan_of(kvq, tmp_path, own, "--engine", engine)
    assert row["weights_bytes"] == plain["weights_bytes"]
    assert "quant_method 'exotic'" in said
    assert "--weights names the nearest format, such as int4" in said
    advised, _ = plan_of(kvq, tmp_path, own, "--engine", engine, "--weights", "int4")
    assert advised["weights_bytes"] < 0.65 * plain["weights_bytes"]  # half of it are embeddings


def test_what_modelopt_says_in_a_file_of_its_own_counts(kvq, tmp_path):
    plain, _ = plan_of(kvq, tmp_path, LLAMA)
    said = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    row, _ = plan_of(kvq, tmp_path, LLAMA)
    linear = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    assert plain["weights_bytes"] - row["weights_bytes"] == pytest.approx(linear, rel=0.01)
    assert "'modelopt', which kvq does not load" in row["refused"]
    (tmp_path / "hf_quant_config.json").write_text("{")
    row, told = plan_of(kvq, tmp_path, LLAMA)
    assert "quant_method 'modelopt'" in told


def test_experts_stay_packed_in_vllm_and_where_kvq_does_not_load_them(kvq, tmp_path):
    sizes = {
        (name, engine): plan_of(kvq, tmp_path, config, "--engine", engine)[0]["weights_bytes"]
        for name, config in (
            ("plain", EXPERTS),
            ("gptq", EXPERTS | {"quantization_config": INT4}),
            ("fp8", EXPERTS | {"quantization_config": {"quant_method": "fp8"}}),
        )
        for engine in ("kvq", "vllm")
    }
    experts = 4 * 8 * 3 * 1024 * 4096
    assert sizes["plain", "kvq"] == sizes["plain", "vllm"] > 2 * experts
    assert sizes["gptq", "kvq"] > 2 * experts, "kvq's engine has them in 16 bits on GPUs"
    assert sizes["gptq", "vllm"] < experts
    assert sizes["fp8", "kvq"] == sizes["fp8", "vllm"] < 2 * experts


def test_formats_begin_with_the_models_own_type(kvq, tmp_path):
    for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        row, _ = plan_of(kvq, tmp_path, LLAMA | {"dtype": dtype})
        assert row["kv"] == name


def test_help_names_both_forms_of_traces(kvq):
    _, said, _ = kvq("plan", "--help")
    trace = said.partition("--trace")[2].partition("--prefix-share")[0]
    assert "JSON lines" in trace
    assert "CSV" in trace
