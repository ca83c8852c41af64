"""Forms in which an engine stores a model's weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import ConfigError, ModelError, not_one_of
from kvq.formats.checkpoints import parse_config
from kvq.formats.checkpoints.scheme import IN_BLOCKS, Rule, first_of
from kvq.formats.checkpoints.stored import NF4, Stored, stored_layers
from kvq.formats.ggml import GgmlType
from kvq.formats.weights import parse_weight_format
from kvq.sizing.parameters import Parameters

AUTO = "auto"
PLAIN = {name: Stored(name, nbytes) for name, nbytes in (("fp32", 4), ("bf16", 2), ("fp16", 2))}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NAMES = (*PLAIN, "fp8", "int8", "int4", "int3", NF4.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAs:
    """Stored forms of Linear layers, the head, and all other weights.

    `rules`: forms of Linear layers by name pattern; the first match applies, and None stands for `kept`, by
    default `other`. `head`: form of an untied head, by default that of the Linear layer `lm_head`; a form
    with scales also applies to a tied head, which is then stored separately from the embedding. `embedding`:
    form of an embedding that does not serve as the head, by default `other`.
    `shares_head`: whether an embedding that serves as the head has the head's form, not `other`.
    `has_packed_experts`: whether stacked experts have the forms of Linear layers, not `other`. `unknown`:
    name of a quant_method of unknown size. `unread`: reason why kvq can't load the stored weights.
    """

    rules: Sequence[Rule[Stored]] = ()
    other: Stored = PLAIN["fp16"]
    kept: Stored | None = None
    head: Stored | None = None
    embedding: Stored | None = None
    shares_head: bool = False
    has_packed_experts: bool = False
    unknown: str | None = None
    unread: str | None = None

    def of(self, name: str) -> Stored:
        """Return the form of the Linear layer called `name`."""
        return first_of(self.rules, name) or self.kept or self.other

    def is_shared(self, parameters: Parameters) -> bool:
        """Return True if the embedding serves as the head and has the head's form."""
        return self.shares_head and not parameters.head and not self._rounds_head

    def held_head(self, parameters: Parameters) -> tuple[int, str]:  # D181: the head has 8 bits on load
        """Return the head's bytes and form; 0 bytes if the head is the embedding, in the form `other`."""
        is_apart = self._rounds_head or self.is_shared(parameters)
        count, form = parameters.embedding if is_apart else parameters.head, self.head or self.of("lm_head")
        return round(count * form.weight_bytes + form.num_scales(count, 0) * form.scale_bytes), form.name

    @property
    def _rounds_head(self) -> bool:
        return self.head is not None and bool(self.head.scale_bytes)


def everywhere(form: Stored) -> tuple[Rule[Stored]]:
    """Return a rule that assigns the same form to all layers in blocks."""
    return ((IN_BLOCKS, form),)


def held_in_blocks(types: Mapping[str, GgmlType], other: Stored, *, on_gpu: bool) -> HeldAs:
    """Return the forms of weights that are kept in blocks of GGUF; `types`: of matrices, by layer name.

    `on_gpu`: other types, embeddings and experts are dequantized.
    """
    if on_gpu:
        types = {name: kind for name, kind in types.items() if kind.on_gpus and name != "model.embed_tokens"}
    forms = {name: Stored(kind.name.lower(), kind.panel_bytes / kind.values) for name, kind in types.items()}
    named: dict[Stored, list[str]] = {}
    for name, form in forms.items():
        named.setdefault(form, []).append(re.escape(name))
    embedding = forms.get("model.embed_tokens")
    return HeldAs(
        rules=[(re.compile(rf"(?:{'|'.join(names)})\Z"), form) for form, names in named.items()],
        other=other,
        head=forms.get("lm_head", embedding),
        embedding=embedding,
        shares_head=not on_gpu,
        has_packed_experts=not on_gpu,
    )


def held_as(config: Mapping[str, Any], weights: str = AUTO) -> HeldAs:
    """Return the forms of a checkpoint's weights on a GPU; `weights` overrides the form of Linear layers.

    Raises:
        ConfigError: there is no such weight format.
    """
    dtype = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    other = PLAIN[_DTYPES.get(dtype, "bf16")]
    scheme = unread = None
    if (said := config.get("quantization_config")) is None and weights == AUTO:
        return HeldAs(other=other)
    try:
        scheme = parse_config(said)
    except ModelError as error:
        unread = None if said is None else str(error)
    if weights == AUTO:
        values = said if isinstance(said, Mapping) else {}
        # The scales of compressed-tensors have the type of the rest; others' are 16-bit.
        rules = stored_layers(said, scheme, 4 if other.name == "fp32" and "config_groups" in values else 2)
        return HeldAs(
            rules=rules or (),
            other=other,
            has_packed_experts=unread is not None,  # in an engine that reads them
            unknown=str(values.get("quant_method")) if rules is None else None,
            unread=unread,
        )
    if weights in PLAIN:
        return HeldAs(other=PLAIN[weights], unread=unread)
    if weights == NF4.name:
        return HeldAs(rules=everywhere(NF4), other=other, unread=unread)
    try:
        rules = everywhere(Stored.of(parse_weight_format(weights)))
    except ConfigError as error:
        raise ConfigError(not_one_of("weights", weights, NAMES)) from error
    return HeldAs(rules=rules, other=other, unread=unread)
