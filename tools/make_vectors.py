"""Makes spec/vectors, by which other engines check that they store and read as kvq does: docs/spec.md.

    python -m tools.make_vectors [FOLDER]

All numbers come from Python's own generator and kvq's reference, so the same bytes come out again.
"""

import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.blockmgr import BlockManager
from kvq.cache import KVCache
from kvq.cache.digests import layout_numbers
from kvq.cache.pool import PoolBytes, paged_layer
from kvq.cache.prefix_file import save_prefix
from kvq.errors import ConfigError
from kvq.formats import (
    Centers,
    Grouped,
    HeadMaxima,
    KVFormat,
    KVRecipe,
    LayerCenters,
    StaticScales,
    parse_format,
)
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.kernels.codec import decode, encode, encode_block
from kvq.kernels.paged import PagedKV
from kvq.layout import BlockOrder, KVLayout, plan_layout

FOLDER = Path(__file__).parents[1] / "spec" / "vectors"
DIMS = (60, 64, 80, 96, 128)
STATIC_SCALE = 0.0371
NAMES = (
    *("fp32", "bf16", "fp16", "fp8", "int8", "fp8_per_head", "int8_per_head"),
    *("bf16_rot", "fp8_rot", "int8_rot", "int8_per_head_rot", "int4_g{}_rot"),
    *(f"int{bits}" for bits in (2, 3, 4, 5, 6)),
)
GROUPED = ("{}_g{}", "{}_g{}_s8")  # of every grouped code, in the group its bare name chooses
WHOLE = {  # blocks of these pairs, by the name of their vector
    "plain": "int8/int4",
    "static": "fp8_per_head/int6",
    "wide": "bf16/int4_g6",
    "means": "int4_mean/int2_mean",
    "staged": "int6/int4_mean+recent=7+sinks=4",
    "channels": "int4_per_channel/int8_per_channel_rot",
}
CHANNELS = ((60, 16), (128, 32))  # head dimension and block size
PREFIXES = {name: WHOLE[name] for name in ("plain", "staged")}
LAYERS = (((60, 48), None), ((48, 60), 16))  # (K, V) head dimensions and window
SIZE, HEADS = 5, 3
TOKENS = [*range(1000, 1020), 0, 1 << 31, 1 << 16]  # 4 blocks, and some
IDENTITY = b"the model's digest, then the recipe's"


