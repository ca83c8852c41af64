"""Public functions of `import kvq`: load a model, tune, quantize, and measure with plain results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from kvq.arguments import checked
from kvq.calib import calibrate
from kvq.calib.budget import TunePlan, default_codes, parse_budget
from kvq.calib.candidates import Trial, codes_of
from kvq.calib.quantize import Quantized, QuantizeSettings, Quantizing, quantize_model
from kvq.calib.search import Tuned
from kvq.calib.search import tune as search
from kvq.calib.sensitivity import Keep as KeepTrials
from kvq.calib.sensitivity import Progress as NamedProgress
from kvq.errors import ConfigError
from kvq.evals import EvalText, calibration_text, default_text, measure_perplexity
from kvq.evals.divergence import TokenPlan
from kvq.evals.watch import Keep, Progress, Watch
from kvq.formats import KVRecipe
from kvq.models import Model
from kvq.models.loading.prepared import LoadOptions, find_scales, prepare
from kvq.models.model import load_prepared


@checked
def load(
    path_or_name: str | Path,
    kv: str | KVRecipe = "auto",
    *,
    scales: str | Path | None = None,
    calibrate_on_load: bool = False,
    **options: Unpack[LoadOptions],
) -> Model:
    """Load a model and choose its KV format; see `kvq.models.load` and its `LoadOptions`.

    With `calibrate_on_load`, the scales of static formats (`fp8_per_head`, `int8_per_head`), given in `kv` or
    later to `with_kv`, are computed by running the model on the default calibration text and kept only in
    memory.

    Raises:
        ModelError: the model is missing, damaged or refused.
        ConfigError: an option can't be used as given, or a static format has no scales.
    """
    prepared = prepare(path_or_name, **options)
    static = find_scales(prepared, scales)
    recipe = prepared.recipe(kv, static)
    if scales is not None and calibrate_on_load:
        raise ConfigError(f"calibrate_on_load makes static scales and {scales} holds some; give one of them")
    if (scales is not None or calibrate_on_load) and kv != "auto" and not recipe.is_static:
        raise ConfigError(f"static scales were requested, but {recipe.name} uses none; drop them")
    if not calibrate_on_load:
        prepared.check_scales(recipe)
    model = load_prepared(prepared, recipe, static)
    return with_fresh_scales(model) if calibrate_on_load else model


def with_fresh_scales(model: Model, progress: Progress = lambda done, total: None) -> Model:
    """Return the model with static scales, computed now from the default calibration text."""
    return model.with_static_scales(calibrate(model, calibration_text(), progress=progress))


class _TuneKeywords(TypedDict, total=False):  # D373: TypedDicts outside, frozen dataclasses inside
    """Keywords of `tune`: unquantized tokens, the amount of text, and callbacks."""

    recent: int
    sinks: int
    context: int | None
    max_windows: int
    verify_windows: int
    known: Sequence[Trial]  # `sensitivities.trials` of an earlier search on this text; not repeated
    progress: NamedProgress
    keep: KeepTrials


@checked
def tune(
    model: str | Path | Model,
    budget: str | None = None,
    *,
    max_kl: float | None = None,
    text: EvalText | str | None = None,
    held_out: EvalText | str | None = None,
    formats: str | None = None,
    **options: Unpack[_TuneKeywords],
) -> Tuned:
    """Find the formats per layer that lose the least quality within a memory budget.

    `budget`: bits per element ("4.5bits"), bytes per token ("900B") or a format's bytes ("int4", the
    default); alternatively `max_kl`, the limit of the mean KL divergence in nats. The search runs on `text`,
    and the result is measured on `held_out`; both default to CPython's help topics. `formats`: codes to
    choose from, such as "int8,int4"; by default, all formats with fast kernels on this machine. `recent` and
    `sinks`: how many of the most recent and of the first tokens per sequence stay unquantized. The result's
    `recipe` can be passed as `kv` everywhere; `recipe.save("kvq.json")` saves it.

    Raises:
        ConfigError: the budget can't be met, or `budget` and `max_kl` are both given.
        RequestError: a text is too short.
    """
    loaded = model if isinstance(model, Model) else load(model)
    known = loaded.prepared
    nbytes = None if max_kl is not None and budget is None else parse_budget(known, budget or "int4")
    given, listeners = _split(options, ("progress", "keep"))
    plan = TunePlan(budget_bytes=nbytes, max_kl=max_kl, **given)
    codes = default_codes(known, plan) if formats is None else codes_of(formats.split(","))
    source = calibration_text() if text is None else _named(text, "text")
    other = default_text() if held_out is None else _named(held_out, "held-out text")
    return search(loaded, source, other, replace(plan, codes=codes), **listeners)


class _QuantizeKeywords(TypedDict, total=False):
    """Keywords of `quantize`: fields of `Quantizing` and of `QuantizeSettings`."""

    file_format: str
    gguf_type: str | None
    text: EvalText | str | None
    kv_scales: bool
    device: str
    dtype: str
    overwrite: bool
    restart: bool
    revision: str | None
    token: str | None
    bits: int | None
    group_size: int | None
    symmetric: bool
    activations: str | None
    act_order: str
    damp: float
    scale_search: str
    alpha: float | None
    samples: int
    context: int | None
    seed: int


@checked
def quantize(
    model: str | Path, out: str | Path, method: str | None = None, **options: Unpack[_QuantizeKeywords]
) -> Quantized:
    """Quantize a model's weights into the folder `out`, which kvq, vLLM and transformers load.

    `method`: rtn, gptq (the default), awq, smoothquant or fp8. `file_format`: compressed-tensors, autogptq or
    autoawq; or gguf, which makes `out` a file that kvq and llama.cpp load, of `gguf_type` (Q4_K_M), by rtn.
    `text`: calibration text, by default CPython's help topics. `kv_scales` adds static FP8
    scales of K and V.
    After an interruption, the same call resumes the work, unless `restart` is set. bits, group_size,
    symmetric, activations, act_order and the others are fields of `kvq.calib.quantize.QuantizeSettings`.

    Raises:
        ConfigError: the options contradict each other or don't fit the model; raised before any work is done.
        ModelError: the model is missing, damaged or refused.
        RequestError: the text is too short, or activations are not finite.
    """
    given, of_settings = _split(options, [field.name for field in fields(QuantizeSettings)])
    is_gguf = given.get("file_format") == "gguf"
    settings = QuantizeSettings(method=method or ("rtn" if is_gguf else "gptq"), **of_settings)
    text = given.pop("text", None)
    named = None if text is None else _named(text, "text")
    return quantize_model(Quantizing(model=model, out=Path(out), text=named, **given), settings)


def _named(text: EvalText | str, name: str) -> EvalText:
    return EvalText(name=name, text=text) if isinstance(text, str) else text


class _PerplexityKeywords(TypedDict, total=False):
    """Keywords of `perplexity`: fields of `kvq.evals.divergence.TokenPlan`, and callbacks."""

    context: int
    chunk: int | None
    max_windows: int | None
    attention_window: int | None
    instrument: bool
    progress: Progress
    keep: Keep


@checked
def perplexity(
    model: str | Path | Model,
    kv: str | list[str | KVRecipe],
    text: str | None = None,
    **options: Unpack[_PerplexityKeywords],
) -> list[dict[str, Any]]:
    """Measure KV formats on a text. Return rows with the keys of `kvq perplexity --json`.

    `model`: a loaded model, or an argument of `load`. `text` defaults to held-out help topics of CPython.
    Options are fields of `kvq.evals.divergence.TokenPlan`. `progress` is called with the number of finished
    steps and the total, `keep` with a function that returns the results so far.
    """
    loaded = model if isinstance(model, Model) else load(model)
    words = default_text().text if text is None else text
    plan, listeners = _split(options, ("progress", "keep"))
    rows = measure_perplexity(loaded, kv, words, TokenPlan(**plan), Watch(**listeners))
    return [asdict(row) for row in rows]


def _split(options: Mapping[str, Any], names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those without and those with the specified names."""
    named = {name: options[name] for name in names if name in options}
    return {name: value for name, value in options.items() if name not in named}, named
