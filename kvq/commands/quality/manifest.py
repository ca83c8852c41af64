"""`kvq manifest`: digests of a model folder's files, by which each load finds flipped bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError


@click.command(name="manifest")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Compare with the manifest that is there; 1 if a file differs.")
@click.option("--overwrite", is_flag=True, help="Write anew, also where files differ from an older manifest.")
def command(folder: Path, check: bool, overwrite: bool) -> None:
    """Write kvq-manifest.json for the model in FOLDER, such as one of other tools.

    From then on every load compares all files with it. A folder that has one is compared, and left alone.
    """
    if check and overwrite:
        raise ConfigError("--check compares and --overwrite writes anew; give one of them")
    _check_folder(folder, is_written=not check)
    from kvq.sizes import decimal
    from kvq.weights.manifest import MANIFEST, read_manifest, write_manifest

    files = None if overwrite else read_manifest(folder)
    if files is None:
        if check:
            raise ConfigError(f"{folder} has no {MANIFEST}; kvq manifest {folder} writes one")
        files = _shown(folder, lambda tell: write_manifest(folder, tell))
        done = "wrote"
    else:
        _compare(folder, files, is_check=check)
        done = "nothing differs from"
    size = decimal(sum(file.nbytes for file in files.values()))
    echo(f"{done} {folder / MANIFEST}: {len(files)} files, {size}")


def _check_folder(folder: Path, *, is_written: bool) -> None:
    """Raise ConfigError unless it is a model's folder, and not one of the hub's cache if it is written to."""
    from kvq.models.describe.resolve import hub_name

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json; name one that is here")
    if is_written and (name := hub_name(folder)) is not None:
        raise ConfigError(
            f"{folder} belongs to the hub's cache, which only the hub's client writes to: check it with "
            f"`hf cache verify {name}`, or copy the model with `hf download {name} --local-dir FOLDER`"
        )


def _compare(folder: Path, files: Any, *, is_check: bool) -> None:
    """Name every file that differs: of a check a failure, else a refusal to write over the manifest."""
    from kvq.weights.manifest import find_faults

    faults = _shown(folder, lambda tell: find_faults(folder, files, tell))
    for fault in faults:
        echo(f"kvq: {fault}", err=True)
    if faults and is_check:
        raise click.exceptions.Exit(1)
    if faults:
        raise ConfigError(
            f"{folder} differs from its manifest, see above; nothing was written: copy the model again, or "
            f"give --overwrite if the files are as they should be"
        )


def _shown(folder: Path, work: Callable[[Callable[[int], object]], Any]) -> Any:
    """Do work that reads the folder's files under a progress bar of their bytes, in MB."""
    from kvq.commands.shared.progress import progress_bar
    from kvq.weights.manifest import listed_files

    total = sum(path.stat().st_size for path in listed_files(folder))
    done = 0
    with progress_bar(f"reading {folder}, MB") as progress:

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done // 10**6, max(1, total // 10**6))

        return work(tell)
