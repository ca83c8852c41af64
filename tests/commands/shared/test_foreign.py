"""Options of other engines: each becomes one of kvq's own in so many words, or is answered by name."""

import json
import os
from pathlib import Path

import click
import pytest

from kvq.commands.chat.chat import command as chat
from kvq.commands.shared import foreign
from kvq.commands.shared.foreign import translated
from kvq.commands.use.generate import command as generate
from kvq.commands.use.run_batch import command as run_batch
from kvq.commands.use.serve import command as serve
from kvq.errors import ConfigError

TABLE = json.loads(Path(foreign.__file__).with_name("foreign.json").read_text())
LINES = [
    *("--kv-cache-dtype fp8", "--tool-call-parser hermes", "--gpu-memory-utilization 0.8", "--dtype float16"),
    *("--tensor-parallel-size 1", "--tensor-parallel-size 2", "--pipeline-parallel-size 1"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enable-chunked-prefill", "--api-key k"),
    *("--trust-remote-code", "--swap-space 4", "--served-model-name a b", "--seed 0", "--enforce-eager"),
    *("--enable-auto-tool-choice", "--tokenizer x", "--enable-lora", "--root-path /x", "--quantization awq"),
    *("--uvicorn-log-level info", "--disable-log-requests", "--default-chat-template-kwargs {}"),
    *("-ctk q8_0 -ctv q4_0", "-c 4096", "-ngl 99", "-np 4", "-t 8", "--threads 8", "--jinja", "-fa on"),
    *("--parallel 4", "--alias foo", "-hf NAME", "--n-gpu-layers 9", "--ctx-size 4096", "--embedding"),
    *("--cache-type-k q8_0", "--lora x", "--slots", "--no-webui", "--cache-ram 100", "--tp 2"),
    *("--quant-policy 8", "--cache-max-entry-count 0.5", "--session-len 4096", "--server-port 23333"),
    # Others of these programs
    *(
        "-fa",
        "-mg 0",
        "-ub 512",
        "--temp 0.7",
        "--data-parallel-size 2",
        "-O3",
        "--compilation-config.mode 3",
    ),
    *("--mem-fraction-static 0.8", "--max-running-requests 8", "--model-path tiny", "--host 127.0.0.1"),
    *("--lora-modules a=b c=d", "--adapters x y", "--api-keys k1 k2", "--chat-template-kwargs={}", "--mlock"),
    *("--max_model_len 4k", "--dtype half", "--max-model-len auto", "--load-format gguf", "--seed=-1"),
    # llama-server and llama-cli
    *(
        "-b 2048",
        "-n 128",
        "-p Hello",
        "--no-mmap",
        "--metrics",
        "-md tiny-draft",
        "-sys Hi",
        "-cnv",
        "-lm mmap",
    ),
    *("--threads -1", "-tb 8", "--chat-template {{x}}", "-ctk f16 -ctv iq4_nl", "--device none", "-lm mmap"),
    *("--temp 0.7", "--top-p 0.9", "-fitt 512", "--log-colors on", "--skip-chat-parsing", "--spec-type none"),
]


@pytest.fixture
def config(kvq, monkeypatch):
    """What a server would be started with: its configuration, and what was said on standard error."""
    seen = []
    monkeypatch.setattr("kvq.server.run.serve", seen.append)

    def start(*words):
        status, _, err = kvq("serve", *words)
        assert status == 0, err
        return seen[-1], err

    return start


@pytest.mark.parametrize("line", LINES)
def test_each_is_taken_with_a_word_or_refused_by_name(kvq, monkeypatch, line):
    monkeypatch.setattr("kvq.server.run.serve", lambda config: None)
    status, out, err = kvq("serve", *line.split())
    name = line.split()[0].partition("=")[0]
    assert out == ""
    assert "No such option" not in err
    assert "did you mean" not in err
    if status == 2:
        assert f"\n  {name}" in err.split("options that kvq does not have:")[1]
    else:
        assert status == 0, err


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["names"][0])
@pytest.mark.parametrize("command", [serve, run_batch, generate, chat], ids=lambda command: command.name)
def test_all_of_the_table_take_their_own_values_and_no_others(command, entry, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which one of them sets
    takes = entry.get("takes", 0)
    own = {name for one in command.params if isinstance(one, click.Option) for name in one.opts}
    several = takes == "many" and command is serve
    for name in entry["names"]:
        values = ["1", "2"][: 1 + several] if takes in ("many", 1) else takes[:1] if takes else []
        behind = ["--revision", "./model"]
        words, refused = [], ""
        try:
            words = translated(command, [name, *values, *behind])
        except ConfigError as error:
            refused = str(error)
        if refused:
            assert f"\n  {name}" in refused
            continue
        assert words[-2:] == behind
        assert all(word in own for word in words if word.startswith("-"))
        if name not in own or len(values) > 1:
            assert f"kvq: {name}" in capsys.readouterr().err


def test_the_table_says_something_of_each_and_names_none_twice():
    names = [name for entry in TABLE for name in entry["names"]]
    assert len(names) == len(set(names))
    fields = {"names", "takes", "values", "as", "beside", "always", "instead", "secret", "commas"}
    fields.add("sets")
    own = {name for one in (*serve.params, *generate.params, *chat.params) for name in one.opts}
    for entry in TABLE:
        assert entry.keys() <= fields
        assert entry.keys() & {"as", "always", "instead", "values"}
        for words in (entry.get("as", ""), *entry.get("values", {}).values()):
            assert words == "" or words.split()[0] in own
        if "" in entry.get("values", {}).values():
            assert entry["always"]


def test_what_can_be_mapped_is_mapped(config):
    made, err = config(
        *("tiny", "-c", "4096", "-np", "4", "-ngl", "99"),
        *(
            "--swap-space",
            "4",
            "--cache-max-entry-count",
            "0.5",
            "--server-port",
            "23333",
            "--quant-policy",
            "8",
        ),
        *("--alias", "a,b", "--dtype", "half", "--quantization", "awq", "--max_num_batched_tokens=1k"),
    )
    assert made.model == "tiny"
    assert (made.port, made.kv, made.served_model_name) == (23333, "int8_per_token_head", ("a", "b"))
    assert {
        name: made.engine[name] for name in ("max_context", "max_num_seqs", "max_num_batched_tokens")
    } == {
        "max_context": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
    }
    assert (made.engine["kv_host"], made.engine["memory_fraction"]) == ("4GiB", 0.5)
    assert (made.engine["dtype"], made.engine["weights"]) == ("fp16", "auto")
    assert "kvq: -c 4096: taken as --max-model-len 4096" in err
    assert "kvq: --dtype half: taken as --dtype fp16" in err
    assert "--max" not in err.replace("--max-model-len 4096", "").replace("--max-num-seqs 4", "")


def test_short_names_are_never_read_letter_by_letter(config):
    made, _ = config("-mg", "0")  # not -m g
    assert (made.model, made.engine["device"]) == ("tiny", "cuda:0")
    made, _ = config("-ngl", "0")
    assert made.engine["device"] == "cpu"


def test_all_that_is_refused_is_told_at_once_and_nothing_starts(kvq):
    status, _, err = kvq("serve", "./nowhere", "--lora", "x", "--seed", "0", "--tp", "2", "-c", "8")
    assert status == 2
    assert [line.split(":")[0] for line in err.splitlines() if line.startswith("  ")] == [
        *("  --lora x", "  --seed 0", "  --tp 2")
    ]


def test_names_with_blanks_between_are_names_and_a_path_behind_them_is_the_model(config, tmp_path):
    assert config("tiny", "--served-model-name", "a", "b")[0].served_model_name == ("a", "b")
    assert config("--served-model-name", "a", "org/b")[0].model == "org/b"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    made, err = config("--served-model-name", "a", "b", tmp_path / "m")
    assert (made.served_model_name, made.model) == (("a", "b"), str(tmp_path / "m"))
    assert "kvq: --served-model-name a b: taken as --served-model-name a --served-model-name b" in err
    made, err = config("--served-model-name=a", "--served-model-name", "b")
    assert (made.served_model_name, err) == (("a", "b"), "")


def test_a_batch_keeps_its_files_behind_a_name(tmp_path):
    requests = tmp_path / "in.jsonl"
    requests.write_text("")
    words = ["--served-model-name", "a", str(requests), str(tmp_path / "out.jsonl")]
    assert translated(run_batch, words) == words


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--api-keys", "secret1", "secret2"], ("secret1", "secret2")),
        (["--api-key", "secret1,s2"], ("secret1", "s2")),
    ],
)
def test_keys_are_never_shown(config, words, keys):
    made, err = config(*words)
    assert made.access.api_keys == keys
    assert "secret1" not in err


