"""Text models that exist in transformers only as components of vision-language models.

With a language modeling head, they are ordinary causal language models.
"""

from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

# The heads of the full models are plain Linear layers, too.
_BARE = (
    *("glm4v_text", "glm4v_moe_text", "glm_ocr_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
)


class _Inputs(TypedDict, total=False):
    """Keyword arguments that `generate` and kvq's sessions pass to a model; others are passed on, too."""

    input_ids: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    past_key_values: Any
    inputs_embeds: Tensor | None
    use_cache: bool | None
    kvq_step: Any


def know_text_model(model_type: str) -> None:
    """Register a causal language model class for a text model for which transformers has none."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    if model_type not in _BARE:
        return
    config = type(AutoConfig.for_model(model_type))
    if config not in AutoModelForCausalLM._model_mapping:
        made = _with_head(config, AutoModel._model_mapping[config])
        AutoModelForCausalLM.register(config, made, exist_ok=True)  # otherwise refused: it is not remote code
        _convert_alike(made.__name__, model_type)


def _convert_alike(name: str, model_type: str) -> None:
    """Convert a class's tensors as in the full model, since checkpoints store each expert separately."""
    from transformers.conversion_mapping import (
        WeightConverter,
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    if get_checkpoint_conversion_mapping(model_type) is None:
        found = get_checkpoint_conversion_mapping(model_type.removesuffix("_text")) or []
        joined = [one for one in found if isinstance(one, WeightConverter)]
        register_checkpoint_conversion_mapping(name, joined, overwrite=True)


def _with_head(config_class: Any, body: Any) -> Any:
    from transformers import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast

    parent = body.__bases__[0]  # the family's base class, with its loading rules

    def make(self: Any, config: Any) -> None:
        parent.__init__(self, config)
        self.model = body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, logits_to_keep: int | Tensor = 0, **given: Unpack[_Inputs]) -> Any:
        output = self.model(**given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    members = {
        "__module__": body.__module__,
        "__init__": make,
        "forward": forward,
        "config_class": config_class,
        "config": None,
        "base_model_prefix": "model",
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return type(body.__name__.removesuffix("Model") + "ForCausalLM", (parent, GenerationMixin), members)
