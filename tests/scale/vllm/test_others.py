"""Models that ask for nothing of kvq, while its plug-in is there: all of their attention is vLLM's."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from tests.scale.vllm.kit import served

IDS = [[5, 6, 7, 8, 9], [5, 60, 70, 80, 90]]  # alike in the first token only


def test_encoders_see_all_of_a_text(tmp_path: Path) -> None:
    """vLLM derives their attention from what it has for decoders."""
    torch.manual_seed(0)
    config = BertConfig(
        architectures=["BertModel"],
        vocab_size=100,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    options = {"runner": "pooling", "max_model_len": 64}
    with served(None, tmp_path, **options) as llm:
        outputs = llm.encode([{"prompt_token_ids": ids} for ids in IDS], pooling_task="embed")
    for ids, output in zip(IDS, outputs, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([ids])).last_hidden_state[0, 0]
        found = output.outputs.data.flatten()[: len(want)]
        assert float((found - want / want.norm()).abs().max()) < 1e-5