def test_keys_of_the_environment_and_of_a_file_count_together(config, tmp_path, monkeypatch, kvq):
    assert config()[0].access.api_keys == ()
    monkeypatch.setenv("KVQ_API_KEY", "one two")
    assert config("--host", "0.0.0.0")[0].access.api_keys == ("one", "two")
    path = tmp_path / "keys"
    path.write_text("three\none\n")
    path.chmod(0o600)
    assert config("--api-key-file", path)[0].access.api_keys == ("three", "one", "two")
    assert config("--api-key", "four")[0].access.api_keys == ("four", "one", "two")
    assert config("--api-key", "two")[0].access.api_keys == ("two", "one")
    monkeypatch.setenv("KVQ_API_KEY", " ")
    status, _, err = kvq("serve", "--host", "0.0.0.0")
    assert (status, "KVQ_API_KEY" in err) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "4096", "--max-model-len", "2048"),
        ("--max-model-len=2048", "-c", "4096"),
        ("--ctx-size", "2k", "--context-length", "4k"),
        ("--parallel", "2", "--max-num-seqs", "3"),
    ],
)
def test_one_option_under_two_names_is_refused(kvq, words):
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    status, _, err = kvq("serve", *words)
    assert (status, f"{names[0]} and {names[1]} are one option; give it once" in err) == (2, True), err


