"""Tokenizers are those of transformers, whether or not it is given the model's whole configuration."""

import json
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import is_torch_available

from kvq.errors import ConfigError, ModelError
from kvq.models.describe.resolve import EMBEDDED, resolve_model
from kvq.models.loading.tokenizer import (
    check_knows_text,
    check_vocabulary,
    load_tokenizer,
    load_without_torch,
)

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


ALONE = f"""
import json, sys
from pathlib import Path
from kvq.models.loading.tokenizer import load_without_torch
folder = Path(sys.argv[1])
load_without_torch(folder)
models = [name for name in ("torch", "transformers.models.llama") if name in sys.modules]
found = []
for name in {NAMES}:
    told = json.loads((folder / "tokenizer_config.json").read_text()) | {{"tokenizer_class": name}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    tokenizer = load_without_torch(folder)
    turns = [{{"role": "user", "content": {TEXT!r}}}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    found.append([type(tokenizer).__name__, tokenizer(text)["input_ids"], text])
print(json.dumps([models, found]))
"""


def test_no_models_code_is_imported_for_a_tokenizer_and_it_is_the_same(folder):
    """Half of transformers, and torch: two seconds and 180 MB of a process that has no model."""
    command = [sys.executable, "-c", ALONE, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "PyTorch" not in run.stderr  # which transformers would miss
    models, found = json.loads(run.stdout)
    assert models == []
    for name, (kind, tokens, text) in zip(NAMES, found, strict=True):
        rewrite(folder / "tokenizer_config.json", tokenizer_class=name)
        here = load_tokenizer(folder)
        turns = [{"role": "user", "content": TEXT}]
        assert kind == type(here).__name__
        assert text == here.apply_chat_template(turns, tokenize=False)
        assert tokens == here(text)["input_ids"]


def test_torch_stays_where_it_is_in_use(folder):
    assert load_without_torch(folder)(TEXT)["input_ids"] == load_tokenizer(folder)(TEXT)["input_ids"]
    assert "torch" in sys.modules
    assert is_torch_available()


def test_a_broken_configuration_is_named(folder):
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_template_that_lies_beside_the_tokenizer_is_its_own(tmp_path):
    for path in EMBEDDED["tiny"].iterdir():
        if path.name.startswith("tokenizer") or path.name == "config.json":
            shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"


def without_tokenizer(folder, model_type):
    for path in folder.glob("*token*"):
        path.unlink()
    rewrite(folder / "config.json", model_type=model_type)


@pytest.mark.parametrize("model_type", ["cohere", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "qwen2"])
def test_a_folder_without_a_tokenizer_has_none(model_type, folder):
    """transformers makes one of special tokens alone for some families, and raises for others."""
    without_tokenizer(folder, model_type)
    with pytest.raises(ModelError, match=r"has no tokenizer that .*no file of a vocabulary is there; copy"):
        check_knows_text(load_tokenizer(folder), folder)


def test_a_vocabulary_that_is_missing_is_told_though_other_files_are_there(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no file of a vocabulary is there; copy"):
        load_tokenizer(folder)


def test_a_template_that_was_given_and_is_no_jinja_is_refused(folder):
    with pytest.raises(ConfigError, match=r"--chat-template is no Jinja: line 2: .*'endfr'"):
        load_without_torch(folder, "{% for m in messages %}\n{{ m }}{% endfr %}")


def test_a_vocabulary_that_fails_for_other_words_knows_no_text(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(380)}))  # and no token for others
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    with pytest.raises(ModelError, match="has no tokenizer that knows a text"):
        check_knows_text(load_tokenizer(folder), folder)


def test_special_tokens_alone_know_no_text(folder):
    told = (folder / "tokenizer_config.json").read_text()
    without_tokenizer(folder, "qwen2")
    (folder / "tokenizer_config.json").write_text(told)
    rewrite(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(ModelError, match=r"makes nothing of 'Hello.*files there are tokenizer_config\.json"):
        check_knows_text(load_tokenizer(folder), folder)


def test_nor_does_a_vocabulary_of_unknown_words(folder):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    special = {"unk_token": "<unk>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    with pytest.raises(ModelError, match="makes nothing of 'Hello"):
        check_knows_text(load_tokenizer(folder), folder)


def test_words_of_its_own_will_do(folder):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "Pitch_60": 1, "Bar": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    check_knows_text(tokenizer, folder)
    assert tokenizer.encode("Bar") == [2]
    check_vocabulary(tokenizer, folder, 128)  # padded
    with pytest.raises(
        ModelError, match=r"has 3 tokens, its config\.json says vocab_size 256; .*tokenizer\.json"
    ):
        check_vocabulary(tokenizer, folder, 256)
