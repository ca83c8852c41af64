"""Try every causal language model that transformers knows, small and random, and write docs/models.md.

python tools/model_table.py            # all, into docs/models.md
python tools/model_table.py olmoe glm  # some, onto the screen

A model is served if its logits equal those of its own eager attention and 64 greedy tokens are the same,
alone and packed among others. Each is tried in a process of its own.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvq.errors import ModelError, first_lines
from kvq.geometry import FAMILIES, ModelGeometry
from kvq.geometry.support import KINDS
from kvq.models import Model, load
from kvq.models.observe.support import check_supported
from kvq.models.observe.tiny_copy import CONTEXT, build_tiny_copy
from kvq.models.prove.probe import relative_error
from kvq.models.prove.proof import TOLERANCE
from tools.whole_models import save_whole

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
MARK = "<!-- models -->\n"
SECONDS = 120  # a model may take
PROMPT, NEW = 70, 64  # tokens
_KINDS = ("full_attention", "sliding_attention")
_ROTATED = {"rope_type": "default", "rope_theta": 1e4}
_SHARED = {  # all layers read another model's K and V
    "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 6, "num_kv_shared_layers": 6,
}  # fmt: skip
# What configurations leave open that their code needs, or what makes encoders causal.
GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 1408,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_KINDS, _ROTATED)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "doge": {"num_experts": 16},
    "gemma4_text": {"num_kv_shared_layers": 18},
    "gemma4_assistant": {"text_config": _SHARED},
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
    },
    "reformer": {"is_decoder": True},
    "bamba": {"attn_layer_indices": [2, 5]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
}
GIVEN |= {
    name: {"is_decoder": True}
    for name in (
        *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod", "big_bird"),
    )
}
Found = tuple[str, str]  # how it ends, and a text


def tried(name: str) -> Found:
    """Try one family; returns its result, one of `ENDS`, and its layers or the reason."""
    if name in KINDS:
        return _tried_whole(name)
    try:
        about = AutoConfig.for_model(name, **GIVEN.get(name, {}))
        config = about.to_dict()
        check_supported(saved(about), max_context=CONTEXT, folder=Path(name))
    except ModelError as error:
        return "refused", _why(error)
    except Exception as error:  # noqa: BLE001 - whatever a family's code raises
        return "not built", first_lines(error)
    try:
        model = build_tiny_copy(config)
    except Exception as error:  # noqa: BLE001 - whatever a family's code raises
        return "not built", first_lines(error.__cause__ or error)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
        (Path(folder) / "generation_config.json").unlink(
            missing_ok=True
        )  # which names the large one's tokens
        try:
            served = load(folder, "fp32", device="cpu", dtype="fp32", block_size=16)
        except ModelError as error:
            return "refused", _why(error)
        own = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return _compared(served, own, "list" if name in FAMILIES else "proof")


def _tried_whole(name: str) -> Found:
    """A kind of model of which the text is served, against the whole model on text."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            whole = save_whole(Path(folder), name)
        except Exception as error:  # noqa: BLE001 - whatever a family's code raises
            return "not built", first_lines(error)
        try:
            served = load(folder, "fp32", device="cpu", dtype="fp32", block_size=16)
        except ModelError as error:
            return "refused", _why(error)
        how, found = _compared(served, whole, "text")
        return how, f"`{served.geometry.model_type}`; {found}"


def _compared(served: Model, own: Any, how: str) -> Found:
    error = difference(served, own)
    if error is None or error > TOLERANCE:
        return "WRONG", f"{error}"
    return how, f"{error:.0e}; {layers_of(served.geometry)}"


