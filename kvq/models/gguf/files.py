"""GGUF files of one model: a single one, or all parts of a split one."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from kvq.errors import ModelError
from kvq.formats.ggml import GgmlType, part_paths
from kvq.formats.tensor_entry import TensorEntry
from kvq.models.gguf.config import gguf_config
from kvq.models.gguf.header import read_gguf_header
from kvq.models.gguf.names import Source, find_sources

RECIPE = "kvq.recipe"  # key of the metadata: a KV recipe as JSON
_PROJECTOR = "mmproj"  # part of the names of files with a model's eyes or ears


class _GgufModel:
    """Description of a model in GGUF files, by their headers."""

    def __init__(
        self, paths: Sequence[Path], metadata: Mapping[str, Any], tensors: Iterable[TensorEntry]
    ) -> None:
        """`metadata`: of the first part; `tensors`: of all parts.

        Raises:
            ModelError: a tensor occurs twice.
        """
        self.paths, self.metadata = list(paths), metadata
        self.tensors: dict[str, TensorEntry] = {}  # by their names in GGUF
        for tensor in tensors:
            if (other := self.tensors.get(tensor.name)) is not None:
                raise ModelError(
                    f"tensor {tensor.name!r:.80} is in {other.path} and again in {tensor.path}; download "
                    f"the model again"
                )
            self.tensors[tensor.name] = tensor

    @cached_property
    def config(self) -> dict[str, Any]:
        """The dict that transformers' config.json would hold.

        Raises:
            ModelError: as for `gguf_config`.
        """
        return gguf_config(self.metadata, self.tensors, str(self.paths[0]))

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Places of the model's tensors, by transformers' names.

        Raises:
            ModelError: as for `find_sources`.
        """
        found = find_sources(self.metadata, self.tensors, self.config)
        return {source.tensor.name: source for source in found}

    @property
    def types(self) -> dict[str, GgmlType]:
        """Types in which matrices are stored, by the names of layers in modules of transformers."""
        found = [source.tensor for source in self.sources.values()]
        return {_in_module(tensor.name): tensor.kind for tensor in found if len(tensor.shape) > 1}


def _in_module(name: str) -> str:
    """Return a layer's name in a module; only Mixtral's checkpoints use others."""
    name = name.removesuffix(".weight").replace(".block_sparse_moe.", ".mlp.")
    for own, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = re.sub(rf"\.{own}$", f".{theirs}", name)
    return name


def read_gguf(path: Path) -> _GgufModel:
    """Return the description of the model that a GGUF file, or any part of a split one, belongs to.

    Raises:
        ModelError: a file is damaged or can't be read, or a part is missing or belongs to another model.
    """
    paths = part_paths(path)
    for part in paths:
        if not part.is_file():
            raise ModelError(
                f"{path} is one of {len(paths)} parts, but {part.name} is not there; download it"
            )
    stats = [part.stat() for part in paths]
    return _read(tuple(paths), tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=2)  # a model and its draft
def _read(paths: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> _GgufModel:
    """Read the headers; `stamps`: of the files, so that changed files are read again."""
    headers = [read_gguf_header(path) for path in paths]
    for number, (path, (metadata, _)) in enumerate(zip(paths, headers, strict=True)):
        said = metadata.get("split.no", 0), metadata.get("split.count", 1) or 1
        if said != (number, len(paths)) and (len(paths) > 1 or said[1] != 1):
            raise ModelError(
                f"{path} says that it is part {said[0]!r:.20} of {said[1]!r:.20}, counted from 0, and "
                f"its name stands for {number} of {len(paths)}; parts are called NAME-00001-of-00003.gguf"
            )
    return _GgufModel(paths, headers[0][0], (tensor for _, tensors in headers for tensor in tensors))


def find_gguf(folder: Path) -> Path | None:
    """Return the first file of a folder's only GGUF model; None if there is none, or if it holds safetensors.

    Raises:
        ModelError: the folder holds several models.
    """
    names = [one.name for one in folder.iterdir()]
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    found = {
        part_paths(folder / name)[0]
        for name in names
        if name.lower().endswith(".gguf") and _PROJECTOR not in name.lower()
    }
    if len(found) > 1:
        listed = ", ".join(sorted(path.name for path in found)[:20])
        raise ModelError(f"{folder} holds {len(found)} models as GGUF; name one of its files: {listed}")
    return next(iter(found), None)
