"""Finished layers on disk, from which an interrupted run continues."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save

from kvq import fileio, strict_json
from kvq.calib.quantize.layer import LayerResult, ModuleReport
from kvq.errors import ConfigError, explained, first_lines
from kvq.formats.weights import parse_weight_format
from kvq.kernels import QuantizedWeight

_VERSION = 1
_SETTINGS = "settings.json"
_PARTS = ("codes", "scale", "zero", "order")


def partial_folder(out: Path) -> Path:
    """Return the folder OUT.partial."""
    return out.with_name(f"{out.name}.partial")


def count_finished(folder: Path) -> int:
    """Return the number of consecutive finished layers, starting from the first."""
    count = 0
    while _layer_path(folder, count).is_file():
        count += 1
    return count


class Partial:
    """The folder OUT.partial, with a settings file and a file for each finished layer."""

    def __init__(self, out: Path, settings: dict[str, object], *, restart: bool) -> None:
        """`settings`: everything that determines the layers' bytes. `restart`: discard finished layers."""
        self.folder = partial_folder(out)
        self._settings = settings
        self._digest = hashlib.sha256(json.dumps([settings], sort_keys=True).encode()).hexdigest()
        self._restart = restart

    def check(self) -> None:
        """Raise ConfigError if the finished layers were quantized with other settings."""
        path = self.folder / _SETTINGS
        if self._restart or not path.is_file():
            return
        try:
            header = strict_json.read(path)
            known = header["format_version"] == _VERSION
            same, before = header["digest"] == self._digest, dict(header["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} can't be read ({first_lines(error)}); start anew with --restart"
            ) from error
        if known and same:
            return
        changed = [
            f"{name} {before.get(name)!r}, now {value!r}"
            for name, value in self._settings.items()
            if before.get(name) != value
        ]
        raise ConfigError(
            f"{self.folder} was begun otherwise ({'; '.join(changed) or 'by another version of kvq'}); "
            f"use those settings again, or --restart to throw it away"
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder if necessary, and lock it for this process while the context is open.

        Raises:
            ConfigError: the folder was created with other settings, is in use, or can't be created.
        """
        with explained(ConfigError, f"can't make {self.folder}"):
            self.folder.mkdir(exist_ok=True)
            lock = _locked(self.folder)
        try:
            for path in self.folder.iterdir() if self._restart else ():
                path.unlink()
            self.check()
            if not (path := self.folder / _SETTINGS).is_file():
                header = {"format_version": _VERSION, "digest": self._digest, "settings": self._settings}
                fileio.write_text(path, json.dumps(header, indent=1) + "\n")
            yield
        finally:
            os.close(lock)

    def save(self, index: int, result: LayerResult) -> None:
        """Write a finished layer to the folder."""
        tensors = {
            f"{part}/{name}": tensor.cpu().contiguous()
            for name, weight in result.weights.items()
            for part in _PARTS
            if (tensor := getattr(weight, part)) is not None
        } | {f"parameter/{name}": tensor.contiguous() for name, tensor in result.parameters.items()}
        facts = {
            "formats": {name: weight.fmt.name for name, weight in result.weights.items()},
            "rows": [asdict(row) for row in result.rows],
            "skipped": result.skipped,
        }
        fileio.write_bytes(_layer_path(self.folder, index), save(tensors, {"kvq": json.dumps(facts)}))

    def load(self, index: int) -> LayerResult:
        """Read a finished layer.

        Raises:
            ConfigError: the file is damaged.
        """
        path = _layer_path(self.folder, index)
        try:
            with safe_open(path, "pt") as file:
                facts = strict_json.loads(file.metadata()["kvq"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            result = LayerResult(
                weights={
                    name: QuantizedWeight(
                        fmt=parse_weight_format(fmt),
                        codes=tensors[f"codes/{name}"],
                        scale=tensors[f"scale/{name}"],
                        zero=tensors.get(f"zero/{name}"),
                        order=tensors.get(f"order/{name}"),
                    )
                    for name, fmt in facts["formats"].items()
                },
                rows=[ModuleReport(**row) for row in facts["rows"]],
                skipped=facts["skipped"],
            )
        except Exception as error:  # the parsers may raise anything for a damaged file
            raise ConfigError(
                f"{path} is damaged ({first_lines(error)}); start anew with --restart"
            ) from error
        mark = "parameter/"
        result.parameters = {n.removeprefix(mark): x for n, x in tensors.items() if n.startswith(mark)}
        return result

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _layer_path(folder: Path, index: int) -> Path:
    return folder / f"layer-{index:05}.safetensors"


def _locked(folder: Path) -> int:
    """Return a descriptor that locks the folder until it is closed or this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another kvq quantize is writing {folder}; wait until it is done, or name another --out"
        ) from error
    return descriptor
