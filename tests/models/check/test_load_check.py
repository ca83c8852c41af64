"""KV formats that break a model are refused before it serves, and what was found is kept."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import warning_once

import kvq
from kvq.cache import KvqCache
from kvq.commands.shared import loading
from kvq.errors import BrokenFormat, ConfigError
from kvq.integrations.vllm.names import say_checked
from kvq.models import load
from kvq.models.check import load_check
from kvq.models.check.load_check import check_on_load, measure, memory_folder, token_ids
from kvq.models.describe.resolve import EMBEDDED
from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import save_model

WIDE = 1, 4  # layers whose keys have two channels that are much larger than all others
SMALL = {"num_blocks": 16, "max_num_seqs": 1}


def widened(folder, factor):
    """The embedded model with some channels of keys so much larger, and those of queries so much smaller: as
    good as it was, over unquantized KV."""
    shutil.copytree(EMBEDDED["tiny"], folder, ignore=shutil.ignore_patterns("kvq.json"))
    weights = load_file(folder / "model.safetensors")
    for layer in WIDE:
        for part, scale in (("k", factor), ("q", 1 / factor)):
            weight = weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
            weight.view(-1, 64, 256)[:, [3, 35]] *= scale  # which RoPE turns together
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ruined(tmp_path_factory):
    """A model that int4 breaks."""
    return widened(tmp_path_factory.mktemp("model") / "ruined", 256)


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """A model that int4 harms, but does not break."""
    return widened(tmp_path_factory.mktemp("model") / "harmed", 32)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The embedded model, as somebody's own."""
    return widened(tmp_path_factory.mktemp("model") / "sound", 1)


@pytest.fixture(scope="module")
def broken(ruined):
    """That model with int4."""
    return load(ruined, "int4_g32_s8_rot")


@pytest.fixture(scope="module")
def warned(harmed):
    """The other one with int4."""
    return load(harmed, "int4_g32_s8_rot")


