"""Chunks of K and V, stored as kvq blocks in one sealed byte string. Does not require LMCache.

    magic, 8 bytes | version, 4 | length of the header, 4 | seal of the header, 64 | header, JSON | blocks

The header states the layout, place and digest of the blocks. A chunk is refused if any byte differs from
what was written, or if the chunk belongs to another model, format or place.
"""

import hashlib
import json
import struct
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.cache import KVCache
from kvq.cache.digests import block_digest, digest_context, header_text, layout_digest, seal
from kvq.errors import ConfigError, DamagedData, NumericalError
from kvq.formats import ExactTokens, KVRecipe
from kvq.geometry import LayerGeometry, ModelGeometry
from kvq.layout import BLOCK_SIZE, BlockOrder, KVLayout, plan_layout

FORMAT_VERSION = 1
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MAGIC = b"kvqchunk"
_FRONT = struct.Struct("<8sII64s")
_AGAIN = "compute these tokens again"
_WRONG = {  # header fields that may differ, the most informative first
    "recipe": "it was made with another format or recipe",
    "shape": "it holds another number of layers, tokens or channels",
    "dtype": "it was made of another dtype",
    "layout": "it was made for another layout: block size, layers or their formats differ",
    "place": "it belongs to another chunk",
}


class ChunkCodec:  # D350: chunks are block-major blocks, whose bytes are the payload
    """Codec for chunks with fixed layers, channels and dtype, and any number of tokens. Not thread-safe."""

    def __init__(
        self,
        kv: str | Path | KVRecipe,
        *,
        num_layers: int,
        channels: int,
        dtype: torch.dtype,
        head_dim: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`kv`: a format, a K/V pair, or a kvq.json, as in `--kv`. `channels`: KV heads times `head_dim`, for
        K and for V each. `head_dim` may be omitted if `kv` is a recipe.

        Raises:
            ConfigError: the format, recipe or dtype can't be used for such chunks.
            UnsupportedKernel: no kernel supports the formats on this device.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"chunks must be {', '.join(DTYPES.values())}, got {dtype}")
        recipe, dims = _recipe(kv, num_layers, head_dim)
        check_recipe(recipe)
        self._shape, self._dtype = (num_layers, channels), dtype
        self._layout = _layout(recipe, channels, dims)
        [group] = self._layout.groups
        self._block_bytes = group.block_bytes
        self._context = digest_context(group, recipe)
        self._cache = KVCache(self._layout, num_blocks=[1], device=device or torch.device("cpu"))

    def nbytes(self, num_tokens: int) -> int:
        """Return the exact size of an encoded chunk in bytes."""
        header = header_text(self._header(num_tokens, "", "0" * 32))
        return _FRONT.size + len(header) + self._num_blocks(num_tokens) * self._block_bytes

    def encode(self, chunk: Tensor, out: Tensor, place: str = "") -> int:
        """Encode K and V into the first bytes of `out`; return the number of bytes.

        `chunk`: [2, layers, tokens, channels]; `out`: uint8 [at least `nbytes(tokens)`] on the host. `place`
        names the chunk; decoding requires the same name.

        Raises:
            ConfigError: `chunk` has the wrong shape or dtype, or `out` has too few bytes.
            NumericalError: K or V contain NaN or infinity.
        """
        num_tokens, blocks = self._check(chunk), self._blocks(chunk.shape[2])
        needed = self.nbytes(num_tokens)
        if out.dtype != torch.uint8 or out.numel() < needed:
            raise ConfigError(f"a coded chunk takes {needed} bytes, got {out.numel()} of {out.dtype}")
        self._cache.scrub(0, [self._num_blocks(num_tokens) - 1])  # zero the slots after the last token
        slots = torch.arange(num_tokens, device=chunk.device)
        table = range(self._num_blocks(num_tokens))
        for layer, (k, v) in enumerate(self._rows(chunk)):
            if self._layout.recipe.is_staged:
                self._cache.stores[layer].write_blocks(_whole_blocks(k), _whole_blocks(v), table)
                bad = ~(k.isfinite().all() & v.isfinite().all())
            else:
                bad = self._cache.write(layer, k, v, slots).any()
            if bool(bad):
                raise NumericalError(f"K or V of layer {layer} hold NaN or infinity; the chunk is not stored")
        content = blocks.cpu()
        digest = block_digest(content, 0, self._context).hex()
        header = header_text(self._header(num_tokens, place, digest)).encode()
        front = _FRONT.pack(_MAGIC, FORMAT_VERSION, len(header), seal(header.decode()).encode()) + header
        out[: len(front)] = torch.frombuffer(bytearray(front), dtype=torch.uint8)
        out[len(front) : needed] = content
        return needed

    def decode(self, content: Tensor, out: Tensor, place: str = "") -> None:
        """Check every byte of a chunk, then dequantize its K and V into `out`.

        `content`: uint8 [`nbytes(tokens)`] on the host, from `encode`. `out`: [2, layers, tokens, channels].

        Raises:
            ConfigError: `out` has the wrong shape or dtype.
            DamagedData: `content` is not such a chunk, or was changed; `out` is left unchanged.
        """
        num_tokens = self._check(out)
        header, payload = _parts(content)
        expected = self._header(num_tokens, place, "")
        for name, why in _WRONG.items():
            if header.get(name) != expected[name]:
                raise DamagedData(f"a stored chunk can't be used: {why}; {_AGAIN}")
        blocks = self._blocks(num_tokens)
        if payload.numel() != blocks.numel():
            raise DamagedData(
                f"a stored chunk holds {payload.numel()} bytes of blocks, expected {blocks.numel()}: it is "
                f"cut short, or too long; {_AGAIN}"
            )
        if header != {**expected, "blocks": block_digest(payload, 0, self._context).hex()}:
            raise DamagedData(f"a stored chunk's blocks are damaged; {_AGAIN}")
        blocks.copy_(payload)
        table = torch.arange(self._num_blocks(num_tokens), device=out.device)[None]
        for layer, rows in enumerate(self._rows(out)):
            k, v = (x.transpose(0, 1)[None] for x in rows)  # [1, kv_heads, tokens, head_dim]
            self._cache.gather(layer, table, 0, num_tokens, unrotate=True, out=(k, v))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)

    def _blocks(self, num_tokens: int) -> Tensor:
        """Return the uint8 bytes of the blocks for `num_tokens` tokens; grow the pool if necessary."""
        count = self._num_blocks(num_tokens)
        if count > self._cache.num_blocks[0]:
            self._cache.grow([count])
        return self._cache.pool(0)[: count * self._block_bytes]

    def _check(self, chunk: Tensor) -> int:
        """Return the number of tokens in a chunk; raise ConfigError if the shape or dtype is wrong."""
        layers, channels = self._shape
        if chunk.ndim != 4 or (chunk.shape[0], chunk.shape[1], chunk.shape[3]) != (2, layers, channels):
            raise ConfigError(
                f"a chunk must be [2, {layers}, tokens, {channels}] of K and V, got {list(chunk.shape)}"
            )
        if chunk.dtype != self._dtype or chunk.shape[2] < 1:
            raise ConfigError(
                f"a chunk must be {DTYPES[self._dtype]} of at least one token, got {chunk.dtype} "
                f"{list(chunk.shape)}"
            )
        return chunk.shape[2]

    def _rows(self, chunk: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return K and V of every layer as views of shape [tokens, kv_heads, head_dim]."""
        heads = self._layout.geometry.kv_heads
        return [
            (k.unflatten(-1, (count, -1)), v.unflatten(-1, (count, -1)))
            for k, v, count in zip(chunk[0], chunk[1], heads, strict=True)
        ]

    def _header(self, num_tokens: int, place: str, blocks: str) -> dict[str, Any]:
        return {
            "recipe": self._layout.recipe.digest(),
            "layout": layout_digest(self._layout),
            "shape": [2, self._shape[0], num_tokens, self._shape[1]],
            "dtype": DTYPES[self._dtype],
            "place": hashlib.sha256(place.encode("utf-8", "surrogatepass")).hexdigest(),
            "blocks": blocks,  # xxh3-128 of the blocks' bytes
        }


def _whole_blocks(x: Tensor) -> Tensor:
    """[tokens, kv_heads, dim] -> [blocks, kv_heads, BLOCK_SIZE, dim]; the last row is repeated as padding."""
    missing = -len(x) % BLOCK_SIZE
    whole = torch.cat((x, x[-1:].expand(missing, -1, -1))) if missing else x
    return torch.reshape(whole, (-1, BLOCK_SIZE, *x.shape[1:])).transpose(1, 2)


def check_recipe(recipe: KVRecipe) -> None:
    """Raise ConfigError for a recipe with permanently unquantized tokens, or with a registered format."""
    recipe.check_stored("LMCache")
    if recipe.exact != ExactTokens():
        raise ConfigError(
            f"{recipe.name} keeps first or recent tokens unquantized, and a chunk may lie anywhere in a "
            f"text; leave out +sinks= and +recent="
        )


def _recipe(kv: str | Path | KVRecipe, num_layers: int, head_dim: int | None) -> tuple[KVRecipe, list[int]]:
    """Return the recipe, and the head dimension of every layer."""
    if isinstance(kv, KVRecipe) or str(kv).endswith(".json"):
        recipe = KVRecipe.named(kv, [])
        dims = [(layer.k_head_dim, layer.v_head_dim) for layer in recipe.layers]
        if len(dims) != num_layers:
            raise ConfigError(
                f"the recipe is for {len(dims)} layers, the chunk has {num_layers}; name a format"
            )
        if any(k != v for k, v in dims):
            raise ConfigError(
                f"K and V of a chunk have as many channels, the recipe's head dimensions are {dims}"
            )
        if head_dim not in (None, *(k for k, _ in dims)):
            raise ConfigError(f"head_dim={head_dim}, but the recipe has {sorted(set(dims))}; leave it out")
        return recipe, [k for k, _ in dims]
    if head_dim is None:
        raise ConfigError(f"chunks don't tell their heads apart: give head_dim, the model's, with {kv}")
    recipe = KVRecipe.named(kv, [(head_dim, head_dim)] * num_layers, whole_blocks=True)
    return recipe, [head_dim] * num_layers


def _layout(recipe: KVRecipe, channels: int, dims: list[int]) -> KVLayout:
    for dim in dims:
        if dim < 1 or channels % dim:
            raise ConfigError(f"a token's {channels} channels must be a multiple of head_dim, got {dim}")
    layers = tuple(
        LayerGeometry(index=i, kv_heads=channels // dim, k_head_dim=dim, v_head_dim=dim)
        for i, dim in enumerate(dims)
    )
    geometry = ModelGeometry(
        model_type="chunk",
        layers=layers,
        q_heads=lcm(*(layer.kv_heads for layer in layers)),
        hidden_size=channels,
        vocab_size=1,
        max_context=1,
    )
    return plan_layout(geometry, recipe, block_size=BLOCK_SIZE, order=BlockOrder.BLOCK_MAJOR, staging=False)


def _parts(content: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the header and blocks of an encoded chunk; raise DamagedData if the header is invalid."""
    raw = content[: _FRONT.size].numpy().tobytes()
    if len(raw) < _FRONT.size or not raw.startswith(_MAGIC):
        raise DamagedData(f"a stored chunk is cut short, damaged or none of kvq's; {_AGAIN}")
    _, version, size, found = _FRONT.unpack(raw)
    if version != FORMAT_VERSION:
        raise DamagedData(
            f"a stored chunk is of version {version}, this kvq reads {FORMAT_VERSION}; {_AGAIN}"
        )
    text = content[_FRONT.size : _FRONT.size + size].numpy().tobytes()
    if len(text) != size or found != seal(text.decode("utf-8", "replace")).encode():
        raise DamagedData(f"a stored chunk's header is cut short or damaged; {_AGAIN}")
    header: dict[str, Any] = json.loads(text)
    return header, content[_FRONT.size + size :]
