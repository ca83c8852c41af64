"""A model without its weights: anything that can't work is rejected before the weights are read."""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, TypedDict, Unpack

import torch

from kvq import strict_json
from kvq.arguments import checked
from kvq.cache.backend import CacheBackend, cache_backend, with_stores
from kvq.cache.kv_cache import KVCache
from kvq.errors import ConfigError, ModelError, first_lines, nearest
from kvq.formats import KVRecipe, StaticScales
from kvq.formats.tensor_entry import TensorEntry
from kvq.formats.weights import Inputs, WeightFormat, parse_weight_format
from kvq.geometry import ModelGeometry
from kvq.geometry.support import rope_types
from kvq.kernels import check_backend
from kvq.layout import BLOCK_SIZE, BlockOrder, KVLayout, check_recipe_fits, named_recipe, plan_layout
from kvq.models.describe.checkpoint import content_digest, is_gguf, weight_files
from kvq.models.describe.config_values import check_headers, check_values
from kvq.models.describe.ends import read_end_ids
from kvq.models.describe.kv_scales import is_kv_scale, read_kv_scales
from kvq.models.describe.resolve import ModelSource, resolve_model
from kvq.models.describe.text_part import read_config, read_entries
from kvq.models.gguf.files import RECIPE, read_gguf
from kvq.models.loading.quantized import check_scheme
from kvq.models.loading.tokenizer import check_vocabulary, load_tokenizer
from kvq.models.observe.support import check_supported
from kvq.models.parts.device import DTYPE_NAMES, pick_device, pick_dtype
from kvq.models.parts.fork_guard import Home
from kvq.weights.manifest import check_manifest

_ACTIVATIONS = {"auto": Inputs.GROUPS, "full": Inputs.FULL}
# D185: names the model that the folder was made from
QUANTIZED_FROM = "kvq_quantized_from"  # key of config.json: name and digest of the original model


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A located model, described by its small files and tensor headers; returned by `prepare`."""

    source: ModelSource
    config: Mapping[str, Any]  # config.json, or its text part
    geometry: ModelGeometry
    entries: tuple[TensorEntry, ...]  # the tensors of all weight files
    device: torch.device
    dtype: torch.dtype  # the dtype of computation
    rounded_to: WeightFormat | None  # the format that Linear layers are rounded to while they are loaded
    block_inputs: Inputs = Inputs.GROUPS  # rounding of the inputs of weights in GGUF blocks
    max_context: int  # tokens
    block_size: int
    order: BlockOrder
    backend: str
    cache: str
    exact: bool = False  # the same bits in any batch, chunks and threads; checked when the weights are loaded

    @property
    def folder(self) -> Path:
        """Folder of the model's files, or the first of its GGUF files."""
        return self.source.folder

    @property
    def is_gguf(self) -> bool:
        """True if the model is in GGUF files."""
        return is_gguf(self.folder)

    @property
    def stored_bytes(self) -> int:
        """Size of all stored tensors in bytes."""
        return sum(entry.end - entry.begin for entry in self.entries)

    @property
    def stored_values(self) -> int:
        """Number of values in all stored tensors."""
        return sum(prod(entry.shape) for entry in self.entries)

    @property
    def is_quantized(self) -> bool:
        """True if the weights are stored as codes."""
        if self.is_gguf:
            return any(not entry.kind.is_float for entry in self.entries)
        return self.config.get("quantization_config") is not None

    @property
    def recipe_beside(self) -> Path:
        """Path of the kvq.json that belongs to the model, which need not exist; of x.gguf, x.kvq.json."""
        return self.folder.with_suffix(".kvq.json") if self.is_gguf else self.folder / "kvq.json"

    @property
    def recipe_inside(self) -> KVRecipe | None:
        """The recipe in a GGUF file's metadata; None if there is none.

        Raises:
            ConfigError: it is damaged.
        """
        text = read_gguf(self.folder).metadata.get(RECIPE) if self.is_gguf else None
        try:
            return None if text is None else KVRecipe.from_json(strict_json.loads(str(text)))
        except ValueError as error:
            raise ConfigError(f"{RECIPE} in {self.folder}: {first_lines(error)}") from error

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            ModelError: the folder has no tokenizer that loads without running its code, or one for another
                model.
        """
        tokenizer = load_tokenizer(self.folder)
        check_vocabulary(tokenizer, self.folder, self.geometry.vocab_size)
        return tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text; empty if no file of the model lists any.

        Raises:
            ModelError: generation_config.json is not a JSON object.
        """
        own = None  # without a tokenizer, prompts are token ids
        with suppress(ModelError):
            own = self.tokenizer.eos_token_id
        return read_end_ids(self.folder, self.config, own, self.geometry.vocab_size)

    @property
    def digest(self) -> str:
        """Digest of all checkpoint tensors; waits for its computation, which is started if necessary."""
        return self._digest.result()

    def begin_digest(self) -> None:
        """Start computing the digest in a thread, while the weights are loaded from the same pages."""
        _ = self._digest

    @cached_property
    def _digest(self) -> Future[str]:
        future: Future[str] = Future()

        def compute() -> None:
            try:
                future.set_result(content_digest(weight_files(self.folder)))
            except BaseException as error:  # noqa: BLE001 - raised again by `digest`
                future.set_exception(error)

        Thread(target=compute, name="kvq-digest", daemon=True).start()
        return future

    def recipe(
        self,
        kv: str | Path | KVRecipe,
        scales: StaticScales | None = None,
        *,
        whole_blocks: bool | None = None,
    ) -> KVRecipe:
        """Return the recipe that `kv` stands for with this model.

        `scales`: used if the recipe is static and has no scales. `whole_blocks`: as in
        `KVRecipe.uniform`; None: True for kvq's own cache only.

        Raises:
            UnfitFormat: the format doesn't fit the head dimensions; another format may.
            ConfigError: the format is unknown, or the recipe was made for other layers.
        """
        kv = DTYPE_NAMES[self.dtype] if kv == "auto" else kv
        wait = self.cache == "kvq" if whole_blocks is None else whole_blocks
        recipe = named_recipe(kv, self.geometry, whole_blocks=wait)
        check_recipe_fits(self.geometry, recipe)
        if recipe.is_static and recipe.static_scales is None:
            return recipe.with_scales(scales)
        return recipe

    def layout(self, recipe: KVRecipe) -> KVLayout:
        """Return the block layout of a recipe.

        Raises:
            ConfigError: the block size is out of range, or the recipe was made for other layers.
        """
        return plan_layout(self.geometry, recipe, block_size=self.block_size, order=self.order)

    def check_scales(self, recipe: KVRecipe) -> None:
        """Raise ConfigError if a recipe lacks its static scales or contains another model's data."""
        recipe.require_scales()
        if recipe.is_bound:
            self.check_belongs(recipe)

    def check_belongs(self, recipe: KVRecipe) -> None:
        """Raise ConfigError unless a recipe was calibrated on this model, not on its unquantized original."""
        try:
            recipe.check_belongs(model_digest=self.digest, kv_heads=self.geometry.kv_heads)
        except ConfigError as error:
            if not self._was_quantized_from_the_model_of(recipe):
                raise ConfigError(f"{recipe.label}: {error}" if recipe.label else str(error)) from error
            raise ConfigError(
                f"{recipe.label or 'the recipe'} was made for the unquantized model that {self.folder} was "
                f"quantized from; formats and scales are found on the model that serves: "
                f"kvq tune {self.folder} --out kvq.json, or kvq calibrate"
            ) from error

    def _was_quantized_from_the_model_of(self, recipe: KVRecipe) -> bool:
        origin = self.config.get(QUANTIZED_FROM)
        if not isinstance(origin, Mapping):
            return False
        try:
            recipe.check_belongs(model_digest=str(origin.get("digest")), kv_heads=self.geometry.kv_heads)
        except ConfigError:
            return False
        return True

    def check_kernels(self, recipe: KVRecipe) -> None:
        """Try the recipe's kernels on a block of each layer group.

        Raises:
            UnsupportedKernel: no kernel runs on this machine, or the named backend has none.
            ConfigError: the cache backend can't store the recipe.
        """
        layout = self.layout(recipe)
        make_cache(self, layout, num_blocks=[1] * len(layout.groups))