@pytest.fixture(autouse=True)
def passes(tmp_path, monkeypatch):
    """An empty memory; what is measured is listed here."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvq.models.check.load_check.memory_folder", memory_folder)
    measured = []

    def counted(model):
        measured.append(model.recipe.name)
        return measure(model)

    monkeypatch.setattr(load_check, "measure", counted)
    return measured


def warnings_of(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


def test_a_format_that_breaks_the_model_is_refused_with_layers_and_another_format(ruined) -> None:
    with pytest.raises(BrokenFormat) as refused:
        kvq.LLM(ruined, "int4_g32_s8_rot", **SMALL)
    said = str(refused.value)
    assert said.startswith("int4_g32_s8_rot breaks this model: over 384 tokens mean KL ")
    assert "layers 4 (" in said
    assert "%), 1 (" in said  # the worst ones
    assert "take int4, which" in said
    assert "--accept-divergence" in said
    with kvq.LLM(ruined, "int4_per_channel/int4", **SMALL) as llm:
        assert llm.generate("A", kvq.SamplingParams(max_tokens=2))[0].outputs


def test_what_is_accepted_runs_and_is_warned_of(ruined, caplog) -> None:
    with kvq.LLM(ruined, "int4_g32_s8_rot", accept_divergence=True, **SMALL) as llm:
        assert llm.generate("A", kvq.SamplingParams(max_tokens=2))[0].outputs
    [line] = warnings_of(caplog)
    assert line.startswith("int4_g32_s8_rot breaks this model: ")
    with pytest.raises(ConfigError, match="accept_divergence must be True or False"):
        kvq.LLM(ruined, "int4_g32_s8_rot", accept_divergence="yes", **SMALL)


def test_what_harms_a_model_is_one_warning_and_what_does_not_is_none(harmed, sound, caplog) -> None:
    kvq.LLM(sound, "int4_g32_s8_rot", **SMALL).close()
    assert not warnings_of(caplog)
    kvq.LLM(harmed, "int4_g32_s8_rot", **SMALL).close()
    [line] = warnings_of(caplog)
    assert line.startswith("int4_g32_s8_rot is not harmless to this model: over 384 tokens mean KL 0.0")


def test_that_short_names_mean_other_formats_is_said_once(sound, caplog) -> None:
    for kv in ("int4_per_channel/int4", "int8_per_token_head"):
        kvq.LLM(sound, kv, **SMALL).close()
    assert not warnings_of(caplog)
    for kv in ("int8", "int8", "int6"):
        kvq.LLM(sound, kv, **SMALL).close()
    [line] = warnings_of(caplog)
    assert line == "int8 keeps K per channel since 2026-11-28, as all short names: CHANGELOG.md"


def test_one_pass_suffices_where_no_layer_is_off_much(tiny, broken) -> None:
    found = measure(tiny.with_kv("int8"))
    assert (found.verdict, found.passes, found.kl_mean) == ("harmless", 1, None)
    assert len(found.layer_errors) == 6
    assert max(found.layer_errors) < load_check.CLEAR_ERROR
    found = measure(broken)
    assert (found.verdict, found.passes) == ("broken", 2)
    assert min(found.layer_errors[i] for i in WIDE) > 2 * max(
        x for i, x in enumerate(found.layer_errors) if i not in WIDE
    )
    assert found.kl_mean is not None
    assert found.top1_agreement is not None
    assert 0.1 < found.kl_mean < 2
    assert 0.2 < found.top1_agreement < 0.9


def test_where_nothing_of_the_size_is_fit_no_format_is_named(broken, monkeypatch) -> None:
    for others, passes in ((("int3_g32", "int4_g64", "int8", "int4_g7"), 3), ((), 2)):
        monkeypatch.setattr(load_check, "_OTHERS", others)
        found = measure(broken)
        assert (found.verdict, found.instead, found.passes) == ("broken", "", passes)
        assert "take a larger one, or bf16" in found.refusal


def test_tokens_that_are_young_now_count_as_old(broken) -> None:
    assert measure(broken.with_kv("int4_g32_s8_rot+recent=4096")).kl_mean == measure(broken).kl_mean


def test_a_pair_is_measured_once(broken, warned, passes) -> None:
    for _ in range(3):
        with pytest.raises(BrokenFormat):
            check_on_load(broken)
    assert passes == ["int4_g32_s8_rot"]
    folder = broken.prepared.folder
    first, again = (
        check_on_load(x, accept_divergence=True) for x in (broken, load(folder, "int4_g32_s8_rot"))
    )
    assert first == again
    assert passes == ["int4_g32_s8_rot"]
    check_on_load(warned)  # another model
    check_on_load(
        load(warned.prepared.folder, "int4_g32_s8_rot", block_size=16)
    )  # no block decides what its rows are
    check_on_load(broken.with_kv("int4_mean"), accept_divergence=True)  # another format
    assert passes == ["int4_g32_s8_rot", "int4_g32_s8_rot", "int4_mean"]
    check_on_load(load(folder, "int4_mean", block_size=16), accept_divergence=True)  # blocks do here
    check_on_load(
        load(folder, "int4_g32_s8_rot", weights="int8"), accept_divergence=True
    )  # weights are others
    assert passes[3:] == ["int4_mean", "int4_g32_s8_rot"]


@pytest.mark.parametrize("damage", ["cut", "edited", "empty", "list", "number", "folder", "other"])
def test_damaged_memory_costs_another_check(warned, passes, damage: str) -> None:
    found = check_on_load(warned)
    [path] = memory_folder().iterdir()
    text = path.read_text()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        data = json.loads(text)
        edited = json.dumps(data | {"found": data["found"] | {"verdict": "harmless"}})
        other = json.dumps({"found": {"kv": "int4_g32_s8_rot"}, "seal": data["seal"]})
        texts = {"cut": text[:-9], "edited": edited, "empty": "", "list": "[]", "number": "7", "other": other}
        path.write_text(texts[damage])
    assert check_on_load(warned) == found
    assert len(passes) == 2
    assert check_on_load(warned) == found
    assert len(passes) == (3 if damage == "folder" else 2)


def test_a_memory_that_cannot_be_written_is_done_without(warned, passes) -> None:
    memory_folder().parent.parent.mkdir(parents=True)
    memory_folder().parent.write_text("in the way")
    assert check_on_load(warned) == check_on_load(warned)
    assert len(passes) == 2


def test_what_is_measured_unquantized_or_loaded_already_is_not_checked(ruined, broken, passes) -> None:
    for model, kv in (
        (ruined, "bf16"),
        ("tiny", "int2"),
        (EMBEDDED["tiny"], "int4_g32_s8_rot"),
        (broken, "int4_g32_s8_rot"),
    ):
        kvq.LLM(model, kv, **SMALL).close()
    assert not passes
    assert not memory_folder().exists()


def test_a_model_that_only_guesses_is_not_judged(tmp_path, caplog) -> None:
    folder = save_model(tmp_path / "model", "llama", head_dim=32)
    one_character_tokenizer().save_pretrained(folder)
    kvq.LLM(folder, "int2_g32_s8_rot", **SMALL).close()
    assert warnings_of(caplog) == [
        "can't tell what int2_g32_s8_rot costs this model: it only guesses at the check's text"
    ]
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert measure(load(folder, "int2_g32_s8_rot")).tokens == 0
    assert measure(load(EMBEDDED["tiny"], "int2_g32_s8_rot", max_context=9)).verdict == "unjudgeable"


def test_the_text_is_the_same_for_all_and_shorter_for_large_models(tiny) -> None:
    small, large = (token_ids(tiny.tokenizer, 4096, 1 << 20, weights) for weights in (1 << 20, 1 << 31))
    assert (len(small), len(large)) == (384, 256)
    assert small[:256] == large
    assert len(token_ids(tiny.tokenizer, 100, 1 << 20, 1)) == 100


class TestInTransformers:
    """`kvq.check`, and who names it."""

    def test_finds_what_the_load_check_finds(self, ruined, broken) -> None:
        model = AutoModelForCausalLM.from_pretrained(ruined, dtype=torch.float32)
        before = model.config._attn_implementation
        found, other = kvq.check(model, "int4_g32_s8_rot"), measure(broken)
        assert found.verdict == other.verdict == "broken"
        assert found.kl_mean == pytest.approx(other.kl_mean, rel=0.1)
        assert found.layer_errors == pytest.approx(other.layer_errors, rel=0.1)
        assert model.config._attn_implementation == before
        assert kvq.check(model, "int4_per_channel/int4").verdict == "harmless"
        assert kvq.check(broken, "int4_g32_s8_rot") == other

    @pytest.mark.parametrize("given", ["/some/model", None, 7])
    def test_takes_a_loaded_model(self, given) -> None:
        with pytest.raises(ConfigError, match=rf"takes a loaded model of .*, got {given!r}"):
            kvq.check(given)

    def test_needs_a_tokenizer(self, ruined) -> None:
        model = AutoModelForCausalLM.from_pretrained(ruined)
        model.config.name_or_path = model.name_or_path = ""
        with pytest.raises(ConfigError, match="tokenizer="):
            kvq.check(model)
        assert kvq.check(model, "int8", tokenizer=AutoTokenizer.from_pretrained(ruined)).tokens == 384

    def test_is_named_once_in_a_process(self, tiny, caplog) -> None:
        warning_once.cache_clear()
        KvqCache(tiny.weights.model.config, "bf16")
        assert not warnings_of(caplog)
        for _ in range(2):
            KvqCache(AutoModelForCausalLM.from_pretrained(EMBEDDED["tiny"]).config, "int4_g32_s8_rot")
        [line] = warnings_of(caplog)
        assert "kvq.check(model, kv)" in line


def test_vllm_is_told_what_is_remembered(ruined, broken) -> None:
    assert "int4_g32_s8_rot was not checked on this model" in say_checked(str(ruined), "int4_g32_s8_rot")
    check_on_load(broken, accept_divergence=True)
    assert say_checked(str(ruined), "int4_g32_s8_rot").startswith("int4_g32_s8_rot breaks this model: ")
    assert "can't be checked" in say_checked("/no/such/model", "int4_g32_s8_rot")


class TestCommands:
    """Exit codes, and what is said."""

    @pytest.fixture
    def kvq(self, capsys):
        """Run a command: its exit status, and all it says."""
        from kvq.cli import main

        def run(*arguments):
            with pytest.raises(SystemExit) as ended:
                main(list(map(str, arguments)))
            said = capsys.readouterr()
            return ended.value.code or 0, " ".join((said.out + said.err).split())

        return run

    def test_generate_and_chat_end_with_1(self, kvq, ruined, passes, monkeypatch) -> None:
        asked = ("generate", "--model", ruined, "--kv", "int4_g32_s8_rot", "-n", 2, "Hi")
        status, said = kvq(*asked)
        assert status == 1
        assert "kvq: error: int4_g32_s8_rot breaks this model: " in said
        assert kvq(*asked, "--accept-divergence")[0] == 0
        assert passes == ["int4_g32_s8_rot"]
        monkeypatch.setattr(loading, "load_checked", None)  # what is known is told before weights are read
        assert kvq(*asked)[0] == 1

    def test_serve_tells_what_is_remembered(self, kvq, ruined, broken) -> None:
        asked = (
            "serve",
            "--check",
            "--port",
            0,
            "--model",
            ruined,
            "--kv",
            "int4_g32_s8_rot",
            "--kv-memory",
            "64MiB",
        )
        assert "warning formats: what they cost this model will be checked" in kvq(*asked)[1]
        check_on_load(broken, accept_divergence=True)
        status, said = kvq(*asked)
        assert status == 1
        assert "error formats: int4_g32_s8_rot breaks this model: " in said
        status, said = kvq(*asked, "--accept-divergence")
        assert (status, "warning formats: int4_g32_s8_rot breaks" in said) == (0, True)

    def test_an_engine_in_a_process_of_its_own_ends_with_1(self, kvq, ruined, tmp_path) -> None:
        source = tmp_path / "in.jsonl"
        body = {"model": "ruined", "prompt": "A", "max_tokens": 2}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        source.write_text(json.dumps(line))
        asked = ("run-batch", source, tmp_path / "out.jsonl", "--model", ruined, "--kv", "int4_g32_s8_rot")
        served = ("serve", "--port", 0, "--model", ruined, "--kv", "int4_g32_s8_rot")
        for command in (asked, served):  # the last is told what was found before
            status, said = kvq(*command, "--kv-memory", "8MiB")
            assert status == 1, said
            assert "int4_g32_s8_rot breaks this model: " in said
