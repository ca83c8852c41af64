"""`/metrics` of a real server, as Prometheus and people's dashboards read it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvq.bench.serve.process import free_port
from tests.deploy.files import FOLDER, all_names, rule_expressions
from tests.server.kit import Server
from tests.waiting import HANG_S, wait_for

KEYS = ("clients-key-3141", "metrics-key-5926")
TOKENS = 24
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info prompt_tokens_total
    prompt_tokens_cached_total generation_tokens_total num_preemptions_total prefix_cache_queries_total
    prefix_cache_hits_total request_success_total time_to_first_token_seconds_bucket
    inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
    request_prefill_time_seconds_bucket request_decode_time_seconds_bucket kv_block_lifetime_seconds_bucket
    kv_block_idle_before_evict_seconds_bucket kv_block_reuse_gap_seconds_bucket"""
LLM = """requests_total tokens_generated_total ttft_seconds_bucket request_latency_seconds_bucket
    active_requests queue_depth kv_cache_utilization"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def server(folder):
    keys = folder / "keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    options = ("--kv", "k8v4", "--num-blocks", "12", "--max-num-seqs", "4", "--api-key-file", str(keys))
    with Server(*options, "--metrics-names", "vllm,llm", key=KEYS[0]) as running:
        for city in (
            "Rome",
            "Oslo",
            "Rome",
            "Bern",
            "Lima",
        ):  # the third finds the first one's, later ones evict
            generate(running, f"The long history of the city of {city}. " * 9)
        yield running


def generate(server, prompt, **options):
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **options}
    return ask(server, "/v1/completions", json.dumps(body).encode())


def ask(server, path, data=None):
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return answer.read().decode()


def samples(server):
    """{(name, labels): value}."""
    families = text_string_to_metric_families(ask(server, "/metrics"))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def test_everything_that_deploy_asks_for_is_there(server):
    assert all_names() <= {name for name, _ in samples(server)}


def test_numbers_are_those_of_the_requests(server):
    before = samples(server)
    sizes = json.loads(generate(server, "The long history of the city of Lima. " * 9, n=2))["usage"]
    after = samples(server)

    def grown(name, **labels):
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("kvq_itl_seconds_count") == TOKENS - 1
    assert (
        grown("kvq_request_prompt_tokens_sum") == grown("kvq_prompt_tokens_total") == sizes["prompt_tokens"]
    )
    assert grown("kvq_request_generated_tokens_sum") == sizes["completion_tokens"] == 2 * TOKENS
    cached = sizes["prompt_tokens_details"]["cached_tokens"]
    assert grown("kvq_prompt_tokens_cached_total") == cached > 0
    assert grown("kvq_request_prefix_hit_ratio_sum") == pytest.approx(cached / sizes["prompt_tokens"])
    parts = sum(grown(f"kvq_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(grown("kvq_request_latency_seconds_sum"))
    assert grown("kvq_block_reuse_gap_seconds_count") > 0
    for name in ("lifetime", "idle_before_evict"):
        assert value(after, f"kvq_block_{name}_seconds_count") == value(after, "kvq_evictions_total") > 0
    kv = "int8_per_channel/int4_g32_s8_rot"
    [info] = [dict(labels) for name, labels in after if name == "kvq_engine_info"]
    assert (info["model"], info["kv"], info["max_num_seqs"]) == ("tiny", f"{kv},bf16", "4")
    held = sum(value(after, "kvq_kv_bytes", kv=kv, state=state) for state in ("free", "cached", "live"))
    assert held == value(after, "kvq_pool_bytes", group="0", kv=kv) > 0
    assert value(after, "kvq_engine_memory_bytes", device="host") > held


def test_the_inference_extensions_picker_finds_what_it_reads(server):
    """Gauges by the names of its model server protocol, 003; what it reads of LoRA only adapters have."""
    text = ask(server, "/metrics")
    gauges = {
        family.name: family for family in text_string_to_metric_families(text) if family.type == "gauge"
    }
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        [sample] = gauges[f"vllm:{name}"].samples
        assert sample.value >= 0
        assert sample.labels == {"model_name": "tiny", "engine": "0"}
    [config] = gauges["vllm:cache_config_info"].samples
    assert config.value == 1
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("32", "12")


def test_other_dashboards_find_their_names(server):
    found = samples(server)
    names = {name for name, _ in found}
    assert {f"vllm:{name}" for name in VLLM.split()} | {f"llm_{name}" for name in LLM.split()} <= names
    labels = {"model_name": "tiny", "engine": "0"}
    assert all(labels.items() <= dict(pairs).items() for name, pairs in found if name.startswith("vllm:"))
    results = value(found, "vllm:request_success_total", finished_reason="length", **labels)
    assert results >= value(found, "kvq_requests_total", status="success") > 0
    assert value(found, "llm_requests_total", model="tiny", status="success") > 0
    for name, bounds in (
        ("llm_ttft_seconds", "0.1 0.2 0.5 1.0 2.0 5.0 10.0 +Inf"),
        ("llm_request_latency_seconds", "0.5 1.0 2.0 5.0 10.0 30.0 60.0 +Inf"),
    ):
        assert [dict(labels)["le"] for key, labels in found if key == f"{name}_bucket"] == bounds.split()
    for ours, theirs in (
        ("kvq_tokens_generated_total", "vllm:generation_tokens_total"),
        ("kvq_itl_seconds_count", "vllm:inter_token_latency_seconds_count"),
        ("kvq_block_lifetime_seconds_sum", "vllm:kv_block_lifetime_seconds_sum"),
    ):
        assert value(found, ours) == value(found, theirs, **labels)


def test_clients_cannot_make_new_series_or_see_keys(server):
    before = set(samples(server))
    generate(server, "A city", user="somebody", temperature=0.7, seed=9)
    for path in ("/nothing", "/v1/models/other"):
        assert server.status(path) == 404
    assert set(samples(server)) == before
    text = ask(server, "/metrics")
    assert not any(key in text for key in KEYS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_has_nothing_against_the_names(server):
    text = ask(server, "/metrics")
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=HANG_S
    )
    said = (found.stdout + found.stderr).splitlines()
    assert all(line.startswith("vllm:") and "should not contain ':'" in line for line in said), said


def test_the_containers_probe_asks_with_a_key(server, folder):
    def status(*arguments):
        command = [sys.executable, "-I", str(FOLDER / "probe.py"), *arguments]
        env = os.environ | {"KVQ_PROBE_URL": server.url}
        return subprocess.run(command, capture_output=True, timeout=HANG_S, env=env).returncode

    commented = folder / "commented"
    commented.write_text("# of production\n\n" + (folder / "keys").read_text())
    assert status("/health/ready", str(commented)) == 0
    wrong = folder / "wrong"
    wrong.write_text("no-key\n")
    assert status("/health/ready", str(wrong)) == 1


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_prometheus_scrapes_with_a_key_and_evaluates_the_rules(server, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEYS[1])
    for file in ("rules.yml", "alerts.yml"):
        shutil.copy(FOLDER / "prometheus" / file, tmp_path)
    text = (FOLDER / "prometheus/prometheus.yml").read_text(encoding="utf8")
    for old, new in (
        ("/run/secrets/metrics_key", str(key)),
        ("kvq:8000", f"127.0.0.1:{server.port}"),
        ("scrape_interval: 5s", "scrape_interval: 300ms"),
        ("evaluation_interval: 15s", "evaluation_interval: 300ms"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "prometheus.yml").write_text(text)
    at = f"127.0.0.1:{free_port()}"
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [
            "prometheus",
            "--config.file=prometheus.yml",
            f"--web.listen-address={at}",
            "--storage.tsdb.path=data",
        ],
        cwd=tmp_path,
        stderr=log,
    )
    try:
        assert until_found(at, 'up{job="kvq"}') == 1
        assert until_found(at, "kvq:blocks_live:ratio") == 0
        assert until_found(at, "kvq_tokens_generated_total") >= 5 * TOKENS
        rules = [rule for group in get(at, "rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == set(rule_expressions())
        assert all(rule["health"] in ("ok", "unknown") for rule in rules)  # unknown: not evaluated yet
    finally:
        process.terminate()
        process.wait(HANG_S)
        log.close()


def get(at, path, **query):
    url = f"http://{at}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        return json.loads(answer.read())["data"]


def until_found(at, query):
    """The value of a query that has one series, as soon as there is any."""

    def result():
        try:
            return get(at, "query", query=query)["result"]
        except OSError:  # it is starting
            return []

    return float(wait_for(result, query)[0]["value"][1])


def test_what_clients_do_wrong_is_not_counted_as_the_servers_failure(server):
    before = samples(server)
    for wrong in (
        {"max_tokens": 100_000},
        {"guided_regex": "(("},
        {"prompt": ["a", ""]},
        {"prompt": 7},
        {"temperature": "hot"},
        {"model": "other"},
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server, "/v1/completions", json.dumps({"prompt": "The city"} | wrong).encode())
        assert refused.value.code == (404 if "model" in wrong else 400)
    after = samples(server)

    def grown(status):
        return value(after, "kvq_requests_total", status=status) - value(
            before, "kvq_requests_total", status=status
        )

    assert (grown("invalid"), grown("error"), grown("refused")) == (6, 0, 0)


@pytest.mark.long
def test_counters_go_on_when_the_engine_is_started_again(server):
    before = samples(server)
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_for(lambda: server.status("/health/ready") != 200, "the engine's end")
    down = samples(server)
    assert value(down, "kvq_engine_ready") == 0
    assert value(down, "kvq_tokens_generated_total") == value(before, "kvq_tokens_generated_total")
    assert not [name for name, _ in down if name == "kvq_queue_depth"]  # nobody knows
    server.wait_ready()
    generate(server, "The city")
    after = samples(server)
    assert value(after, "kvq_engine_restarts_total") == value(before, "kvq_engine_restarts_total") + 1
    name = "kvq_tokens_generated_total"
    assert value(after, name) == value(before, name) + TOKENS
    counters = [key for key in before if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert all(after[key] >= before[key] for key in counters)
