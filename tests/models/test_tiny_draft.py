"""The embedded draft model: small beside the one that it drafts for, of the same tokens, and near to it."""

import json
import shutil

import pytest
import torch

import kvq
from kvq.calib.quantize.output import small_files
from kvq.formats.recipe import KVRecipe
from kvq.models.describe.resolve import EMBEDDED, resolve_model, tokenizer_folder
from kvq.models.loading.tokenizer import load_tokenizer, load_without_torch

FOLDER = EMBEDDED["tiny-draft"]
PROMPT = "The town lies on the river, and in the early years of the century"
ACCEPTED = 0.5  # what is far below the measured share, and far above that of a draft that knows nothing


@pytest.fixture(scope="module")
def draft():
    return kvq.load("tiny-draft")


def test_it_ships_in_at_most_1_6_mb_with_its_provenance_and_no_tokenizer_of_its_own():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 1_600_000
    assert not list(FOLDER.glob("tokenizer*"))
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for source in ("tools/train_draft.py", "models/tiny/README.md"):
        assert source in card


def test_a_token_costs_less_than_a_fifth_of_the_models():
    """Its weights, all of which a forward pass multiplies with: embeddings are the head too."""
    draft, model = ((EMBEDDED[name] / "model.safetensors").stat().st_size for name in ("tiny-draft", "tiny"))
    assert 5 * draft < model


def test_it_has_the_models_vocabulary_tokenizer_and_positions(draft, tiny):
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings"):
        assert len({json.loads((EMBEDDED[n] / "config.json").read_text())[key] for n in EMBEDDED}) == 1
    assert draft.tokenizer.get_vocab() == tiny.tokenizer.get_vocab()
    assert draft.tokenizer.chat_template == tiny.tokenizer.chat_template
    assert load_without_torch(FOLDER)(PROMPT)["input_ids"] == tiny.tokenizer(PROMPT)["input_ids"]
    assert str(resolve_model("tiny-draft")) == "tiny-draft, the embedded draft model"


def test_it_ships_static_scales_that_belong_to_it(draft):
    recipe = KVRecipe.load(FOLDER / "kvq.json")
    assert recipe.static_scales.model_digest == draft.weights.digest
    assert draft.with_kv("fp8_per_head").logits([1, 2, 3]).isfinite().all()


def test_only_the_embedded_folder_borrows_a_tokenizer(tmp_path):
    copy = tmp_path / "tiny_draft"
    shutil.copytree(FOLDER, copy)
    assert tokenizer_folder(copy) == copy
    with pytest.raises(kvq.ModelError, match="has no tokenizer"):
        load_tokenizer(copy)


def test_a_quantized_copy_gets_the_tokenizer():
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        path.name for path in small_files(FOLDER)
    }


def test_its_tokens_are_accepted_as_often_as_it_was_trained_to(draft, tiny):
    with kvq.LLM(tiny, num_blocks=16) as llm:
        params = kvq.SamplingParams(max_tokens=192, temperature=1.0, ignore_eos=True, seed=1)
        result = llm.generate(PROMPT, params)[0]
    prompt = result.prompt_token_ids
    ids = [*prompt, *result.outputs[0].token_ids]
    p, q = (model.logits(ids)[len(prompt) - 1 : -1].float().softmax(-1) for model in (tiny, draft))
    assert torch.minimum(p, q).sum(-1).mean() > ACCEPTED
    shuffled = q[:, torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(0))]
    assert torch.minimum(p, shuffled).sum(-1).mean() < ACCEPTED / 2
