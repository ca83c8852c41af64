"""Load check: a test of whether an unmeasured KV format breaks a model, before the model is served.

The model runs over a short text with unquantized KV. Every layer also attends over the same K and V stored in
the format and in other formats of about the same size. If no layer's attention has an error of `CLEAR_ERROR`
or more, the format is harmless. Otherwise the model runs again with KV in the format, and `verdict` judges
the logits.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kvq import strict_json
from kvq.errors import BrokenFormat, ConfigError, ModelError, RequestError, UnfitFormat, UnsupportedKernel
from kvq.fileio import write_text
from kvq.formats import KVRecipe
from kvq.models.check.compared import compare
from kvq.models.check.verdict import BROKEN_CHANGE, BROKEN_KL, Verdict, chance_perplexity, verdict
from kvq.models.describe.resolve import EMBEDDED
from kvq.models.loading.prepared import PreparedModel
from kvq.models.model import Model

CLEAR_ERROR = 0.15  # D47; of a layer's attention output: no pair that warned or broke was below this
_TOKENS, _FEW_TOKENS = 384, 256  # the latter for models above _LARGE, which need seconds for them
_LARGE = 1_000_000_000  # weights
_LEAST_TOKENS = 16
_OTHERS = ("int8", "int6", "k8v4", "int5", "int4", "int3", "int2")  # larger ones first
_MOST_OTHERS = 3
_SLACK = 1.05  # times the bits, at most, for another format of about the same size
_BEYOND = 1e9  # nats, if logits are not finite
_SAID = {"harmless": "is harmless to", "warning": "is not harmless to", "broken": "breaks"}
_NEWS = "short-names-of-2026-11-28"
_VERSION = 1  # of stored findings; increased if codecs, the text or limits change
_log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCheck:
    """Results of checking a KV format on a model. Fields that need logits are None if one pass sufficed."""

    kv: str
    verdict: Verdict | Literal["unjudgeable"]  # the last: chance level, few tokens, or no tokenizer
    tokens: int
    layer_errors: tuple[float, ...] = ()  # |a - b| / |b| of attention outputs, the mean over tokens
    kl_mean: float | None = None  # nats per token, relative to unquantized KV
    perplexity_change: float | None = None  # relative
    top1_agreement: float | None = None
    instead: str = ""  # if this format is broken, one of about the same size that isn't
    passes: int = 1  # passes of the model over the text

    def __str__(self) -> str:
        """Return the verdict in words, without advice."""
        if self.verdict == "unjudgeable":
            return f"can't tell what {self.kv} costs this model: it only guesses at the check's text"
        worst = sorted(enumerate(self.layer_errors), key=lambda pair: -pair[1])[:3]
        found = "attention is off most in layers " + ", ".join(f"{i} ({error:.0%})" for i, error in worst)
        if self.kl_mean is not None:
            change, same = f"{self.perplexity_change:+.1%}", f"{self.top1_agreement:.0%}"
            found = f"mean KL {self.kl_mean:.2g}, perplexity {change}, the same top token for {same}; {found}"
        return f"{self.kv} {_SAID[self.verdict]} this model: over {self.tokens} tokens {found}"

    @property
    def refusal(self) -> str:
        """Reason for rejecting the format, and the remedy."""
        other = "no other of its size is known to be fit, so take a larger one, or bf16"
        if self.instead:
            other = f"take {self.instead}, which is about as large and fit"
        return (
            f"{self}. Above {BROKEN_KL} or {BROKEN_CHANGE:+.0%} formats are refused: {other}; or use it all "
            f"the same: --accept-divergence (accept_divergence=True)"
        )


def check_on_load(model: Model, *, accept_divergence: bool = False) -> LoadCheck | None:
    """Check a model's format before serving, or return stored findings; return None if no check is needed.

    Raises:
        BrokenFormat: the format breaks the model, and `accept_divergence` is False.
    """
    if not is_to_check(model.prepared, model.recipe):
        return None
    found = recalled(model.prepared, model.recipe)
    if found is None:
        name = model.recipe.name
        _log.info("checking what %s costs this model, for the first time", name)
        is_short = not name.endswith(".json") and "_per_channel" not in name
        if is_short and any(layer.k.is_per_channel for layer in model.recipe.layers) and is_first(_NEWS):
            _log.warning("%s keeps K per channel since 2026-11-28, as all short names: CHANGELOG.md", name)
        found = measure(model)
        remember(model.prepared, model.recipe, found)
    if found.verdict == "broken" and not accept_divergence:
        raise BrokenFormat(found.refusal)
    _log.log(logging.INFO if found.verdict == "harmless" else logging.WARNING, "%s", found)
    return found


def refuse_known(model: PreparedModel, recipe: KVRecipe, *, accept_divergence: bool) -> None:
    """Reject a format that broke the model in an earlier check, without reading weights.

    Raises:
        BrokenFormat: the format broke the model, and `accept_divergence` is False.
    """
    found = recalled(model, recipe) if is_to_check(model, recipe) and not accept_divergence else None
    if found is not None and found.verdict == "broken":
        raise BrokenFormat(found.refusal)


def is_to_check(model: PreparedModel, recipe: KVRecipe) -> bool:
    """Return True for a quantized format, unless the model is embedded (quality.md covers such models)."""
    return recipe.is_quantized and model.folder not in {x.resolve() for x in EMBEDDED.values()}


def recalled(model: PreparedModel, recipe: KVRecipe) -> LoadCheck | None:
    """Return the findings of an earlier check, or None if there are none or their file is unusable."""
    try:
        data = recall(model, recipe)
        return None if data is None else LoadCheck(**data | {"layer_errors": tuple(data["layer_errors"])})
    except (TypeError, KeyError):  # written by another version
        return None


@torch.inference_mode()
def measure(model: Model) -> LoadCheck:
    """Check a model with its format, even if it was checked before, in at most three passes.

    Recent tokens that the format keeps unquantized are quantized here, as they are few in long contexts.
    """
    recipe, known = model.recipe, model.prepared
    asked = model.with_kv(replace(recipe, exact=replace(recipe.exact, recent=0)))
    try:
        tokenizer = model.tokenizer
    except ModelError:  # no tokenizer loads; such a model takes token ids
        return LoadCheck(kv=recipe.name, verdict="unjudgeable", tokens=0)
    ids = token_ids(tokenizer, known.max_context, known.geometry.vocab_size, known.stored_values)
    found = LoadCheck(kv=recipe.name, verdict="unjudgeable", tokens=len(ids))
    others = _others(model, asked.recipe)
    try:
        exact, errors = _run(model.with_kv("auto"), ids, [asked, *others])
    except RequestError:  # K or V are not finite, which serving will report
        return found
    found = replace(judge(found, exact, None, ids), layer_errors=errors[0])
    if found.verdict == "unjudgeable" or max(errors[0]) < CLEAR_ERROR:
        return found
    found = replace(judge(found, exact, _run(asked, ids)[0], ids), passes=2)
    if found.verdict != "broken" or not others:
        return found
    worst, best = min((max(own), i) for i, own in enumerate(errors[1:]))
    if worst >= CLEAR_ERROR:
        found = replace(found, passes=3)
        if judge(found, exact, _run(others[best], ids)[0], ids).verdict == "broken":
            return found
    return replace(found, instead=others[best].recipe.name)


def judge(found: LoadCheck, exact: Tensor, stored: Tensor | None, ids: Sequence[int]) -> LoadCheck:
    """Return `found` with a verdict from logits, fp32 [tokens, vocab]; "harmless" if `stored` is None.

    The verdict is "unjudgeable" if the unquantized logits, `exact`, predict no better than token counts.
    Since tokens are few, a perplexity change counts only beyond two standard errors; divergence is far less
    noisy.
    """
    target = torch.tensor(ids[1:], device=exact.device)[:, None]
    reference = exact.log_softmax(-1)
    losses = -reference[:-1].gather(1, target)[:, 0]
    chance = chance_perplexity(np.array(ids[1:]), exact.shape[-1])
    if len(ids) < _LEAST_TOKENS or not losses.mean().exp() < chance:
        return replace(found, verdict="unjudgeable")
    if stored is None:
        return replace(found, verdict="harmless")
    own = stored.log_softmax(-1)
    kl = float((reference.exp() * (reference - own)).sum(-1).mean().nan_to_num(_BEYOND, posinf=_BEYOND))
    more = (-own[:-1].gather(1, target)[:, 0] - losses).nan_to_num(50.0, posinf=50.0)
    certain = more.mean() - 2 * more.std() / math.sqrt(len(more))
    return replace(
        found,
        verdict=verdict(kl, math.expm1(float(certain))),
        kl_mean=kl,
        perplexity_change=math.expm1(float(more.mean())),
        top1_agreement=float((stored.argmax(-1) == exact.argmax(-1)).float().mean()),
    )


def token_ids(tokenizer: Any, max_context: int, vocab_size: int, weights: int) -> list[int]:
    """Return the first tokens of the check's text (prose, code, German, a table); fewer for large models."""
    text = (Path(__file__).parent / "check.txt").read_text(encoding="utf-8")
    most = min(max_context, _TOKENS if weights < _LARGE else _FEW_TOKENS)
    return [token for token in tokenizer(text)["input_ids"][:most] if token < vocab_size]


