"""Resolution of model names (of embedded models, folders or hub models) to folders, done once."""

import importlib
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import ConfigError, ModelError, first_lines, nearest
from kvq.formats.ggml import part_paths
from kvq.models.gguf.files import find_gguf
from kvq.models.gguf.header import has_magic

_HERE = Path(__file__).parents[1]
EMBEDDED = {"tiny": _HERE / "tiny", "tiny-draft": _HERE / "tiny_draft"}
_CALLED = {"tiny": "the embedded model", "tiny-draft": "the embedded draft model"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HUB_FILES = [*_SMALL_FILES, "*.safetensors"]
_log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:  # D208: a resolved path is a type, never a name again
    """Location of a resolved model."""

    folder: Path  # absolute, links followed; of a model in GGUF files, the first of them
    name: str  # for tables and clients: the last part of the name given
    is_embedded: bool = False
    repository: str | None = None  # on the hub
    revision: str | None = None  # its commit

    def __str__(self) -> str:
        """Return the place in words; for a hub model, its name and commit instead of the cache folder."""
        if self.is_embedded:
            return f"{self.name}, {_CALLED[self.name]}"
        return str(self.folder) if self.repository is None else f"{self.repository} at {self.revision}"


def resolve_model(
    model: str | os.PathLike[str] | ModelSource,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
) -> ModelSource:
    """Find a model, downloading it from the hub if it is neither local nor embedded.

    A string is read as an embedded model's name, else as an existing folder or GGUF file, else as a hub name.
    A `Path` is always a folder or file. Without `weights`, only the small files of a hub model are
    downloaded.

    Raises:
        ModelError: the folder does not exist, or the hub model is missing, gated or unreachable.
        ConfigError: `revision` is passed for a model that is not on the hub.
    """
    if isinstance(model, ModelSource):
        return model
    local, name = find_here(model), os.fspath(model)
    if local is not None and revision is not None:
        raise ConfigError(f"--revision {revision} names a version on the hub, but {name} is here; drop it")
    if local is not None:
        return local
    folder = _download(name, revision, token, _HUB_FILES if weights else _SMALL_FILES)
    # The hub's cache names folders after the commit that they contain
    commit = folder.name if hub_name(folder) is not None else revision or "main"
    return ModelSource(folder=folder, name=Path(name).name, repository=name, revision=commit)


def find_here(model: str | os.PathLike[str]) -> ModelSource | None:
    """Return the embedded model or the folder of this name, or None if the name can only be a hub name.

    Raises:
        ModelError: nothing of this name exists, and it is not a valid hub name.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else model
    if not isinstance(name, str):
        raise ModelError(f"a model is named by a text or a Path, got {name!r:.100}")
    if isinstance(model, str) and name in EMBEDDED:
        if Path(name).is_dir():
            _log.warning("%r is %s; for the folder of that name write ./%s", name, _CALLED[name], name)
        return ModelSource(folder=EMBEDDED[name].resolve(), name=name, is_embedded=True)
    if (local := _local(name)) is not None:
        return local
    if not isinstance(model, str) or name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"there is no folder {name}; give a Hugging Face model folder, a GGUF file, a hub name or 'tiny'"
        )
    if name.lower().endswith(".gguf"):
        raise ModelError(f"there is no file {name}; give the path of a GGUF file that is here")
    if "/" not in name and (hint := nearest(name, EMBEDDED)):
        raise ModelError(f"there is no model {name!r}{hint} or give a folder, or a hub name such as org/name")
    return None


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a model's tokenizer; the embedded draft model uses the embedded model's."""
    is_draft = folder.resolve() == EMBEDDED["tiny-draft"].resolve()
    return EMBEDDED["tiny"].resolve() if is_draft else folder


def _local(name: str) -> ModelSource | None:
    if not name.strip():
        raise ModelError("the model's name is empty; give a folder, a GGUF file, a hub name or 'tiny'")
    try:
        path = Path(name).expanduser()
        last = path.name if path.name not in ("", "..") else path.resolve().name  # resolve names made of dots
        if path.is_file():
            if not has_magic(path):
                raise ModelError(
                    f"{name} is a file and no GGUF; name a GGUF file, or the folder that holds config.json "
                    f"and the weights"
                )
            place = path.parent.resolve() / path.name  # a link's own name says which part it is
            return ModelSource(folder=part_paths(place)[0], name=last)
        if not path.is_dir():
            return None
        return ModelSource(folder=find_gguf(path.resolve()) or path.resolve(), name=last)
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL
        raise ModelError(f"there is no folder {name[:100]!r}: {first_lines(error, 100)}") from error


def hub_name(folder: Path) -> str | None:
    """Return the hub name of a folder in the hub client's cache, or of a file in it; None for others."""
    place = (folder if folder.is_dir() else folder.parent).resolve().parent
    if place.name != "snapshots":
        return None
    return place.parent.name.removeprefix("models--").replace("--", "/")


def _download(name: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, token=token, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on its hub page, then run `hf auth login` or pass --token"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{name} has no revision {revision!r}; see its branches and tags on the hub"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name} here and no public model of that name on the hub; check the "
            f"spelling, or pass --token if it is private"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder here nor a valid hub name (org/name)") from error
    except _transport_errors() as error:
        raise ModelError(
            f"{name} is not a folder here and the hub can't be reached ({type(error).__name__}); check the "
            f"network and try again, a broken download resumes, or give a local folder"
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the base exceptions of huggingface_hub's HTTP clients; its own errors are OSErrors."""
    found: list[type[Exception]] = [OSError]
    for name in ("httpx2", "httpx"):
        with suppress(ImportError):
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)
