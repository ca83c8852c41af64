"""Hold the models of `kvq models` to transformers' own code, which makes each without numbers and runs it.

python tools/model_catalogue.py --check            # all: layers, recurrent states, parameters by kind
python tools/model_catalogue.py --check NAME ...   # some
python tools/model_catalogue.py --write            # the shapes that a config.json does not say by itself

What a layer caches is read off transformers' own cache after a few tokens, not off names of fields.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvq.capacity.plan.catalogue import CATALOGUE, OF_A_LAYER, KnownModel, known_models
from kvq.errors import ConfigError, ModelError
from kvq.geometry import LayerGeometry, ModelGeometry, StateGeometry, StateTensor, parse_geometry
from kvq.geometry.support import KINDS
from kvq.models.observe.counted import count_module
from kvq.models.observe.support import check_supported
from kvq.sizing.parameters import Parameters, count_parameters

TOKENS = 7
CONTEXT = 4096  # at which RoPE that depends on lengths is pinned
# What a run without numbers can't compute, and what neither shapes nor parameters depend on.
LEFT_OUT = {"gemma3n_text": {"activation_sparsity_pattern": [0.0] * 35}}


def build(config: Mapping[str, Any]) -> Any:
    """transformers' module on the meta device; text parts that are no language model by themselves too."""
    given = {**config, **LEFT_OUT.get(config["model_type"], {})}
    about = AutoConfig.for_model(**given)
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(about, **options)
        except ValueError:
            return AutoModel.from_config(about, **options)


def cached(model: Any) -> DynamicCache:
    """Return the cache of a run of a few tokens."""
    cache = DynamicCache(config=model.config)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):  # which are chosen by numbers, and cache nothing
            module.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)
    with torch.inference_mode(), torch.device("meta"):
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return cache


def live_geometry(model: Any) -> ModelGeometry:
    """Return the geometry of a module's cache, layer by layer."""
    about, cache = model.config, cached(model)
    readers = shared(about)
    layers, states = [], []
    for number, held in enumerate(cache.layers):
        tensors = tuple(state_tensors(held))
        if tensors:
            states.append(StateGeometry(number=number, kind=mixer(model, number), tensors=tensors))
        if getattr(held, "keys", None) is not None:
            layers.append(kv_layer(about, held, len(layers), number, readers.get(number, ())))
    sinks = any(name.endswith(("sinks", "attention_sink_bias")) for name, _ in model.named_parameters())
    softcap = getattr(about, "attn_logit_softcapping", None)
    return ModelGeometry(
        model_type=about.model_type,
        layers=tuple(layers),
        q_heads=about.num_attention_heads,
        hidden_size=about.hidden_size,
        vocab_size=about.vocab_size,
        max_context=about.max_position_embeddings,
        softcap=float(softcap) if softcap else None,
        has_sinks=sinks,
        states=tuple(states),
    )


def kv_layer(about: Any, held: Any, index: int, number: int, readers: tuple[int, ...]) -> LayerGeometry:
    """One layer's, from the tensors of its cache, [1, heads, tokens, dim]."""
    rank = getattr(about, "kv_lora_rank", None)  # of latent attention
    window = held.sliding_window if isinstance(held, DynamicSlidingWindowLayer) else None
    chunk = getattr(about, "attention_chunk_size", None)
    common = {"index": index, "number": number, "readers": readers, "window": window or None}
    (_, heads, _, k), v = held.keys.shape, held.values.shape[3]
    if rank and heads == 1 and {k, v} == {rank, about.qk_rope_head_dim}:
        common |= {"k_head_dim": about.qk_rope_head_dim, "v_head_dim": rank, "is_latent": True}
        return LayerGeometry(kv_heads=1, **common)
    assert chunk is None or window in (None, chunk)
    return LayerGeometry(kv_heads=heads, k_head_dim=k, v_head_dim=v, **common)


def state_tensors(held: Any) -> list[StateTensor]:
    """A layer's recurrent state, of one sequence."""
    found = []
    for name, kept in (
        ("conv", getattr(held, "conv_states", {})),
        ("recurrent", getattr(held, "recurrent_states", {})),
    ):
        for index, tensor in sorted(kept.items()):
            if tensor is not None:
                dtype = None if tensor.dtype is torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")
                found.append(StateTensor(name=name, index=index, shape=tuple(tensor.shape[1:]), dtype=dtype))
    return found


def mixer(model: Any, number: int) -> str:
    """The class of the module that keeps a layer's state."""
    for name, module in model.named_modules():
        if re.search(rf"\blayers\.{number}\.[\w.]+$", name) and hasattr(module, "layer_idx"):
            names = {key for key, _ in module.named_parameters()}
            if any("conv" in key or "A_log" in key for key in names):
                return type(module).__name__
    raise ValueError(f"no module of layer {number} keeps a state")


def shared(about: Any) -> dict[int, tuple[int, ...]]:
    """Layers by the one whose K and V they read: the last of the same kind that stores any."""
    modes, kinds = getattr(about, "kv_sharing_modes", None), getattr(about, "layer_types", None)
    if not modes:
        return {}
    sources: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for number, (mode, kind) in enumerate(zip(modes, kinds, strict=True)):
        if mode == "reuse":
            found[sources[kind]] = (*found.get(sources[kind], ()), number)
        else:
            sources[kind] = number
    return found