class LoadOptions(TypedDict, total=False):
    """Options for loading a model and storing its K and V."""

    device: str  # "auto", the default: the first GPU, or the CPU
    dtype: str  # the computation dtype; "auto", the default: fp32 on a CPU, else the config's
    max_context: int | None  # tokens; None, the default: the model's own
    weights: str  # the format that Linear layers are rounded to; "auto", the default: as stored
    activations: str  # inputs of weights in GGUF blocks: "auto", the default, in 8 bits; "full": in 16
    block_size: int  # tokens; by default BLOCK_SIZE
    order: BlockOrder  # by default LAYER_MAJOR
    backend: str  # the kernel backend; by default "auto"
    cache: str  # a cache backend; by default "kvq"
    exact: bool  # refuse a model whose results depend on how tokens are divided into steps; by default False
    revision: str | None  # on the hub
    token: str | None  # for the hub


def _check_names(given: Mapping[str, object]) -> None:
    """Raise ConfigError if an option is unknown."""
    known = sorted(LoadOptions.__annotations__)
    for name in given:
        if name not in known:
            hint = nearest(name, known) or ";"
            raise ConfigError(f"unknown option {name!r}{hint} known: {', '.join(known)}")


@checked
def prepare(model: str | Path | ModelSource, **given: Unpack[LoadOptions]) -> PreparedModel:  # D207
    """Find a model and check everything that can be checked without reading its weights.

    Raises:
        ModelError: the model is missing, damaged or unsupported.
        ConfigError: an option is unknown or can't be used as given.
        EngineError: this process was forked from one in which an engine's thread was running.
    """
    _check_names(given)
    backend, cache = given.get("backend", "auto"), given.get("cache", "kvq")
    max_context = given.get("max_context")
    Home.check_fork()
    check_backend(backend)
    if cache != "kvq" and backend != "auto":
        raise ConfigError(
            f"--backend {backend} names kernels of kvq's own cache, but the cache is {cache!r}; leave one out"
        )
    cache_backend(cache)
    device, weights = pick_device(given.get("device", "auto")), given.get("weights", "auto")
    if given.get("exact", False):
        _check_can_be_exact(device, cache)
    rounded_to = None if weights == "auto" else parse_weight_format(weights)
    if (activations := given.get("activations", "auto")) not in _ACTIVATIONS:
        raise ConfigError(f"activations must be {' or '.join(_ACTIVATIONS)}, got {activations!r}")
    source = resolve_model(model, revision=given.get("revision"), token=given.get("token"))
    check_manifest(source.folder)
    config = read_config(source.folder)
    geometry = check_supported(config, max_context=max_context, folder=source.folder)
    if cache != "kvq":  # other caches attend over K and V of heads, not latents
        geometry = geometry.expanded()
    check_values(source.folder, config, geometry.vocab_size)
    dtype = pick_dtype(given.get("dtype", "auto"), device, config)
    if config.get("quantization_config") is not None:
        check_scheme(source.folder, config["quantization_config"])
    context = _context(geometry, max_context, dynamic="dynamic" in rope_types(config))
    block_size, order = given.get("block_size", BLOCK_SIZE), given.get("order", BlockOrder.LAYER_MAJOR)
    plan_layout(geometry, KVRecipe.uniform("fp32", geometry.head_dims), block_size=block_size, order=order)
    entries = read_entries(source.folder)
    check_headers(source.folder, config, geometry, entries)
    prepared = PreparedModel(
        source=source,
        config=config,
        geometry=geometry.computed_in(str(dtype).removeprefix("torch.")),
        entries=entries,
        device=device,
        dtype=dtype,
        rounded_to=rounded_to,
        block_inputs=_ACTIVATIONS[activations] if device.type == "cpu" else Inputs.FULL,
        max_context=context,
        block_size=block_size,
        order=order,
        backend=backend,
        cache=cache,
        exact=given.get("exact", False),
    )
    if rounded_to is not None and prepared.is_quantized:
        raise ConfigError(
            f"{source.folder} holds quantized weights already; leave out weights={weights!r} (--weights)"
        )
    return prepared


