"""Tokenizers are those of transformers, whether or not it is given the model's whole configuration."""

import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from kvq.errors import ModelError
from kvq.models.resolve import resolve_model
from kvq.models.tokenizer import load_tokenizer

TEXT = "The 1,000 häuser  of <|user|>\nthe “city”\t and <|endoftext|>"


@pytest.fixture
def folder(tmp_path):
    for path in resolve_model("tiny").folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    return tmp_path


def rewrite(path, **changes):
    changed = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


NAMES = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
)
TYPES = ("llama", "qwen2", "mistral", "gemma3_text", "gpt_oss")


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", None), *((kind, name) for kind in TYPES for name in NAMES)]
)
def test_the_class_and_the_tokens_are_transformers_own(folder, model_type, name):
    rewrite(folder / "config.json", model_type=model_type)
    rewrite(folder / "tokenizer_config.json", tokenizer_class=name)
    wanted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    got = load_tokenizer(folder)
    assert type(got) is type(wanted)
    assert got(TEXT)["input_ids"] == wanted(TEXT)["input_ids"]
    assert got.chat_template == wanted.chat_template
    assert (got.eos_token_id, got.bos_token_id) == (wanted.eos_token_id, wanted.bos_token_id)


def test_no_models_code_is_imported_for_a_tokenizer():
    """Half of transformers and torch: a second and 150 MB of a process that has no model."""
    code = """
import sys
from kvq.models.resolve import resolve_model
from kvq.models.tokenizer import load_tokenizer
load_tokenizer(resolve_model("tiny").folder)
print([name for name in ("torch._dynamo", "transformers.models.llama") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_broken_configuration_is_named(folder):
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