def _run(
    model: Model, ids: list[int], others: Sequence[Model] = ()
) -> tuple[Tensor, list[tuple[float, ...]]]:
    """Return the model's logits and, for each of the other formats, the error of every layer.

    Raises:
        RequestError: K or V are not finite.
    """
    session = model.session(max_tokens=len(ids))
    caches = {x.recipe.digest(): x.session(max_tokens=len(ids)).cache for x in others}
    found = compare(session, caches)
    logits = session.forward([(session.new_sequence(), ids)], all_rows=True)[0].trusted_logits()
    layers = sorted({layer for _, layer in found})
    return logits, [tuple(found[digest, i].mean for i in layers) for digest in caches]


def _others(model: Model, asked: KVRecipe) -> list[Model]:
    """Return the model in other supported formats that are at most about as large, largest first."""
    prepared, found = model.prepared, list[Model]()
    heads, size = prepared.geometry.kv_heads, prepared.block_size
    most = float(asked.bits_per_element(heads, size)) * _SLACK
    for name in _OTHERS:
        try:
            recipe = prepared.recipe(name)
            is_other = recipe.digest() != asked.digest() and recipe.bits_per_element(heads, size) <= most
            if is_other and len(found) < _MOST_OTHERS:
                prepared.check_kernels(recipe)
                found.append(model.with_kv(recipe))
        except (UnfitFormat, UnsupportedKernel):
            continue
    return found


