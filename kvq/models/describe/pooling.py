"""Pooling of a model that makes something else of a text than more text: an embedding, or a score of a pair.

The model's files describe it, as sentence-transformers writes them; an operator may name it for other models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq import strict_json
from kvq.errors import ConfigError, ModelError, RequestError, explained, first_lines, not_one_of
from kvq.models.describe.checkpoint import is_gguf, read_config_json, read_header, read_json, weight_files

CHOICES = ("auto", "last", "mean", "first", "yes-no")
SCORE_HEAD = "score.weight"  # of classifiers, fp [labels, hidden_size]
_MODES = {"lasttoken": "last", "mean": "mean", "cls": "first"}  # sentence-transformers' names
_OLD_MODES = {"lasttoken": "lasttoken", "mean_tokens": "mean", "cls_token": "cls"}  # after pooling_mode_


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """Way in which the hidden states of a text's tokens, after the final norm, become one result.

    An embedding is the hidden state of the last or first token, or the mean over all tokens. A score is the
    classifier's of the last token if `has_head`, or else its logit of `yes`, minus that of `no` if there is
    one: token ids, or the tokens' texts.
    """

    place: Literal["last", "mean", "first"] = "last"
    is_normalized: bool = False  # embeddings have length 1
    dimensions: tuple[int, ...] | None = ()  # shorter embeddings that the model allows; None: any
    has_head: bool = False
    yes: int | str | None = None
    no: int | str | None = None
    is_probability: bool = True  # scores pass through a sigmoid
    generates: bool = False  # the model generates text, too

    @property
    def scores(self) -> bool:
        """True for scores of pairs, False for embeddings."""
        return self.has_head or self.yes is not None

    def check_dimensions(self, wanted: int, width: int) -> None:
        """Raise RequestError unless the first `wanted` of an embedding's `width` numbers are one, too."""
        allowed = range(1, width) if self.dimensions is None else self.dimensions
        if wanted != width and wanted not in allowed:
            most = f"1 to {width}" if self.dimensions is None else ", ".join(map(str, (*allowed, width)))
            raise RequestError(f"dimensions may be {most} for this model, got {wanted}")

    @property
    def needs_all(self) -> bool:
        """True if hidden states of more tokens than the last are needed, so that none may be cached."""
        return self.place != "last"


def read_pooling(folder: Path, choice: str = "auto") -> Pooling | None:
    """Return a model's pooling, or None if it only generates. `choice`: one of CHOICES, of the operator.

    Raises:
        ConfigError: the choice is unknown.
        ModelError: a file is damaged, or names a computation that kvq lacks.

    Source: sentence-transformers 5 (modules.json, 1_Pooling/config.json, 1_LogitScore/config.json).
    """
    if choice not in CHOICES:
        raise ConfigError(not_one_of("pooling (--pooling)", choice, CHOICES))
    if choice != "auto":
        generates = not lacks_head(folder)
        if choice == "yes-no":
            return Pooling(yes="yes", no="no", generates=generates)
        place: Any = choice
        return Pooling(place=place, is_normalized=True, dimensions=None, generates=generates)
    if is_gguf(folder):
        return None
    config = read_config_json(folder)
    modules = _read_modules(folder / "modules.json")
    if "LogitScore" in modules:
        own = read_json(folder / modules["LogitScore"] / "config.json")
        yes, no = own.get("true_token_id"), own.get("false_token_id")
        if not isinstance(yes, int) or not isinstance(no, int | None):
            raise ModelError(f"{folder}: LogitScore needs true_token_id, and may have false_token_id")
        return Pooling(yes=yes, no=no, is_probability=_is_probability(folder, config))
    if _is_classifier(config):
        return Pooling(has_head=True, is_probability=_is_probability(folder, config))
    if "Pooling" not in modules:
        if lacks_head(folder):
            raise ModelError(f"{folder} has no head for next tokens, and its modules.json names no Pooling")
        return None
    given, any_ = config.get("matryoshka_dimensions"), config.get("is_matryoshka") is True
    sizes = [size for size in given if isinstance(size, int)] if isinstance(given, list) else []
    return Pooling(
        place=_read_place(folder / modules["Pooling"] / "config.json"),
        is_normalized="Normalize" in modules,
        dimensions=None if any_ and not sizes else tuple(sorted(sizes)),
    )


def lacks_head(folder: Path) -> bool:
    """Return True if a model for embeddings or scores has no layer for next tokens."""
    if is_gguf(folder):
        return False
    config = read_config_json(folder)
    if _is_classifier(config):
        return True
    if config.get("tie_word_embeddings") or not (folder / "modules.json").is_file():
        return False
    entries = (entry for path in weight_files(folder) for entry in read_header(path))
    return not any(entry.name.endswith("lm_head.weight") for entry in entries)


def _is_classifier(config: Mapping[str, Any]) -> bool:
    given = config.get("architectures")
    return isinstance(given, list) and any(str(name).endswith("ForSequenceClassification") for name in given)


def _read_modules(path: Path) -> dict[str, str]:
    """Return the folders of a sentence-transformers model's modules, by the last part of their types."""
    if not path.is_file():
        return {}
    try:
        with explained(ModelError, f"can't read {path}"):
            given = strict_json.read(path)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({first_lines(error)}); download it again") from error
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ModelError(f"{path} must be a list of modules; download it again")
    found = {str(one.get("type")).rpartition(".")[2]: str(one.get("path", "")) for one in given}
    known = ("Transformer", "Pooling", "Normalize", "LogitScore")
    if others := sorted(found.keys() - set(known)):
        raise ModelError(
            f"{path} has {', '.join(others)}, which kvq does not compute; it computes {', '.join(known)}"
        )
    if outside := next((name for name in found.values() if name.startswith("/") or ".." in name), None):
        raise ModelError(f"{path} names {outside!r}, which is outside of the model's folder")
    return found


def _read_place(path: Path) -> Any:
    """Return the place of the only mode in a Pooling module's config.json, of any version."""
    config = read_json(path)
    mode = config.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes += [
        _OLD_MODES.get(key.removeprefix("pooling_mode_"), key)
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(f"{path} asks for pooling by {modes}; kvq computes one of {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _is_probability(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return False if a cross-encoder's files say that its scores pass through no function."""
    place = folder / "config_sentence_transformers.json"
    both = (config.get("sentence_transformers"), read_json(place) if place.is_file() else None)
    names = [str(one.get("activation_fn", "")) for one in both if isinstance(one, dict)]
    return not any(name.endswith("Identity") for name in names)
