"""What users name inside vLLM, and the pages that the names cut; vLLM itself runs in `make scale`."""

import pytest
import torch

from kvq.errors import ConfigError
from kvq.formats import KVRecipe
from kvq.integrations.vllm.names import is_own, recipe_of, requested
from kvq.integrations.vllm.pages import Page
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend
from kvq.kernels.write_kv.reference import write_kv
from tests.kernels.kit import poisoned_cache, rows_like_kv


@pytest.mark.parametrize(
    ("dtype", "option", "name"),
    [
        ("auto", None, None),
        ("fp8", None, None),
        ("kvq_int4", None, "int4"),
        ("kvq:some/kvq.json", None, "some/kvq.json"),
        ("auto", "k8v4", "k8v4"),
        ("auto", "kvq_int8", "int8"),
    ],
)
def test_names_are_found_in_either_place(dtype, option, name):
    additional = None if option is None else {"kvq": option, "other": 1}
    assert requested(dtype, additional) == name
    assert is_own(dtype) == dtype.startswith("kvq")


@pytest.mark.parametrize(
    ("dtype", "option", "said"),
    [("kvq_int4", "int8", "name one"), ("fp8", "int8", "name one"), ("auto", 4, "format or a kvq.json")],
)
def test_names_in_both_places_are_refused(dtype, option, said):
    with pytest.raises(ConfigError, match=said):
        requested(dtype, {"kvq": option})


def test_recipes_that_do_not_fit_are_refused(tmp_path):
    file = tmp_path / "kvq.json"
    KVRecipe.uniform("int8", [(64, 64)] * 3).save(file)
    assert len(recipe_of(str(file), (64, 64), 3).layers) == 3
    with pytest.raises(ConfigError, match="3 layers, the model has 4"):
        recipe_of(str(file), (64, 64), 4)
    with pytest.raises(ConfigError, match="static scales"):
        recipe_of("fp8_per_head", (64, 64), 3)
    with pytest.raises(ConfigError, match="unknown"):
        recipe_of("int5", (64, 64), 3)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4", "k8v4", "int4_g32_rot"])
def test_a_page_holds_what_a_block_of_kvq_does(kv):
    """The same rows through vLLM's pages, which lie apart, and through a pool of kvq's own."""
    block_size, blocks, heads = 32, 5, 2
    recipe = KVRecipe.uniform(kv, [(64, 64)] * 2)
    page = Page.of(recipe, 1, heads, block_size, (64, 64))
    cells = (heads, block_size, page.cell_bytes)
    apart = 48  # bytes that belong to nobody
    size = heads * block_size * page.cell_bytes
    raw = torch.full((blocks * (size + apart),), 0xFF, dtype=torch.uint8)
    inside = (block_size * page.cell_bytes, page.cell_bytes, 1)
    paged = page.over(raw.as_strided((blocks, *cells), (size + apart, *inside)))
    own = poisoned_cache(
        kv, [(64, 64)] * 2, kv_heads=heads, q_heads=4, block_size=block_size, num_blocks=blocks
    )
    k, v, slots = rows_like_kv(40, heads, 64, 1), rows_like_kv(40, heads, 64, 2), torch.arange(64, 104)
    write_kv(k, v, paged, slots)
    write_kv(k, v, own.layer(1), slots)
    batch = SequenceBatch.of([[2, 3]], list(range(104, 105)), [1], [40], torch.device("cpu"))
    q, options = rows_like_kv(1, 4, 64, 3), AttentionOptions(scale=0.125)
    for found, want in zip(
        attend(q, paged, batch, options), attend(q, own.layer(1), batch, options), strict=True
    ):
        assert torch.equal(found, want)
    gaps = raw.view(blocks, size + apart)[:, size:]
    assert (gaps == 0xFF).all()
    assert page.cell_bytes * heads * block_size == page.layout.nbytes


def test_pages_that_are_cut_otherwise_are_refused():
    page = Page.of(KVRecipe.uniform("int8", [(64, 64)]), 0, 2, 16, (64, 64))
    with pytest.raises(ConfigError, match="vLLM's pages"):
        page.over(torch.zeros(3, 16, 2, page.cell_bytes, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="multiple of 16"):
        Page.of(KVRecipe.uniform("int8", [(64, 64)]), 0, 2, 24, (64, 64))
    with pytest.raises(ConfigError, match="a layer 7"):
        Page.of(KVRecipe.uniform("int8", [(64, 64)]), 7, 2, 16, (64, 64))
    with pytest.raises(ConfigError, match="head dimensions"):
        Page.of(KVRecipe.uniform("int8", [(64, 64)]), 0, 2, 16, (128, 128))