def _check_can_be_exact(device: torch.device, cache: str) -> None:
    """Raise ConfigError if no model is exact on this device or over this cache."""
    if device.type != "cpu":
        raise ConfigError(
            "exact needs a CPU: on GPUs, torch's products give a row other bits in another batch; give "
            "device=cpu (--device cpu), or leave exact out"
        )
    if cache != "kvq":
        raise ConfigError(f"exact needs kvq's own cache, not {cache!r}; leave out cache (--cache), or exact")


def make_cache(
    model: PreparedModel, layout: KVLayout, *, num_blocks: list[int], backend: str | None = None
) -> CacheBackend:
    """Return a cache with `num_blocks` blocks per layer group; it is kvq's own if `backend` names kernels.

    Raises:
        ConfigError: the cache backend can't store the layout's recipe.
        OutOfMemory: the blocks don't fit.
        UnsupportedKernel: no kernel on this machine runs the recipe.
    """
    if model.cache == "kvq" or backend is not None:
        kernels = backend or model.backend
        return KVCache(layout, num_blocks=num_blocks, device=model.device, backend=kernels)
    layout.recipe.check_unstaged(f"the cache {model.cache!r}")
    if layout.states is not None:
        raise ConfigError(f"the cache {model.cache!r} keeps no recurrent states, which this model has")
    return with_stores(cache_backend(model.cache)(layout, num_blocks=num_blocks, device=model.device))


def find_scales(model: PreparedModel, path: str | Path | None) -> StaticScales | None:
    """Return static scales from the kvq.json at `path`, else beside the model, else from its own files.

    Raises:
        ConfigError: the file is unreadable, or contains no static scales or those of another model.
    """
    beside = model.recipe_beside
    if path is None and not beside.is_file() and (inside := model.recipe_inside) is not None:
        return inside.static_scales
    if path is None and not beside.is_file():
        names = [entry.name for entry in model.entries if is_kv_scale(entry.name)]
        if (layers := read_kv_scales(model.folder, model.geometry, names)) is None:
            return None
        return StaticScales(model_digest=model.digest, text_digest="", tokens=0, layers=layers)
    if path is None:
        return KVRecipe.load(beside).static_scales
    recipe = KVRecipe.load_scales(path)
    check_recipe_fits(model.geometry, recipe)
    model.check_belongs(recipe)
    return recipe.static_scales


def _context(geometry: ModelGeometry, max_context: int | None, *, dynamic: bool) -> int:  # D212
    if max_context is None:
        return geometry.max_context
    if max_context < 1 or (max_context > geometry.max_context and not dynamic):
        raise ConfigError(
            f"a context of {max_context} tokens was asked for; this model takes 1 to {geometry.max_context}"
        )
    return max_context