def live(known: KnownModel) -> tuple[ModelGeometry, Parameters]:
    """Both, of one model."""
    model = build(known.config)
    counted = count_module(model)
    if model.get_output_embeddings() is None and not known.config.get("tie_word_embeddings"):
        counted += Parameters(head=counted.embedding)  # a text part comes without its head
    return live_geometry(model), counted


def differs(known: KnownModel) -> list[str]:
    """In what a model's entry is not as transformers' code is."""
    geometry, counted = live(known)
    found = []
    if known.geometry != geometry:
        found.append(f"geometry: {known.geometry} is {geometry}")
    if known.refused != (why := refused(known)):
        found.append(f"kvq does not run it since {known.refused}; the code says {why}")
    if known.parameters.total != counted.total:
        found.append(f"parameters: {known.parameters} are {counted}")
    return found


def refused(known: KnownModel) -> str | None:
    """Return why kvq does not run a model's text part, or None; docs/models.md has findings of proofs."""
    family = known.config["model_type"]
    if why := unproven().get(family):
        return why
    if family in {part.model_type for part in KINDS.values()}:
        return None
    if not isinstance(build(known.config), GenerationMixin):
        return "it is the language part of a model that sees, which transformers has no code for alone"
    try:
        with tempfile.TemporaryDirectory() as folder:
            check_supported(known.config, max_context=CONTEXT, folder=Path(folder))
    except ModelError as error:
        return str(error).split(": ", 1)[-1].split(" (")[0]
    return None


_UNPROVEN = "it is not among the families that were checked, and "


@cache
def unproven() -> dict[str, str]:
    """Families that a proof refuses, and why, by the page that tools/model_table.py writes."""
    _, _, rows = (
        (Path(__file__).parents[1] / "docs" / "models.md")
        .read_text(encoding="utf-8")
        .partition("### Refused")
    )
    found = re.findall(rf"^\| `([^`]+)` \| {_UNPROVEN}(.+) \|$", rows, re.M)
    return {family: why.split(" (")[0] for family, why in found}


def says_enough(known: KnownModel, geometry: ModelGeometry) -> bool:
    """True if the config's facts alone give the shape and the parameters."""
    try:
        return parse_geometry(known.config) == geometry and bool(count_parameters(known.config, geometry))
    except ConfigError:
        return False


def encode_shape(geometry: ModelGeometry) -> dict[str, Any]:
    """Write a geometry as the catalogue has it: equal layers once, with their numbers."""
    layers: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in geometry.layers:
        own = {key: value for key in OF_A_LAYER if (value := getattr(layer, key))}
        entry = layers.setdefault(tuple(own.items()), {"at": [], **own})
        entry["at"].append(layer.number)
        if layer.readers:
            entry.setdefault("readers", {})[str(layer.number)] = list(layer.readers)
    states: dict[StateGeometry, dict[str, Any]] = {}
    for state in geometry.states:
        key = StateGeometry(number=0, kind=state.kind, tensors=state.tensors)
        tensors = [[x.name, x.index, list(x.shape), x.dtype] for x in state.tensors]
        states.setdefault(key, {"at": [], "kind": state.kind, "tensors": tensors})["at"].append(state.number)
    names = ("model_type", "q_heads", "hidden_size", "vocab_size", "max_context", "softcap", "has_sinks")
    whole = {name: value for name in names if (value := getattr(geometry, name))}
    found = {**whole, "layers": list(layers.values())}
    return found | ({"states": list(states.values())} if states else {})


def write(names: list[str]) -> None:
    """Bring the shapes that configs don't say up to date."""
    data = json.loads(CATALOGUE.read_text(encoding="utf8"))
    for name in names:
        known, facts = known_models()[name], data["models"][name]
        geometry, counted = live(known)
        for key in ("refused", "shape", "counted"):
            facts.pop(key, None)
        if why := refused(known):
            facts["refused"] = why
        if not says_enough(known, geometry):
            facts["shape"] = encode_shape(geometry)
            kinds = {
                key: value
                for key in Parameters.__slots__
                if key != "matrices" and (value := getattr(counted, key))
            }
            facts["counted"] = kinds
        print(f"{name}: {counted.total / 1e9:.2f} B, {'shape' if 'shape' in facts else 'config'}", flush=True)
    save(data)


def save(data: dict[str, Any]) -> None:
    """One model a line."""
    lines = [f"    {json.dumps(name)}: {json.dumps(facts)}" for name, facts in data["models"].items()]
    head = json.dumps(data["format_version"])
    text = f'{{\n  "format_version": {head},\n  "models": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    CATALOGUE.write_text(text, encoding="utf8")


def main() -> int:
    """Check or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = options.names or list(known_models())
    if options.write:
        write(names)
        return 0
    off = 0
    for name in names:
        for line in differs(known_models()[name]):
            print(f"{name}: {line}")
            off += 1
    print(f"{len(names)} models, transformers {transformers.__version__}: {off or 'no'} differences")
    return bool(off)


if __name__ == "__main__":
    sys.exit(main())
