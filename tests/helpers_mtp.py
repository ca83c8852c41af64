"""Tiny random models whose checkpoints bring a multi-token-prediction layer, and transformers' own drafts."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.engine.kit import one_character_tokenizer
from tests.helpers_models import _COMMON, FAMILY_OPTIONS, VOCAB, WINDOW, build_model, random_tokens

LAYERS = 2
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What each family adds so that its features show, and that it has such a layer.
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": FAMILY_OPTIONS["deepseek_v3"],
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **_EXPERTS},
    "mellum": {
        "head_dim": 24, "num_experts": 4, "sliding_window": WINDOW, **_EXPERTS,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
}  # fmt: skip


def config_of(family: str, **changes: Any) -> Any:
    """At test size, in widths of whole vectors."""
    options = {**_COMMON, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_mtp_layers": 1}
    return AutoConfig.for_model(family, **(options | OPTIONS[family] | changes))


def named_by_number(patch: Any, family: str) -> None:
    """Families that know their extra layers by the number that they have in real checkpoints: by ours."""
    if family != "mellum":
        made = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
        patch.setattr(made, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\..*"])


@torch.no_grad()
def random_layer(main: Any, *, seed: int = 1) -> Any:
    """A layer for a model, every number random."""
    torch.manual_seed(seed)
    mtp = MtpModel(main, 1).eval()
    for name, parameter in mtp.layers.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(1 + torch.randn_like(parameter) * 0.2)
        else:
            parameter.copy_(torch.randn_like(parameter) * (0.5 if name.endswith("gate.weight") else 0.15))
    for buffer in mtp.layers.buffers():
        buffer.copy_(torch.randn_like(buffer) * 0.2)
    return mtp


def states_of(main: Any, ids: list[int]) -> Tensor:
    """What a model makes of tokens, [1, tokens, hidden], as transformers hands it to such a layer."""
    with torch.no_grad():
        return main(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]


def teach(main: Any, mtp: Any, texts: list[list[int]], *, steps: int = 60) -> None:
    """Train a layer to say what the model says, two tokens ahead."""
    parameters = [p.requires_grad_() for p in mtp.layers.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    states = [states_of(main, ids) for ids in texts]
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, seen in zip(texts, states, strict=True):
            tokens = torch.tensor([ids[1:-1]])
            places = torch.arange(1, len(ids) - 1)[None]
            made = mtp.forward_layer(0, seen[:, :-2], places, MtpCache(config=mtp.config), input_ids=tokens)
            loss = loss + functional.cross_entropy(mtp._project_to_logits(made)[0], torch.tensor(ids[2:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tensors_of(mtp: Any, family: str) -> dict[str, Tensor]:
    """A layer under the names that it has in checkpoints."""
    body = "mtp.layers.0" if family == "mellum" else f"model.layers.{LAYERS}"
    outer = {"enorm": f"{body}.enorm", "hnorm": f"{body}.hnorm", "eh_proj": f"{body}.eh_proj"}
    outer["post_norm"] = f"{body}.shared_head.norm"
    if family == "mellum":
        outer = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
        outer |= {"eh_proj": "mtp.fc", "post_norm": "mtp.norm"}
    found = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        head, _, rest = name.partition(".")
        if head != "mtp_block":
            found[f"{outer[head]}.{rest}"] = tensor.clone()
        elif rest == "mlp.experts.gate_up_proj":
            for i, one in enumerate(tensor):
                gate, up = one.chunk(2)
                found[f"{body}.mlp.experts.{i}.gate_proj.weight"] = gate.clone()
                found[f"{body}.mlp.experts.{i}.up_proj.weight"] = up.clone()
        elif rest == "mlp.experts.down_proj":
            for i, one in enumerate(tensor):
                found[f"{body}.mlp.experts.{i}.down_proj.weight"] = one.clone()
        else:
            found[f"{body}.{rest}"] = tensor.clone()
    return found


def save(folder: Path, main: Any, mtp: Any, family: str) -> Path:
    """A checkpoint of both, with a tokenizer of one character a token."""
    main.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | tensors_of(mtp, family)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    one_character_tokenizer().save_pretrained(folder)
    return folder


@cache
def folder_with_layer(family: str, *, is_taught: bool = False) -> Path:
    """A random model of a family with such a layer, which may be taught what the model says of `taught`."""
    main = build_model(config_of(family))
    mtp = random_layer(main)
    if is_taught:
        teach(main, mtp, [prompt + greedy(main, prompt, 40) for prompt in taught()])
    return save(Path(mkdtemp(prefix=f"kvq-{family}-")), main, mtp, family)


def taught() -> list[list[int]]:
    """Prompts of which a taught layer knows how the model goes on."""
    return [random_tokens(12, seed=seed, vocab=VOCAB) for seed in (3, 4, 5)]


@torch.inference_mode()
def greedy(main: Any, prompt: list[int], count: int) -> list[int]:
    """What a model says, whatever ends a text."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(main(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def drafts_by_hand(main: Any, mtp: Any, ids: list[int], count: int) -> list[int]:
    """transformers' own layer over what a model made of all tokens but the last; then over what it made."""
    cache = MtpCache(config=mtp.config)
    states, tokens, places = states_of(main, ids[:-1]), ids[1:], list(range(1, len(ids)))
    found: list[int] = []
    for _ in range(count):
        made = mtp.forward_layer(0, states, torch.tensor([places]), cache, input_ids=torch.tensor([tokens]))
        found.append(int(mtp._project_to_logits(made[:, -1:]).argmax()))
        states, tokens, places = made[:, -1:], found[-1:], [places[-1] + 1]
    return found


def change_config(folder: Path, **changes: Any) -> None:
    """Write other values into a folder's config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