class Vectors:
    """Test vectors in a folder: files, and the JSON that describes them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def array(self, file: str, x: Tensor) -> dict[str, Any]:
        """Append an array to a file; returns where it lies."""
        raw, before = bytes_of(x), self.files.get(file, b"")
        at = before.find(raw) if file.startswith("input") else -1  # once for all that begin with it
        at, self.files[file] = (len(before), before + raw) if at < 0 else (at, before)
        dtype = {torch.float32: "fp32", torch.uint8: "uint8"}[x.dtype]
        own = {"file": file, "offset": at, "shape": list(x.shape), "dtype": dtype}
        return {**own, "sha256": hashlib.sha256(raw).hexdigest()}

    def describe(self, name: str, vector: dict[str, Any]) -> None:
        self.files[f"{name}.vector.json"] = canonical(vector).encode()

    def index(self) -> None:
        """List every file and its digest."""
        files = {name: hashlib.sha256(raw).hexdigest() for name, raw in self.files.items()}
        sealed = hashlib.sha256(canonical(files).encode()).hexdigest()
        self.files["index.json"] = canonical({"files": files, "seal": sealed}).encode()


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True) + "\n"


def bytes_of(x: Tensor) -> bytes:
    raw: bytes = x.contiguous().view(torch.uint8).numpy().tobytes()
    return raw


def random_rows(seed: int, *shape: int) -> Tensor:
    """fp32 numbers of -3 to 3, alike on every machine."""
    source = random.Random(seed)
    numbers = [source.uniform(-3, 3) for _ in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.float32).view(shape)


def inputs(dim: int) -> Tensor:
    """fp32 [8, dim]: what is easily got wrong."""
    x = random_rows(dim, 8, dim)
    x[1] = 0.0
    x[2] = -1.7
    x[3] = x[3].abs() + 5
    x[4] = x[4].sign() * 3.4e38
    x[5] *= 1e-30
    x[6, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    x[7, 5] = 300.0
    x[7, 8:] *= torch.tensor([2.0 ** (i % 19 - 9) for i in range(dim - 8)])
    return x


def formats(name: str) -> Iterator[tuple[int, str, KVFormat]]:
    """The format of a name, `int4_g{}` for the usual group, in every head dimension that it fits."""
    for dim in DIMS:
        code = name.partition("_")[0]
        try:
            scale = parse_format(code, dim).scale
            size = scale.group_size if isinstance(scale, Grouped) else 0
            asked = name.format(size)
            yield dim, asked, parse_format(asked, dim)
        except ConfigError:
            continue


def add_rows(vectors: Vectors, name: str, clip: float = 1.0) -> None:
    """Rows of one format."""
    file = name.replace("_g{}", "_g") + ("_clip" if clip != 1 else "")
    arrays, cases = {}, []
    for dim, asked, fmt in formats(name):
        static = torch.tensor(STATIC_SCALE) if fmt.is_static else None
        x = inputs(dim)
        codes, scales = encode(x, fmt, static, clip=clip)
        held = torch.empty(len(x), 0) if scales is None else scales
        rows = {
            "codes": as_bytes(codes),
            "scales": as_bytes(held),
            "decoded": decode(codes, scales, fmt, static),
        }
        arrays[f"{dim}.input"] = vectors.array(f"input-{dim}.bin", x)
        arrays |= {f"{dim}.{part}": vectors.array(f"rows-{file}.bin", y) for part, y in rows.items()}
        own = STATIC_SCALE if fmt.is_static else None
        cases.append({"dim": dim, "asked": asked, "name": fmt.name, "static": own})
    vector = {"kind": "rows", "format": name, "clip": clip, "cases": cases, "arrays": arrays}
    vectors.describe(f"rows-{file}", vector)


def channel_blocks(dim: int, size: int) -> Tensor:
    """fp32 [1, size, dim]: channels of all ranges, so that pairs share bits in every way, and odd ones."""
    x = random_rows(1000 * dim + size, 1, size, dim)
    x *= torch.tensor([2.0 ** (i * 5 % 19 - 9) for i in range(dim)])
    x[:, 3:5] = 0.0  # rows
    low, high = x.aminmax(dim=1, keepdim=True)
    x[..., ::7] += (100 * (high - low))[..., ::7]
    x[..., 5::7] -= (100 * (high - low))[..., 5::7]
    x[..., 1], x[..., 2], x[..., 3], x[..., 4] = 0.0, -1.7, 2.5, 3e-6
    x[..., 8] = x[..., 8].sign() * 3.4e38
    x[..., 9] *= 1e-42
    x[..., 10] = 3.4e38
    x[:, 7, 11:15] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    return x


def add_channels(vectors: Vectors, code: str) -> None:
    """Blocks of one format with scales per channel."""
    name, arrays, cases = f"{code}_per_channel", {}, []
    for dim, size in CHANNELS:
        try:
            fmt = parse_format(name, dim)
        except ConfigError:
            continue
        x = channel_blocks(dim, size)
        codes, scales, _ = encode_block(x, fmt)
        assert scales is not None, f"{name} stores scales"
        parts = {"codes": codes.view(torch.uint8), "scales": scales, "decoded": decode(codes, scales, fmt)}
        arrays[f"{dim}x{size}.input"] = vectors.array("input-channels.bin", x)
        arrays |= {f"{dim}x{size}.{p}": vectors.array(f"channels-{code}.bin", y) for p, y in parts.items()}
        cases.append({"dim": dim, "block_size": size, "name": fmt.name})
    vector = {"kind": "channels", "format": name, "cases": cases, "arrays": arrays}
    vectors.describe(f"channels-{code}", vector)


def as_bytes(x: Tensor) -> Tensor:
    """uint8 [rows, bytes]."""
    if not x.shape[-1]:
        return torch.empty(len(x), 0, dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)


def geometry() -> ModelGeometry:
    layers = tuple(
        LayerGeometry(index=i, kv_heads=HEADS, k_head_dim=k, v_head_dim=v, window=window)
        for i, ((k, v), window) in enumerate(LAYERS)
    )
    return ModelGeometry(
        model_type="none",
        layers=layers,
        q_heads=HEADS,
        hidden_size=64,
        vocab_size=64,
        max_context=4096,
    )


def static_scales() -> StaticScales:
    parts = ("k", "v", "k_rotated", "v_rotated")
    layers = tuple(
        HeadMaxima(
            **{p: tuple(2.5 + i / 8 + h / 4 + n / 3 for h in range(HEADS)) for n, p in enumerate(parts)}
        )
        for i in range(len(LAYERS))
    )
    return StaticScales(model_digest="5" * 32, text_digest="7" * 64, tokens=4096, layers=layers)


def layout_of(kv: str, order: BlockOrder = BlockOrder.LAYER_MAJOR) -> KVLayout:
    model = geometry()
    recipe = KVRecipe.uniform(kv, model.head_dims)
    if recipe.is_static:
        recipe = recipe.with_scales(static_scales())
    return plan_layout(model, recipe, block_size=SIZE, order=order)


def described(layout: KVLayout) -> dict[str, Any]:
    """Return the facts with which the checker makes the same layout."""
    names = ("kv_heads", "k_head_dim", "v_head_dim", "window")
    layers = [{name: getattr(layer, name) for name in names} for layer in layout.geometry.layers]
    return {"geometry": layers, "block_size": layout.block_size, "recipe": layout.recipe.to_json()}


def store(kv: PagedKV, rows: tuple[Tensor, Tensor], block: int) -> None:
    """Encode K and V of a whole block, fp32 [kv_heads, block_size, dim] each."""
    formats = kv.formats
    halves = ((kv.k, formats.k, formats.k_clip), (kv.v, formats.v, formats.v_clip))
    for x, (own, fmt, clip) in zip(rows, halves, strict=True):
        static = None if own.static_scale is None else own.static_scale[:, None, None]
        codes, scales, means = encode_block(x, fmt, static, clip=clip)
        own.codes[block] = codes
        if own.scales is not None:
            own.scales[block, :, : scales.shape[1]] = scales
        if own.means is not None:
            own.means[block] = means


def layer_rows(layer: int, blocks: int) -> tuple[Tensor, Tensor]:
    """K and V, fp32 [blocks, kv_heads, block_size, dim], with a constant offset and an outlier."""
    found = []
    for half, dim in enumerate(LAYERS[layer][0]):
        x = random_rows(100 * layer + 10 * half, blocks, HEADS, SIZE, dim) + 1.5
        x[..., 2] *= 9
        found.append(x.bfloat16().float())  # as the staging area holds them
    return found[0], found[1]


def add_blocks(vectors: Vectors, name: str, kv: str, count: int = 2) -> None:
    """Whole blocks of all layer groups in both orders; what only pads is zero."""
    arrays, layout = {}, layout_of(kv)
    rows = [layer_rows(i, count) for i in range(len(LAYERS))]
    for i, halves in enumerate(rows):
        for part, x in zip("kv", halves, strict=True):
            arrays[f"layer{i}.{part}"] = vectors.array("input-blocks.bin", x)
    for order in BlockOrder:
        for g, group in enumerate(layout_of(kv, order).groups):
            pool = PoolBytes(group, count, torch.device("cpu"))
            for position, layer in enumerate(group.layers):
                view = pool.layer(position, layout.recipe)
                for block in range(count):
                    k, v = rows[layer.geometry.index]
                    store(view, (k[block], v[block]), block)
            arrays[f"group{g}.{order.value}"] = vectors.array(f"blocks-{name}.bin", pool.memory)
    numbers = [layout_numbers(group) for group in layout.groups]
    vector = {"kind": "blocks", "layout": described(layout), "num_blocks": count, "groups": numbers}
    vectors.describe(f"blocks-{name}", {**vector, "arrays": arrays})


def add_prefix(vectors: Vectors, name: str, kv: str, folder: Path) -> None:
    """A prefix file of TOKENS, and of as many more as have to follow a block before it is indexed."""
    layout, file = layout_of(kv), f"{name}.kvqprefix"
    tokens = [*TOKENS, *range(layout.recipe.exact.recent)]
    cache = KVCache(
        layout, num_blocks=[8] * len(layout.groups), device=torch.device("cpu"), backend="reference"
    )
    manager = BlockManager(num_blocks=cache.num_blocks, block_size=SIZE, identity=IDENTITY, **layout.holding)
    prompt = manager.prompt(tokens)
    sequence = manager.start(prompt)
    manager.append([(sequence, len(tokens))])
    cache.carry_out(manager.take_orders())
    full = len(tokens) // SIZE
    for g, group in enumerate(layout.groups):
        for position, layer in enumerate(group.layers):
            base, stride = group.base(position, 8), group.block_stride(position)
            view = paged_layer(cache.pool(g)[base:], layer, layout.recipe, stride, 8)
            k, v = layer_rows(layer.geometry.index, full)
            for index, block in enumerate(sequence.tables[g][:full]):
                store(view, (k[index], v[index]), block)
    manager.commit(sequence)
    manager.free(sequence)
    save_prefix(folder / file, cache, manager, prompt)
    vectors.files[file] = ordered((folder / file).read_bytes())
    chained = [prompt.root, *(manager.blocks.index.digest_at(prompt, i) for i in range(full))]
    vector = {"kind": "prefix", "file": file, "layout": described(layout), "tokens": tokens, "tenant": ""}
    ends = {"identity": IDENTITY.hex(), "chain": [x.hex() for x in chained]}
    vectors.describe(f"prefix-{name}", {**vector, **ends})


def ordered(raw: bytes) -> bytes:
    """A safetensors file with its metadata in order: safetensors writes them in any."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    return raw[:8] + text.ljust(end - 8) + raw[end:]


