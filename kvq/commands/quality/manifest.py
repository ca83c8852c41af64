"""`kvq manifest`: digests of a model folder's files, used to detect flipped bits on every load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvq.commands.shared.progress import progress_bar
from kvq.commands.shared.terminal import echo
from kvq.errors import ConfigError


@click.command(name="manifest")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--check", is_flag=True, help="Compare with the existing manifest; exit code 1 if a file differs."
)
@click.option(
    "--overwrite", is_flag=True, help="Write the manifest again, even if files differ from an older one."
)
def command(folder: Path, check: bool, overwrite: bool) -> None:
    """Write kvq-manifest.json for the model in FOLDER, for example a model written by another tool.

    After that, every load compares all files with the manifest. If FOLDER already has a manifest, the files
    are only compared.
    """
    if check and overwrite:
        raise ConfigError("--check compares and --overwrite writes again; give one of them")
    _check_folder(folder, is_written=not check)
    from kvq.sizes import decimal
    from kvq.weights.manifest import MANIFEST, read_manifest, write_manifest

    files = None if overwrite else read_manifest(folder)
    if files is None:
        if check:
            raise ConfigError(f"{folder} has no {MANIFEST}; kvq manifest {folder} writes one")
        files = _read_all(folder, lambda on_read: write_manifest(folder, on_read))
        done = "wrote"
    else:
        _compare(folder, files, is_check=check)
        done = "nothing differs from"
    size = decimal(sum(nbytes for nbytes, _ in files.values()))
    echo(f"{done} {folder / MANIFEST}: {len(files)} files, {size}")


def _check_folder(folder: Path, *, is_written: bool) -> None:
    """Raise ConfigError if `folder` is not a model folder, or if writing would change the hub's cache."""
    from kvq.models.describe.resolve import hub_name

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json; name one that is here")
    if is_written and (name := hub_name(folder)) is not None:
        raise ConfigError(
            f"{folder} belongs to the hub's cache, which only the hub's client writes to: check it with "
            f"`hf cache verify {name}`, or copy the model with `hf download {name} --local-dir FOLDER`"
        )


def _compare(folder: Path, files: Any, *, is_check: bool) -> None:
    """Print every file that differs; if any file differs, fail the check or refuse to write."""
    from kvq.weights.manifest import find_faults

    faults = _read_all(folder, lambda on_read: find_faults(folder, files, on_read))
    for fault in faults:
        echo(f"kvq: {fault}", err=True)
    if faults and is_check:
        raise click.exceptions.Exit(1)
    if faults:
        raise ConfigError(
            f"{folder} differs from its manifest, see above; nothing was written: copy the model again, or "
            f"give --overwrite if the files are as they should be"
        )


def _read_all(folder: Path, work: Callable[[Callable[[int], object]], Any]) -> Any:
    """Run `work`, which reads the folder's files, with a progress bar in MB."""
    from kvq.weights.manifest import listed_files

    total = sum(path.stat().st_size for path in listed_files(folder))
    done = 0
    with progress_bar(f"reading {folder}, MB") as progress:

        def on_read(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done // 10**6, max(1, total // 10**6))

        return work(on_read)
