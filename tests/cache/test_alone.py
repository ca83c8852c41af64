"""The core works with torch, numpy and xxhash alone, and so do the plug-ins for vLLM and LMCache."""

import subprocess
import sys

import pytest

HIDE = """
import sys

class Hidden:
    names = {"transformers", "tokenizers", "click", "rich", "llguidance", "safetensors", "huggingface_hub"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}: hidden by this test", name=name)

sys.meta_path.insert(0, Hidden())
"""

BLOCKS = """
import torch
from kvq.blockmgr import BlockManager
from kvq.cache import KVCache, available_bytes, cache_backend
from kvq.cache.conformance import check_backend
from kvq.formats import KVRecipe
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.layout import plan_layout

layer = LayerGeometry(index=0, kv_heads=3, k_head_dim=64, v_head_dim=64)
model = ModelGeometry(
    model_type="own", layers=(layer,), q_heads=6, hidden_size=64, vocab_size=9, max_context=99
)
layout = plan_layout(model, KVRecipe.uniform("int4_g16", [(64, 64)]), block_size=4)
cpu, blocks = torch.device("cpu"), [8]
cache = KVCache(layout, num_blocks=blocks, device=cpu)
manager = BlockManager(num_blocks=blocks, block_size=4, **layout.holding)
tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]

def run(sequence, new):
    slots = manager.append([(sequence, len(new))])
    cache.carry_out(manager.take_orders())
    batch = SequenceBatch.of([sequence.tables[0]], slots[0], [len(new)], [sequence.length], cpu)
    store, draw = cache.stores[0], torch.Generator().manual_seed(sequence.length)
    k, v, q = (torch.randn(len(new), *shape, generator=draw) for shape in ((3, 64), (3, 64), (6, 64)))
    assert not store.write(k, v, batch.slots).any()
    out, _ = store.attend(q, batch, AttentionOptions(scale=0.125))
    manager.commit(sequence, new)
    return out[-1]

first = manager.start(manager.prompt(tokens))
want = run(first, tokens)
second = manager.start(manager.prompt(tokens))
assert second.length == 8 and second.tables[0] == first.tables[0][:2], "its prefix is shared"
k, v = cache.gather(0, torch.tensor([first.tables[0]]), 0, 9, unrotate=True)
assert k.shape == (1, 3, 9, 64) and k.isfinite().all() and k.abs().max() > 1
check_backend(cache_backend("dense"))
assert available_bytes(cpu) > 0
"""

LMCACHE = """
import torch
from kvq.integrations.lmcache.chunk import ChunkCodec

codec = ChunkCodec("int8", num_layers=2, channels=128, dtype=torch.float32, head_dim=64)
chunk = torch.randn(2, 2, 5, 128)
content, out = torch.empty(codec.nbytes(5), dtype=torch.uint8), torch.empty_like(chunk)
codec.encode(chunk, content)
codec.decode(content, out)
assert (out - chunk).abs().max() < 0.05
"""

VLLM = """
import torch
from kvq.formats import KVRecipe
from kvq.integrations.vllm import names, plugin
from kvq.integrations.vllm.pages import Page

page = Page.of(KVRecipe.uniform("int8", [(64, 64)]), 0, 2, 16, (64, 64))
store = page.store(torch.zeros(3, 2, 16, page.cell_bytes, dtype=torch.uint8), 4, None)
rows = torch.randn(5, 2, 64)
assert not store.write(rows, rows, torch.arange(5)).any()
"""


@pytest.mark.parametrize("code", [BLOCKS, LMCACHE, VLLM], ids=["blocks", "lmcache", "vllm"])
def test_torch_numpy_and_xxhash_are_enough(code: str) -> None:
    found = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
