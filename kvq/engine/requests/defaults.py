"""Sampling defaults: values from a model's generation_config.json for fields that a request omits."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvq.engine.params import MAX_BIASES, SamplingParams
from kvq.errors import ConfigError, RequestError
from kvq.models.describe.checkpoint import read_config_json, read_json
from kvq.models.describe.ends import GENERATION_FILE

DECLINED = ("none", "kvq", "vllm")  # `vllm` is vLLM's name for its own defaults, which equal kvq's
_OWN = {  # fields of the file -> fields of SamplingParams
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "max_new_tokens": "most_tokens",
}
_OTHERS = (  # transformers' fields that change the result and that kvq does not have
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "bad_words_ids"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "stop_strings"),
    *("min_new_tokens", "min_length", "num_beams", "guidance_scale", "encoder_repetition_penalty"),
    *("exponential_decay_length_penalty", "penalty_alpha", "diversity_penalty"),
)
_NOTHING: tuple[Any, ...] = (None, False, 0, 1, [], {})  # values without effect
_BANNED = -100.0  # the value that OpenAI's clients use to ban a token


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Defaults for `SamplingParams` fields that requests omit, and the fields ignored in the file.

    `suppress_tokens` becomes a `logit_bias` of -100, to which a request's own biases are added.
    `max_new_tokens` limits a request without `max_tokens`, even if the context has more room.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()  # ignored fields, each with the reason
    source: str = GENERATION_FILE

    def fill(self, given: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
        """Add defaults to sampling parameters for fields not in `named`. Beam search uses only a few."""
        filled, free = dict(given), given.get("beam_width") is None
        for name, value in self.fields.items():
            if name == "most_tokens":
                if not {"max_tokens", "most_tokens"} & set(named):
                    most = max(value, given.get("min_tokens") or 0)
                    filled |= {"max_tokens": None, "most_tokens": most}
            elif name == "logit_bias" and free:
                own = given.get(name) or {}
                filled[name] = {**dict(islice(value.items(), MAX_BIASES - len(own))), **own}
            elif name not in named and free:
                filled[name] = value
        return filled

    def __str__(self) -> str:
        """Return a line for the log; the line is empty if the file sets no defaults."""
        names = {ours: theirs for theirs, ours in _OWN.items()}  # as they are named in the file
        told = [f"{names.get(name, name)} {_shown(value)}" for name, value in self.fields.items()]
        used = f"{', '.join(told)} (what a request says counts; --generation-config none declines)"
        lines = [f"sampling defaults of {self.source}: {used}"] if told else []
        if self.passed_over:
            lines.append(f"passed over in {self.source}: {', '.join(self.passed_over)}")
        return "; ".join(lines)


def read_defaults(folder: Path, asked: str = "auto") -> SamplingDefaults:  # D219
    """Read the defaults from the model's folder (if `asked` is "auto") or from the folder `asked`.

    "none", "kvq" and "vllm" disable them. Unknown values and values out of range are ignored.

    Raises:
        ConfigError: the folder `asked` has no generation_config.json.
        ModelError: the file does not contain a JSON object.
    """
    if asked in DECLINED:
        return SamplingDefaults()
    path = (folder if asked == "auto" else Path(asked)) / GENERATION_FILE
    if not path.is_file():
        if asked == "auto":
            return SamplingDefaults()
        raise ConfigError(
            f"--generation-config {asked}: there is no {path}; give auto (the model's), none, or a folder "
            f"with another {GENERATION_FILE}"
        )
    return _read(read_json(path), _vocab_size(folder), str(path))


def _read(file: Mapping[str, Any], vocab_size: int, source: str) -> SamplingDefaults:
    found: dict[str, Any] = {}
    passed_over = [f"{name} {_shown(file[name])}" for name in _OTHERS if file.get(name) not in _NOTHING]
    if file.get("do_sample") is False:  # transformers then always selects the most likely token
        file = {**file, "temperature": 0.0}
    for theirs, ours in _OWN.items():
        value = file.get(theirs)
        value = None if theirs == "top_k" and value in (0, -1) else value  # both keep all tokens
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
            found[ours] = value
        except RequestError as error:
            passed_over.append(str(error).replace(ours, theirs))
    named = file.get("suppress_tokens") or []
    named = named if isinstance(named, list) else [named]
    banned = [token for token in named if type(token) is int and 0 <= token < vocab_size][:MAX_BIASES]
    if len(banned) < len(named):
        passed_over.append(f"{len(named) - len(banned)} of suppress_tokens (no token's id, or too many)")
    if banned:
        found["logit_bias"] = dict.fromkeys(banned, _BANNED)
    return SamplingDefaults(fields=found, passed_over=tuple(passed_over), source=source)


def _shown(value: Any) -> str:
    return f"bans {len(value)} tokens" if isinstance(value, Mapping) else f"{value!r:.60}"


def _vocab_size(folder: Path) -> int:
    config = read_config_json(folder)
    part = config.get("text_config")
    found = config.get("vocab_size", part.get("vocab_size") if isinstance(part, Mapping) else None)
    return found if type(found) is int else 1 << 30