def test_what_is_taken_does_not_count_as_what_kvq_does_anyway(config):
    for words, limit in ((("-np", "4"), "--max-num-seqs 4"), (("--swap-space", "4"), "--kv-host 4GiB")):
        assert config(*words)[1] == f"kvq: {' '.join(words)}: taken as {limit}\n"
    assert "anyway" in config("--swap-space", "0")[1]


def test_options_that_are_gone_say_what_to_give_instead(kvq):
    status, _, err = kvq("serve", "tiny", "--swap-memory", "4GiB", "--swap-folder", "/tmp/kv")
    assert status == 2
    assert "--swap-memory 4GiB: --kv-host, such as 8GiB, keeps what preempted requests lose" in err
    assert "--swap-folder /tmp/kv: --kv-disk, such as 100GiB, and --kv-dir FOLDER keep what leaves" in err


def test_a_file_of_options_may_have_those_of_others(config, kvq, tmp_path):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "max_model_len: 2048\nswap-space: 2\nenforce-eager: true\ntensor-parallel-size: 1\nalias: a,b\n"
        "max-running-requests: 7\nenable-prefix-caching: true\n"
    )
    made, err = config("--config", path)
    assert made.engine["max_context"] == 2048
    assert made.engine["max_num_seqs"] == 7
    assert made.served_model_name == ("a", "b")
    assert "--swap-space 2: taken as --kv-host 2GiB" in err
    for keys in (
        ("max-model-len", "ctx-size"),
        ("context-length", "max_model_len"),
        ("ctx-size", "session-len"),
    ):
        path.write_text("".join(f"{key}: 2048\n" for key in keys))
        status, _, err = kvq("serve", "--config", path)
        assert (status, f"{keys[0]} and {keys[1]} are one option; give it once" in err) == (2, True), err
    path.write_text("tensor-parallel-size: 2\n")
    status, _, err = kvq("serve", "--config", path)
    assert (status, "\n  --tensor-parallel-size 2: " in err) == (2, True)


def test_a_name_that_is_empty_is_refused(kvq):
    status, _, err = kvq("serve", "--served-model-name", "")
    assert (status, "--served-model-name is empty" in err) == (2, True)


def test_a_template_is_read_from_its_file_or_taken_as_it_is(config, kvq, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}")
    assert config("--chat-template-file", path)[0].chat_template == "{{ messages[0].content }}"
    assert config("--chat-template", "{% if x %}{% endif %}")[0].chat_template == "{% if x %}{% endif %}"
    assert config()[0].chat_template is None
    status, _, err = kvq("serve", "--chat-template", tmp_path / "none")
    assert (status, f"can't read {tmp_path / 'none'}" in err) == (2, True)
    status, _, err = kvq("serve", "--chat-template", "chatml")  # one of llama.cpp's names
    assert (status, "can't read chatml" in err, "Jinja file or text" in err) == (2, True, True)


def test_half_of_a_pair_has_llama_cpps_other_half(config):
    made, err = config("-ctk", "q8_0")
    assert made.kv == "q8_0/f16"
    assert "kvq: -ctv is not given and f16" in err


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"])
def test_llama_cpps_types_of_kv_are_all_read(config, kind):
    made, err = config("-ctk", kind, "-ctv", kind)
    assert made.kv == f"{kind}/{kind}"
    assert kind == "bf16" or f"kvq: {kind} is read as kvq's " in err


def test_types_of_kv_that_llama_cpp_has_not_are_refused_by_name(kvq):
    status, _, err = kvq("serve", "-ctk", "q6_k", "-ctv", "f16")
    assert (status, "unknown KV format 'q6_k' in 'q6_k/f16'" in err) == (2, True)


def test_threads_are_the_environments(config, kvq, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config("--threads", "-1")
    assert os.environ["OMP_NUM_THREADS"] == "3"
    _, err = config("-t", "10")
    assert (os.environ["OMP_NUM_THREADS"], "kvq: -t 10: OMP_NUM_THREADS is set" in err) == ("10", True)
    for wrong in ("0", "-2", "many"):
        status, _, err = kvq("serve", "-t", wrong)
        assert (status, f"-t {wrong}: a whole number of threads" in err) == (2, True)
    assert os.environ["OMP_NUM_THREADS"] == "10"


def test_what_only_a_server_has_is_told_to_other_commands(kvq):
    status, _, err = kvq("generate", "Hello", "--host", "0.0.0.0", "--port", "80", "--chat-template", "x")
    assert (status, err.count("it is for kvq serve")) == (2, 3)


def test_words_behind_two_dashes_and_unknown_options_are_left_alone(kvq):
    assert translated(generate, ["-c", "8", "--", "-ngl", "9"]) == ["--max-model-len", "8", "--", "-ngl", "9"]
    status, _, err = kvq("serve", "--no-such-thing")
    assert (status, "No such option" in err) == (2, True)
