"""What users name inside vLLM, and the pages that the names cut; vLLM itself runs in `make scale`."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvq.errors import ConfigError
from kvq.formats import Centers, KVRecipe, LayerCenters, StaticScales
from kvq.formats.calibrated import HeadMaxima
from kvq.integrations.vllm.names import is_own, recipe_of, requested, say_checked
from kvq.integrations.vllm.pages import Page, with_slots
from kvq.kernels import AttentionOptions, SequenceBatch
from kvq.kernels.attend.reference import attend
from kvq.kernels.write_kv.reference import write_kv
from kvq.models.describe.resolve import EMBEDDED
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
        recipe_of("int7", (64, 64), 3)


@pytest.mark.parametrize("kv", ["bf16", "int8", "int4", "k8v4", "int4_g32_rot", "int3/int6"])
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
    for kv in ("int4_mean", "int8+recent=16"):
        with pytest.raises(ConfigError, match=r"keeps tokens unquantized .* vLLM's cache can't do"):
            Page.of(KVRecipe.uniform(kv, [(64, 64)]), 0, 2, 16, (64, 64))
    with pytest.raises(ConfigError, match="a layer 7"):
        Page.of(KVRecipe.uniform("int8", [(64, 64)]), 7, 2, 16, (64, 64))
    with pytest.raises(ConfigError, match="head dimensions"):
        Page.of(KVRecipe.uniform("int8", [(64, 64)]), 0, 2, 16, (128, 128))


def test_processes_get_what_was_calibrated_for_their_heads():
    maxima = HeadMaxima(
        k=(1.0, 2.0, 3.0, 4.0), v=(5.0, 6.0, 7.0, 8.0), k_rotated=(1.0,) * 4, v_rotated=(2.0,) * 4
    )
    rows = tuple((float(head),) * 64 for head in range(4))
    made_for = {"model_digest": "m", "text_digest": "t", "tokens": 9}
    recipe = replace(
        KVRecipe.uniform("int4", [(64, 64)]),
        static_scales=StaticScales(**made_for, layers=(maxima,)),
        centers=Centers(**made_for, layers=(LayerCenters(k=rows),)),
    )
    second, last = recipe.share(1, 2), recipe.share(7, 8)  # the last one's head is another process's too
    assert (second.static_scales.layers[0].k, second.static_scales.layers[0].v) == ((3.0, 4.0), (7.0, 8.0))
    assert second.centers.layers[0] == LayerCenters(k=rows[2:])
    assert last.centers.layers[0] == LayerCenters(k=rows[3:])
    assert recipe.share(0, 1) == recipe


def test_centers_of_a_file_are_taken_from_the_layer_that_they_are_of():
    rows = tuple(tuple(float(x) for x in row) for row in torch.randn(2, 64))
    centers = Centers(
        model_digest="m", text_digest="t", tokens=9, layers=(LayerCenters(), LayerCenters(k=rows, v=rows))
    )
    recipe = replace(KVRecipe.uniform("int4", [(64, 64)] * 2), centers=centers)
    pages = [Page.of(recipe, layer, 2, 16, (64, 64)) for layer in (0, 1)]
    blocks = [torch.zeros(1, 2, 16, page.cell_bytes, dtype=torch.uint8) for page in pages]
    first, second = (page.store(own, 4, None) for page, own in zip(pages, blocks, strict=True))
    k, slots = rows_like_kv(5, 2, 64, 1), torch.arange(5)
    assert not second.write(k + torch.tensor(rows), k + torch.tensor(rows), slots).any()
    assert not first.write(k, k, slots).any()
    assert not torch.equal(blocks[0], 0 * blocks[0])
    assert torch.equal(blocks[0], blocks[1])
    with pytest.raises(ConfigError, match="caps attention scores at 30"):
        pages[1].store(blocks[1], 4, 30.0)


def test_padding_without_a_slot_is_not_written():
    k, v = rows_like_kv(5, 2, 64, 1), rows_like_kv(5, 2, 64, 2)
    kept_k, kept_v, kept = with_slots(k, v, torch.tensor([-1, 7, 3, -1, -1]))
    assert torch.equal(kept_k, k[1:3])
    assert torch.equal(kept_v, v[1:3])
    assert kept.tolist() == [7, 3]
    whole = torch.arange(5)
    assert with_slots(k, v, whole)[2] is whole
    assert len(with_slots(k[:0], v[:0], whole[:0])[2]) == 0


def test_an_unchecked_format_is_named_as_it_is_kept_there(tmp_path: Path) -> None:
    model = shutil.copytree(EMBEDDED["tiny"], tmp_path / "model")
    told = say_checked(str(model), "kvq_int4")
    assert told.startswith("kvq_int4 was not checked on this model; kvq generate -m MODEL --kv ")
    full = told.split("--kv ")[1].split()[0]
    assert KVRecipe.uniform(full, [(64, 64)], whole_blocks=True) == KVRecipe.uniform(full, [(64, 64)])
    assert KVRecipe.uniform(full, [(64, 64)]).layers == KVRecipe.uniform("int4", [(64, 64)]).layers
