"""Layers that read another's K and V, attend in chunks, or have sinks alone: the tokens of `generate`."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from transformers import AutoConfig

from kvq import cli
from kvq.engine import SamplingParams
from kvq.models.observe.tiny_copy import build_tiny_copy
from tests.engine.kit import (
    EOS,
    assert_balanced,
    count_near_ties,
    engine,
    mixed_prompts,
    one_character_tokenizer,
    reference_tokens,
    tokens_of,
)
from tests.helpers_models import load_eager, load_fp32

# What a family's configuration is to say beside its defaults.
FAMILIES = {
    "gemma4_text": {"num_kv_shared_layers": 18},  # heads of two sizes too
    "llama4_text": {},
    "mimo_v2_flash": {},  # K and V of two dimensions too
}
NEW = 12  # tokens per result
TEXT = "the quick brown fox jumps over the lazy dog and runs away from it, again and again. " * 30


@cache
def small_folder(family):
    """A small model of a family, with a tokenizer of one character a token."""
    folder = Path(mkdtemp(prefix=f"kvq-{family}-"))
    build_tiny_copy(AutoConfig.for_model(family, **FAMILIES[family]).to_dict()).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"eos_token_id": EOS}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    one_character_tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_blocks", "chunk"), [(12, 40), pytest.param(200, 512, marks=pytest.mark.long)])
def test_tokens_are_those_of_generate_through_small_pools_and_chunks(family, num_blocks, chunk):
    folder = small_folder(family)
    reference = load_eager(folder)
    prompts = mixed_prompts(8, seed=7)
    wanted = [reference_tokens(reference, prompt, NEW) for prompt in prompts]
    llm = engine(load_fp32(folder, block_size=16), num_blocks=num_blocks, max_num_batched_tokens=chunk)
    for _ in range(2):
        got = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=NEW)))
        assert count_near_ties(reference, prompts, wanted, got) <= 1
    assert_balanced(llm)


def run(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(arg) for arg in args])
    assert not stop.value.code


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES])
def test_recipes_scales_and_figures_are_of_the_layers_that_store_k_and_v(family, tmp_path, capsys):
    folder = small_folder(family)
    stored = len(load_fp32(folder).geometry.layers)
    text = folder / "text.txt"
    few = ("--text", text, "--context", 64, "--max-windows", 1)
    run("calibrate", folder, *few, "--out", tmp_path / "scales.json")
    run("tune", folder, *few, "--out", tmp_path / "kvq.json", "--budget", "8bit", "--verify-windows", 1)
    layers = json.loads((tmp_path / "kvq.json").read_text())["layers"]
    assert len(layers) == stored
    run("eval", folder, "--kv", tmp_path / "kvq.json", *few, "--attention-windows", 1)
    assert "nan" not in capsys.readouterr().out.lower()
