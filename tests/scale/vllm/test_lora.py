"""An adapter in vLLM, over kvq's formats: the tokens of kvq's own engine with its weights merged."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.scale.vllm.kit import TINY, served
from tests.scale.vllm.test_vllm import TOKENS, check_same

FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random adapter of the embedded model, and the model with it merged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=8,
        lora_alpha=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), config)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    for name in FILES:
        shutil.copy(TINY / name, folder / "merged" / name)
    return folder


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_an_adapter_gives_the_tokens_of_merged_weights(kv, prompts, own, adapted):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    some, merged = prompts[:24], adapted / "merged"
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in some]
    with served(kv, enable_lora=True, max_lora_rank=8) as llm:
        adapter = LoRARequest("random", 1, str(adapted / "adapter"))
        with_it = llm.generate(asked, params, use_tqdm=False, lora_request=adapter)
        without = llm.generate(asked, params, use_tqdm=False)
    found, plain = ([list(x.outputs[0].token_ids) for x in outputs] for outputs in (with_it, without))
    assert check_same(kv, some, found, own(kv, some, TOKENS, merged), merged) <= 4
    assert check_same(kv, some, plain, own(kv, some, TOKENS)) <= 4
    assert found != plain