def saved(config: Any) -> dict[str, Any]:
    """Return a config.json as transformers writes it: no defaults, numbers that JSON lacks as objects."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        return found


def _why(error: ModelError) -> str:
    return str(error).partition(": ")[2].removesuffix(" (by its config.json)")


def difference(served: Model, own: Any) -> float | None:
    """Largest relative error of logits, alone and packed; None if greedy tokens differ."""
    generator = torch.Generator().manual_seed(1)
    prompt, other = (torch.randint(3, 199, (n,), generator=generator).tolist() for n in (PROMPT, PROMPT // 2))
    errors = []
    for packed in (False, True):
        session = served.session(max_tokens=CONTEXT - 1, max_sequences=2)
        sequence, neighbour = session.new_sequence(), session.new_sequence()
        tokens, beside, rows = list(prompt), list(other), []
        work = prompt
        while len(tokens) < PROMPT + NEW:
            pieces = [(sequence, work)] + ([(neighbour, beside)] if packed else [])
            results = session.forward(pieces, all_rows=True)
            rows.append(results[0].logits)
            work = [int(rows[-1][-1].argmax())]
            tokens += work
            beside = [tokens[-1]]
        logits = torch.cat(rows)
        found = [
            relative_error(logits, wanted)
            for wanted in _own_logits(own, tokens[:-1], keeps_states=bool(served.geometry.states))
            if tokens[PROMPT:] == wanted[PROMPT - 1 :].argmax(-1).tolist()
        ]
        if not found:
            return None
        errors.append(min(found))
    return max(errors)


@torch.inference_mode()
def _own_logits(own: Any, tokens: list[int], *, keeps_states: bool) -> Iterator[torch.Tensor]:
    """Return logits of the model's own attention over all tokens at once, and as it generates."""
    ids = torch.tensor([tokens])
    yield own(input_ids=ids, use_cache=False).logits[0]
    if keeps_states:
        parts, cache = [], None
        for part in ids.split([PROMPT] + [1] * (len(tokens) - PROMPT), dim=1):
            output = own(input_ids=part, past_key_values=cache, use_cache=True)
            parts.append(output.logits[0])
            cache = output.past_key_values
        yield torch.cat(parts)


def layers_of(geometry: ModelGeometry) -> str:
    """The kinds of layers, in words."""
    kinds = {
        "full" if x.window is None else f"{'chunks' if x.is_chunked else 'windows'} of {x.window}"
        for x in geometry.layers
    }
    dims = {
        f"{x.k_head_dim}/{x.v_head_dim}"
        for x in geometry.layers
        if x.k_head_dim != x.v_head_dim and not x.is_latent
    }
    extras = [f"K/V dimensions {', '.join(sorted(dims))}"] if dims else []
    extras += ["latents"] if any(x.is_latent for x in geometry.layers) else []
    extras += sorted({f"states of {state.kind}" for state in geometry.states})
    readers = sum(len(x.readers) for x in geometry.layers)
    extras += [f"{readers} layers read others' K/V"] if readers else []
    extras += ["sinks"] if geometry.has_sinks else []
    extras += ["capped scores"] if geometry.softcap else []
    return ", ".join([*sorted(kinds), *extras])


def _run(name: str, queue: Any) -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    queue.put(tried(name))


def apart(name: str) -> Found:
    """`tried` in a process of its own, which may crash or hang."""
    context = get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_run, args=(name, queue), daemon=True)
    process.start()
    try:
        found: Found = queue.get(timeout=SECONDS)
    except Exception:  # noqa: BLE001 - queue.Empty
        found = ("not built", f"it took more than {SECONDS} s or ended its process")
    process.terminate()
    process.join()
    return found


def page(found: dict[str, Found]) -> str:
    """The tables of docs/models.md."""
    parts = {kind: {n: text for n, (end, text) in found.items() if end == kind} for kind in ENDS}
    lines = [
        f"transformers {transformers.__version__} has {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} causal "
        f"language models. Together with the models that also read images or sound and whose text kvq "
        f"serves, there are {len(found)}. kvq serves {len(parts['list'])} that are on its list, "
        f"{len(parts['proof'])} more by proof, and the text of {len(parts['text'])}. It refuses "
        f"{len(parts['refused'])}. {len(parts['not built'])} could not be built as a small copy, and "
        f"{len(parts['WRONG'])} gave results that differ from those of their own attention."
    ]
    for kind, (title, column) in ENDS.items():
        if parts[kind]:
            lines += ["", f"### {title}", "", f"| family | {column} |", "|---|---|"]
            lines += [
                f"| `{name}` | {text.replace('|', '/')[:200]} |" for name, text in sorted(parts[kind].items())
            ]
    return "\n".join(lines) + "\n"


ENDS = {
    "WRONG": ("Wrong", "relative error"),
    "list": ("Served: on the list", "relative error; layers"),
    "proof": ("Served: by proof", "relative error; layers"),
    "text": ("Served: text of models that also read images or sound", "text model; relative error; layers"),
    "refused": ("Refused", "why"),
    "not built": ("Not built as a small copy", "why"),
}


def all_names() -> list[str]:
    """Causal language models of transformers', and others whose text is served."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *KINDS})


def main() -> int:
    """Try them all, or those that are named."""
    names = sys.argv[1:] or all_names()
    found = {}
    for name in names:
        found[name] = apart(name)
        print(name, *found[name], flush=True)
    if not sys.argv[1:]:
        head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(head + mark + page(found), encoding="utf-8")
    return any(end == "WRONG" for end, _ in found.values())


if __name__ == "__main__":
    sys.exit(main())
