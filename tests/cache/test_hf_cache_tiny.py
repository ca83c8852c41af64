"""KvqCache on the embedded model: what 1,000 tokens hold, kvq's own results, and the rival's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils import is_optimum_quanto_available

from kvq.cache import KvqCache
from kvq.cache.transformers.recent import RecentRows
from kvq.models import Session
from kvq.models.prove.probe import relative_error
from tests.cache.hf_kit import attention_of

_BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "quantized_cache.py"
_TEXT = "The parser reads a file line by line and keeps what it needs. " * 90
_TIE = 0.02  # logits closer than this may change places when sums are taken in another order


@pytest.fixture(scope="module")
def thousand(tiny: Any) -> list[int]:
    return tiny.tokenizer(_TEXT)["input_ids"][:1000]


@pytest.mark.parametrize("attention", ["sdpa", "kvq"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_thousand_tokens_in_int4_hold_less_than_a_third_of_bf16_and_an_open_block(
    tiny: Any, thousand: list[int], attention: str, whole: bool
) -> None:
    bf16_bytes = 1000 * tiny.with_kv("bf16").kv_bytes_per_token
    ids = torch.tensor([thousand])
    with attention_of(tiny.weights.model, attention) as model, torch.inference_mode():
        cache = KvqCache(model.config, kv="int4")
        for part in (ids,) if whole else ids.split([1, *[111] * 9], dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)
    assert cache.get_seq_length() == 1000
    assert cache.rows is not None
    assert cache.rows.recent is not None
    recent = cache.rows.recent.nbytes
    assert recent == bf16_bytes / 1000 * 2 * 40, "a block in fp32 and a quarter more"
    assert cache.nbytes - recent <= 0.30 * bf16_bytes
    blocks = cache.rows.blocks
    allocated = sum(blocks.pool(g).untyped_storage().nbytes() for g in range(len(blocks.num_blocks)))
    assert allocated + recent == cache.nbytes, "what is reported is what is allocated"


@pytest.mark.parametrize("kv", ["int4_g32_s8_rot", "int4_g64_rot"])
@pytest.mark.parametrize("attention", ["sdpa", "kvq"])
def test_int4_tokens_are_those_of_kvqs_own_sessions_up_to_a_near_tie(
    tiny: Any, attention: str, kv: str
) -> None:
    # fp32 arithmetic on both sides: what rounding a query changes, a flipped INT4 code makes larger
    prompt = tiny.tokenizer(_TEXT)["input_ids"][3:943]  # with 60 more, 1,000 tokens
    layout = tiny.with_kv(kv).layout
    session = Session(tiny.weights, layout, max_tokens=len(prompt) + 60, backend="cpu-fp32")
    sequence = session.new_sequence()
    logits = [session.forward([(sequence, prompt)])[0].logits[-1]]
    for _ in range(59):
        logits.append(session.forward([(sequence, [int(logits[-1].argmax())])])[0].logits[-1])
    best = torch.stack(logits).topk(2).values
    ties = (best[:, 0] - best[:, 1] < _TIE).nonzero().flatten().tolist()
    steps = min(ties, default=len(logits))
    assert steps >= 20, "the prompt ties too early to show anything"
    with attention_of(tiny.weights.model, attention) as model:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            past_key_values=KvqCache(model.config, kv=kv, backend="cpu-fp32"),
            max_new_tokens=60,
            min_new_tokens=60,
            do_sample=False,
        )
    want = [int(row.argmax()) for row in logits[:steps]]
    assert out[0, len(prompt) : len(prompt) + steps].tolist() == want


def test_fp32_blocks_give_the_embedded_model_its_own_tokens(tiny: Any) -> None:
    ids = torch.tensor([tiny.tokenizer(_TEXT)["input_ids"][:300]])
    outs = []
    for attention in ("sdpa", "kvq"):
        with attention_of(tiny.weights.model, attention) as model:
            for cache in (KvqCache(model.config, kv="fp32"), DynamicCache(config=model.config)):
                if attention == "kvq" and isinstance(cache, DynamicCache):
                    continue
                outs.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        past_key_values=cache,
                        max_new_tokens=30,
                        do_sample=False,
                    )
                )
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.skipif(not is_optimum_quanto_available(), reason="optimum-quanto is not installed")
def test_the_benchmark_against_transformers_quantized_cache_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(_BENCHMARK), "--quick", "--json", str(tmp_path / "out.json")]
    subprocess.run(command, check=True)
    assert (tmp_path / "out.json").is_file()


@pytest.mark.parametrize("kv", ["int4", "int3_mean+recent=40"])
def test_how_tokens_come_changes_nothing_and_kvqs_own_sessions_say_the_same(
    tiny: Any, thousand: list[int], kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = RecentRows.take

    def rounded(own: RecentRows, layer: int, *rows: torch.Tensor) -> Any:
        return take(own, layer, *(x.bfloat16().float() for x in rows))

    monkeypatch.setattr(RecentRows, "take", rounded)  # as sessions hold what waits
    ids = thousand[:300]
    expected = tiny.with_kv(kv).logits(ids)
    logits = []
    with attention_of(tiny.weights.model, "kvq") as model, torch.inference_mode():
        for parts in ([300], [1, 7, 64, *[1] * 20, 208]):
            cache = KvqCache(model.config, kv=kv)
            pieces = torch.tensor([ids]).split(parts, dim=1)
            logits.append(torch.cat([model(part, past_key_values=cache).logits[0] for part in pieces]))
    for found in logits:
        assert relative_error(found, expected) <= 2e-4
