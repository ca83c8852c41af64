"""`kvq manifest`: digests of a model's files, used to detect flipped bits on every load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError


@click.command(name="manifest")
@click.argument("folder", metavar="MODEL", type=click.Path(path_type=Path))
@click.option(
    "--check", is_flag=True, help="Compare with the existing manifest; exit code 1 if a file differs."
)
@click.option(
    "--overwrite", is_flag=True, help="Write the manifest again, even if files differ from an older one."
)
def command(folder: Path, check: bool, overwrite: bool) -> None:
    """Write a manifest for MODEL, a folder or GGUF file, for example one written by another tool.

    In a folder, it is kvq-manifest.json; beside x.gguf, x.gguf.kvq-manifest.json, which lists all parts of a
    split model. After that, every load compares all files with the manifest. If MODEL already has a manifest,
    the files are only compared.
    """
    if check and overwrite:
        raise ConfigError("--check compares and --overwrite writes again; give one of them")
    place = _place(folder, is_written=not check)
    from kvq.models.gguf.files import read_gguf
    from kvq.sizes import decimal
    from kvq.weights.manifest import manifest_path, read_manifest, write_manifest

    manifest, files = manifest_path(place), None if overwrite else read_manifest(place)
    if files is None:
        if check:
            raise ConfigError(f"{place} has no {manifest.name}; kvq manifest {place} writes one")
        if not place.is_dir():
            read_gguf(place)  # a part may be missing
        files = _read_all(place, lambda on_read: write_manifest(place, on_read))
        done = "wrote"
    else:
        _compare(place, files, is_check=check)
        done = "nothing differs from"
    size = decimal(sum(nbytes for nbytes, _ in files.values()))
    echo(f"{done} {manifest}: {len(files)} file{'s' * (len(files) != 1)}, {size}")


def _place(model: Path, *, is_written: bool) -> Path:
    """Return a model's folder or first GGUF file.

    Raises:
        ConfigError: it is no model, or writing would change the hub's cache.
        ModelError: it is a file and no GGUF, or a folder of several models.
    """
    from kvq.models.describe.resolve import find_here, hub_name

    here = find_here(model) if model.exists() else None
    place = model if here is None or here.folder.is_dir() else here.folder
    if place == model and not (model.is_file() or (model / "config.json").is_file()):
        raise ConfigError(f"{model} is no model folder: it has no config.json; name one that is here")
    if is_written and (name := hub_name(place)) is not None:
        raise ConfigError(
            f"{place} belongs to the hub's cache, which only the hub's client writes to: check it with "
            f"`hf cache verify {name}`, or copy the model with `hf download {name} --local-dir FOLDER`"
        )
    return place


def _compare(place: Path, files: Any, *, is_check: bool) -> None:
    """Print every file that differs; if any file differs, fail the check or refuse to write."""
    from kvq.weights.manifest import find_faults

    faults = _read_all(place, lambda on_read: find_faults(place, files, on_read))
    for fault in faults:
        echo(f"kvq: {fault}", err=True)
    if faults and is_check:
        raise click.exceptions.Exit(1)
    if faults:
        raise ConfigError(
            f"{place} differs from its manifest, see above; nothing was written: copy the model again, or "
            f"give --overwrite if the files are as they should be"
        )


def _read_all(place: Path, work: Callable[[Callable[[int], object]], Any]) -> Any:
    """Run `work`, which reads the model's files, with a progress bar in MB."""
    from kvq.weights.manifest import listed_files

    total = sum(path.stat().st_size for path in listed_files(place) if path.exists())
    done = 0
    with progress_bar(f"reading {place}, MB") as progress:

        def on_read(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done // 10**6, max(1, total // 10**6))

        return work(on_read)