def add_recipe(vectors: Vectors, folder: Path) -> None:
    """A kvq.json with all that it can hold."""
    plain = KVRecipe.uniform("int4/int2+sinks=4+recent=64", geometry().head_dims)
    centers = tuple(
        LayerCenters(k=tuple(tuple(random_rows(7 * h + k, k).tolist()) for h in range(HEADS)))
        for (k, _), _ in LAYERS
    )
    recipe = KVRecipe(
        layers=plain.layers,
        exact=plain.exact,
        static_scales=static_scales(),
        centers=Centers(model_digest="5" * 32, text_digest="7" * 64, tokens=4096, layers=centers),
        model_digest="5" * 32,
    )
    recipe.save(folder / "kvq.json")
    vectors.files["kvq.json"] = (folder / "kvq.json").read_bytes()
    vectors.describe("recipe", {"kind": "recipe", "file": "kvq.json", "digest": recipe.digest()})


def make(folder: Path) -> None:
    """Write all vectors to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vectors = Vectors()
    for name in NAMES:
        add_rows(vectors, name)
    for code in ("int2", "int3", "int4", "int5", "int6"):
        for pattern in GROUPED:
            add_rows(vectors, pattern.format(code, "{}"))
    add_rows(vectors, "int2", clip=0.7)
    for code in ("int8", "int6", "int5", "int4", "int3", "int2"):
        add_channels(vectors, code)
    for name, kv in WHOLE.items():
        add_blocks(vectors, name, kv)
    for name, kv in PREFIXES.items():
        add_prefix(vectors, name, kv, folder)
    add_recipe(vectors, folder)
    vectors.index()
    for name, raw in vectors.files.items():
        (folder / name).write_bytes(raw)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