def memory_folder() -> Path:  # D48: a model's folder may be read-only
    """Return the folder of stored findings, in the user's cache: a file for each model and format.

    A file that is damaged, or was written for another version, model or format, is ignored.
    """
    return Path.home() / ".cache" / "kvq" / "checks"


def recall(model: PreparedModel, recipe: KVRecipe) -> dict[str, Any] | None:
    """Return the fields of the stored findings for a model and a format, or None if there are none."""
    key = _key(model, recipe)
    try:
        data = strict_json.read(memory_folder() / f"{key}.json")
        is_whole = data["seal"] == _digest([key, data["found"]])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    return dict(data["found"]) if is_whole else None


def remember(model: PreparedModel, recipe: KVRecipe, found: Any) -> None:
    """Store the findings, a dataclass instance, if the file can be written."""
    key, fields = _key(model, recipe), asdict(found)
    try:
        folder = memory_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps({"found": fields, "seal": _digest([key, fields])}))
    except (OSError, RuntimeError, ConfigError) as error:
        _log.info("what the check found can't be kept, so it will run again: %s", error)


def is_first(news: str) -> bool:
    """Return True on the first call for `news` on this machine; False later, or if recording it fails."""
    try:
        memory_folder().mkdir(parents=True, exist_ok=True)
        (memory_folder() / f"{news}.told").touch(exist_ok=False)
    except (OSError, RuntimeError):
        return False
    return True


def _key(model: PreparedModel, recipe: KVRecipe) -> str:
    """Return a key derived from everything that the findings depend on."""
    rounded_to = None if model.rounded_to is None else model.rounded_to.name
    size = model.block_size if recipe.is_staged else None
    inputs = [model.block_inputs.value] if model.is_gguf else []
    return _digest([_VERSION, model.digest, rounded_to, recipe.digest(), size, *inputs])[:32]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
